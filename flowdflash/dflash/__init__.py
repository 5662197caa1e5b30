"""The DFlash method: model, anchors, mask, loss, optimizer, decoding, export. It knows nothing of pipelines."""
