"""The library ``speculators`` on a draft of ours: ``python benchmarks/speculators_client.py runs/first``.

Needs ``pip install speculators==0.9.0`` beside flowdflash. The draft is exported with ``--format speculators`` and
loaded by its own class, which must find every tensor and no other. On random states both must give the same logits in
fp32. What the library saves again is imported once more and must be the same draft. Exits with 1 at a difference.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from speculators import DFlashDraftModel

from flowdflash.cli.export_command import export_draft
from flowdflash.dflash.importing import ImportedDraft, load_draft
from flowdflash.dflash.mask import draft_mask
from flowdflash.dflash.model import DFlashDraft
from flowdflash.stage import SilentReport
from flowdflash.target.quiet import quiet

CONTEXT = 40


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder of a run, of a checkpoint or of an export")
    parser.add_argument("--target", help="the target; default: what the checkpoint says")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, quiet():
        return check(Path(folder), given.checkpoint, given.target)


def check(scratch: Path, checkpoint: Path, target: str | None) -> int:
    """Export, load there, compare, save there, import."""
    out = export_draft(checkpoint, scratch / "out", SilentReport(), style="speculators", dtype="float32", target=target)
    draft = load_draft(out)
    theirs, info = DFlashDraftModel.from_pretrained(out, output_loading_info=True)
    # Its compiled attention is for GPUs; without a mask, one block sees all of its context here as well.
    theirs.config.transformer_layer_config._attn_implementation = "sdpa"
    found = {kind: sorted(map(str, info[kind])) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    state = theirs.state_dict()
    equal = sum(torch.equal(state[name], tensor) for name, tensor in draft.tensors.items())
    apart = logits_apart(draft, theirs.eval())
    theirs.save_pretrained(scratch / "back")
    back = load_draft(scratch / "back", num_target_layers=draft.config.num_target_layers)
    same = back.config == draft.config and all(torch.equal(t, draft.tensors[n]) for n, t in back.tensors.items())
    print(f"keys that do not fit       {found}")
    print(f"tensors equal              {equal} of {len(draft.tensors)}")
    print(f"capture layers             {theirs.target_layer_ids}, ours are {list(draft.config.target_layer_ids)}")
    print(f"largest logit difference   {apart:.2g}")
    print(f"saved there, imported here {'the same draft' if same else 'another draft'}")
    return 0 if not any(found.values()) and equal == len(draft.tensors) and apart < 1e-3 and same else 1


@torch.inference_mode()
def logits_apart(draft: ImportedDraft, theirs: Any) -> float:
    """How far apart the logits of one block are, on random states of the target."""
    config = draft.config
    own = DFlashDraft(config, seed=None)
    own.load_state_dict(dict(draft.tensors), strict=True, assign=True)
    rng = torch.Generator().manual_seed(0)
    states = torch.randn(1, CONTEXT, config.num_features * config.hidden_size, generator=rng)
    block = torch.tensor([[7] + [config.mask_token_id] * (config.block_size - 1)])
    positions = torch.arange(CONTEXT + config.block_size)[None]
    embeds = theirs.embed_tokens(block)
    cache = own.new_cache(1, CONTEXT)
    own.extend(cache, states, positions[:, :CONTEXT])
    mask = draft_mask(torch.tensor([CONTEXT]), torch.tensor([config.block_size]), context=CONTEXT, slots=block.shape[1])
    ours = own.propose(embeds, cache, positions[:, CONTEXT:], mask, CONTEXT)
    context, hidden = theirs.hidden_norm(theirs.fc(states)), embeds
    rotary = theirs.rotary_emb(states, positions)
    for layer in theirs.layers:
        hidden = layer(
            hidden_states=hidden,
            target_hidden=context,
            attention_mask=None,
            position_ids=positions,
            use_cache=False,
            position_embeddings=rotary,
        )
    return float((theirs.lm_head(ours) - theirs.lm_head(theirs.norm(hidden))).abs().max())


if __name__ == "__main__":
    sys.exit(main())
