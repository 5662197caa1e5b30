"""The DFlash method: model, anchors, mask, loss, optimizer, decoding, export. Needs torch; knows nothing of pipelines."""
