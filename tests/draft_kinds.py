"""What every kind of draft must do: train, go on after a stop, be exported, read back, and decode without loss."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cli_runs import TINY, json_lines
from drafter_fakes import SHAPE as SMALL
from drafter_fakes import batch, lively, opened
from ruamel.yaml import YAML

from flowdflash import stages
from flowdflash.cli.export_command import export_draft
from flowdflash.config.check import load_text
from flowdflash.dflash.acceptance import answer_runs, walk
from flowdflash.dflash.config import DraftConfig, tensor_shapes
from flowdflash.dflash.decode import greedy, speculative_decode
from flowdflash.dflash.export import load_zlab
from flowdflash.dflash.sampling import Sampling
from flowdflash.doctor.patient import Patient
from flowdflash.errors import ModelInvalid
from flowdflash.items import Checkpoint
from flowdflash.plugin.loader import load_plugins
from flowdflash.stage import SilentReport
from flowdflash.target.load import load_target
from flowdflash.testing import run_pipeline

# Six tokens: random drafts are right often enough for every acceptance length to occur.
SIX = 'toy:{"hidden_size":32,"num_layers":4,"heads":4,"kv_heads":2,"head_dim":8,"vocab_size":6}'
SHAPE = {**SMALL, "vocab_size": 6, "mask_token_id": 5}


def decodes_losslessly(config: DraftConfig, cache: Path) -> None:
    """Greedy, its tokens are the target's; it accepts what teacher forcing says; batch mates make no difference."""
    target, draft = load_target(SIX, cache, dtype="float32", device="cpu").model, lively(config)
    prompts, span = [[1, 2, 3], [4], [0, 3, 3, 1, 2, 0, 4]], config.span(config.block_size)
    results = speculative_decode(target, draft, prompts, max_new_tokens=30)
    assert [r.tokens for r in results] == greedy(target, prompts, max_new_tokens=30)
    for prompt, result in zip(prompts, results, strict=True):
        assert max(result.proposed) == span - 1
        runs = answer_runs(target, draft, [*prompt, *result.tokens], len(prompt))
        assert tuple(walk(runs)) == result.produced
    assert len({n for r in results for n in r.produced}) > 1, "all blocks are accepted alike: the test shows nothing"
    sampled = {"max_new_tokens": 12, "sampling": Sampling(temperature=1.0, seed=3)}
    together = speculative_decode(target, draft, prompts, **sampled)
    assert together == speculative_decode(target, draft, prompts, batch_size=1, **sampled)


def learns(cls: Any, tmp_path: Path, **options: Any) -> None:
    """Thirty steps on one batch."""
    drafter = opened(tmp_path, cls=cls, lr=1e-2, schedule="constant", **options)
    items = [record for _ in range(30) for record in drafter.step(batch(0))]
    assert items[-1].loss < 0.5 * items[0].loss and items[-1].accuracy > items[0].accuracy


def resumes_exactly(cls: Any, tmp_path: Path, **options: Any) -> None:
    """Four steps at once, and two and two with a checkpoint between them, give the same weights."""
    due = {"due": lambda step, reason: reason == "interrupted"}
    straight, first, second = (opened(tmp_path, cls=cls, **due, **options) for _ in range(3))
    for i in range(4):
        list(straight.step(batch(i)))
    for i in range(2):
        list(first.step(batch(i)))
    (checkpoint,) = first.finish("interrupted")
    assert isinstance(checkpoint, Checkpoint) and checkpoint.draft_tensors.keys() == straight.trainer.weights().keys()
    second.resume(checkpoint)
    for i in range(2, 4):
        list(second.step(batch(i)))
    whole, after = straight.trainer.weights(), second.trainer.weights()
    assert all(torch.equal(whole[name], after[name]) for name in whole)
    assert not all(torch.equal(whole[name], checkpoint.draft_tensors[name]) for name in whole)


def trains_and_exports(plugin: ModuleType, tmp_path: Path, target: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The tiny pipeline with a drafter of this plugin; its exported config."""
    tree = YAML(typ="safe").load(TINY.read_text())
    tree["stages"]["corpus"] |= {"epochs": 1}
    tree["stages"]["target"] |= target
    tree["stages"]["drafter"] |= {"accumulate": 1, "num_hidden_layers": 1, "lr": 1e-2, **options}
    tree["stages"]["acceptance"] |= {"num_prompts": 2, "max_new_tokens": 8}
    plugins = load_plugins(builtin=[stages, plugin])
    outcome = run_pipeline(tree, run_dir=tmp_path / "run", plugins=plugins)
    assert outcome.status == "finished", outcome
    losses = [record["loss"] for record in json_lines(tmp_path / "run" / "metrics.jsonl")]
    assert len(losses) >= 20 and sum(losses[-5:]) < sum(losses[:5])
    before, after = json_lines(tmp_path / "run" / "evaluations.jsonl")
    assert before["identical"] == after["identical"] == after["prompts"] == 2
    assert before["step"] == 0 < after["step"] and after["tau_gen"] >= 1

    checkpoints = tmp_path / "run" / "checkpoints"
    newest = checkpoints / (checkpoints / "latest").read_text().strip()
    config, draft = load_zlab(newest / "draft")
    saved = torch.load(newest / "state.pt", weights_only=True)["tensors"]
    stored = draft.state_dict()
    assert {name: tuple(t.shape) for name, t in stored.items()} == tensor_shapes(config) and set(stored) == set(saved)
    assert all(torch.equal(stored[name], saved[name].to(torch.bfloat16)) for name in saved)

    again = export_draft(tmp_path / "run", tmp_path / "again", SilentReport(), style="zlab", dtype="float32")
    loaded, full = load_zlab(again)
    assert loaded == config and all(torch.equal(saved[name], t) for name, t in full.state_dict().items())
    with pytest.raises(ModelInvalid, match=f"is a {config.architecture}; only DFlash drafts"):
        Patient(
            tmp_path / "run",
            lambda text, base: load_text(text, plugins, base),
            cache_dir=tmp_path,
            report=SilentReport(),
        )
    raw: dict[str, Any] = json.loads((newest / "draft" / "config.json").read_text())
    return raw
