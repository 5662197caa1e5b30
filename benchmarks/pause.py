"""How long training stands still for a checkpoint: the copy that the drafter waits for, against saving in its place.

The same state of the same draft each time: weights and the two moments of AdamW, all in fp32. Copy: what the training
thread does for a checkpoint. Save: what it would do without a thread for the sink: copy, write, hash, sync, rename.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from flowdflash_checkpoint import CheckpointSink

from flowdflash.dflash.config import DraftConfig
from flowdflash.dflash.export import zlab_config
from flowdflash.dflash.model import DFlashDraft
from flowdflash.items import Checkpoint
from flowdflash.stage import OpenContext
from flowdflash.training.trainer import Trainer

CONFIG = DraftConfig(
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    vocab_size=256,
    block_size=8,
    mask_token_id=255,
    target_layer_ids=(0, 1),
    num_target_layers=4,
    rope_theta=10000.0,
)


def trained() -> Any:
    """A draft of some 50 M parameters after one optimizer step, and its optimizer."""
    draft = DFlashDraft(CONFIG, seed=0)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-3)
    for parameter in draft.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return SimpleNamespace(draft=draft, optimizer=optimizer)


def snapshot(of: Any, step: int) -> Checkpoint:
    """As the drafter takes it."""
    weights, moments = Trainer.weights(of), Trainer.moments(of)
    config = zlab_config(CONFIG, provenance={"step": step})
    return Checkpoint(step, 0, "every", config, weights, {"optimizer": moments}, {"prefix": 0, "extras": []})


def timed(rounds: int, of: Any, folder: Path) -> dict[str, list[float]]:
    """Seconds per round of both; they alternate, so that a change of load meets both alike."""
    sink = CheckpointSink(CheckpointSink.Config(every_steps=1, keep=1))
    sink.open(OpenContext("save", folder, folder))
    secs: dict[str, list[float]] = {"copy": [], "save": []}
    for step in range(1, rounds + 1):
        began = time.perf_counter()
        snapshot(of, step)
        secs["copy"].append(time.perf_counter() - began)
        began = time.perf_counter()
        sink.write(snapshot(of, step))
        secs["save"].append(time.perf_counter() - began)
    return secs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds; the median counts")
    options = parser.parse_args()
    of = trained()
    held = snapshot(of, 0)
    print(f"{CONFIG.num_parameters / 1e6:.1f} M parameters, {held.nbytes / 2**20:,.0f} MiB of state")
    with tempfile.TemporaryDirectory() as folder:
        secs = timed(options.rounds, of, Path(folder))
    middle = {name: statistics.median(times) for name, times in secs.items()}
    print(f"{'training stands still for':28} {'median s':>9} {'min':>7} {'max':>7}")
    for name, label in (("copy", "the copy (background save)"), ("save", "a synchronous save")):
        print(f"{label:28} {middle[name]:>9.3f} {min(secs[name]):>7.3f} {max(secs[name]):>7.3f}")
    print(f"the pause is {middle['save'] / middle['copy']:.1f} times shorter")


if __name__ == "__main__":
    main()
