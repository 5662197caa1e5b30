"""Tiny runs to examine: a toy target's own answers, a draft that has learnt them, and ways to break it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cli_runs import invoke
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowdflash.config.check import load_text
from flowdflash.dflash.decode import greedy
from flowdflash.doctor import Finding, Patient, examine
from flowdflash.plugin.loader import load_plugins
from flowdflash.stage import SilentReport
from flowdflash.target.load import load_target
from flowdflash.target.toy import ToyModel

TOY = ToyModel(num_layers=6, vocab_size=64).ref
PIPELINE = """
version: 1
name: toy
seed: 7
stages:
  corpus: {kind: source, type: tokens, path: rows.jsonl, max_length: 64, epochs: 100}
  buckets: {kind: bucketer, type: length, inputs: corpus, buckets: 1, token_budget: 576}
  order: {kind: interleaver, type: stratified, inputs: buckets}
  dispatch: {kind: dispatcher, type: pull, inputs: order}
  target: {kind: target-forward, type: toy, inputs: dispatch, num_layers: 6, vocab_size: 64, layers: [1, 4]}
  drafter: {kind: drafter, type: dflash, inputs: target, block_size: 4, num_hidden_layers: 1, num_anchors: 16, lr: 1e-2,
            rope_theta: 1e4, mask_token_id: 63, device: cpu}
  metrics: {kind: sink, type: jsonl, inputs: drafter.records}
  save: {kind: sink, type: checkpoint, inputs: drafter.checkpoints}
"""


def make_run(folder: Path, cache: Path) -> Path:
    """A run that has learnt the toy's greedy answers to a dozen prompts of random tokens."""
    folder.mkdir(parents=True)
    prompts = np.random.default_rng(0).integers(0, 63, (12, 8)).tolist()
    answers = greedy(load_target(TOY, cache, dtype="float32", device="cpu").model, prompts, max_new_tokens=40)
    rows = [{"input_ids": [*p, *a], "loss_mask": [0] * 8 + [1] * 40} for p, a in zip(prompts, answers, strict=True)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "pipeline.yaml").write_text(PIPELINE)
    result = invoke("run", folder / "pipeline.yaml", "--run-dir", folder / "run", cache=cache)
    assert result.exit_code == 0, result.stderr
    return folder / "run"


def copied(run: Path, folder: Path) -> Path:
    """A run to break; its data stays where it is."""
    return Path(shutil.copytree(run, folder / "broken"))


def draft_of(run: Path) -> Path:
    """The draft of a run's last checkpoint."""
    return run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip() / "draft"


def edit_config(draft: Path, changes: Mapping[str, Any]) -> None:
    """Change entries by dotted name; None takes one out."""
    path = draft / "config.json"
    raw = json.loads(path.read_text())
    for dotted, value in changes.items():
        *parents, name = dotted.split(".")
        table = raw
        for parent in parents:
            table = table[parent]
        table[name] = value
        if value is None:
            del table[name]
    path.write_text(json.dumps(raw))


def edit_weight(draft: Path, name: str, change: Callable[[Tensor], Tensor], *, in_state: bool = False) -> None:
    """Put another tensor into the export, and into what training goes on from."""
    path, state = draft / "model.safetensors", draft.with_name("state.pt")
    tensors = load_file(path)
    save_file({**tensors, name: change(tensors[name]).contiguous()}, path, metadata={"format": "pt"})
    if in_state:
        held = torch.load(state, weights_only=True)
        held["tensors"][name] = change(held["tensors"][name]).contiguous()
        torch.save(held, state)


def edit_records(run: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change what the last 60 steps recorded."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[-60:] = [{**line, **change(line)} for line in lines[-60:]]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def resealed(run: Path) -> Path:
    """The run, its checkpoint's list of files agreeing with what they are now."""
    folder = draft_of(run).parent
    manifest = json.loads((folder / "checkpoint.json").read_text())
    for name in manifest["files"]:
        content = (folder / name).read_bytes()
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "checkpoint.json").write_text(json.dumps(manifest))
    return run


def patient(path: Path, cache: Path, **options: Any) -> Patient:
    def load(text: str, base: Path) -> Any:
        from flowdflash import stages

        return load_text(text, load_plugins(builtin=[stages]), base)

    return Patient(path, load, cache_dir=cache, report=SilentReport(), device="cpu", **options)


def examined(path: Path, cache: Path, **options: Any) -> list[Finding]:
    return examine(patient(path, cache, **options))


def faults(found: list[Finding]) -> dict[str, str]:
    """What was found to be wrong: name and sentence."""
    return {finding.name: finding.text for finding in found if finding.status == "fault"}
