"""The pipelines that ship: valid, drawn, and the tiny one run in every way that must not change its losses."""

from __future__ import annotations

import json
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from cli_runs import ROOT, TINY, invoke, json_lines, overrides
from ruamel.yaml import YAML
from runtime_fakes import headers

from flowdflash import stages
from flowdflash.config.check import load
from flowdflash.plugin.loader import load_plugins
from flowdflash.testing import run_pipeline

PIPELINES = sorted((ROOT / "pipelines").glob("*.yaml"))
RECORD_KEYS = {
    *("loss", "grad_norm", "grad_norm_clipped", "lr", "tokens", "terms", "buckets", "length_mean", "length_max"),
    *("padding", "accuracy", "checkpoint_pause_secs", "waits_secs"),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def data_of(file: Path, folder: Path) -> list[str]:
    """Overrides for the pipeline whose data everybody brings along."""
    if file.stem != "qwen3-8b":
        return []
    rows, prompts = folder / "rows.jsonl", folder / "prompts.jsonl"
    for path in (rows, prompts):
        path.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    return overrides({"vars.data": rows, "vars.prompts": prompts})


def test_the_pipelines_are_there() -> None:
    assert {"dflash", "qwen3-8b", "regenerate", "tiny"} <= {file.stem for file in PIPELINES}


@pytest.mark.parametrize("file", PIPELINES, ids=lambda file: file.stem)
def test_every_pipeline_is_valid_without_a_warning(file: Path, tmp_path: Path) -> None:
    result = invoke("validate", file, "--strict", *data_of(file, tmp_path))
    assert result.exit_code == 0, result.stdout
    assert (len(result.stdout.splitlines()), result.stderr) == (1, "")


@pytest.mark.parametrize("file", PIPELINES, ids=lambda file: file.stem)
def test_every_pipeline_is_drawn(file: Path, tmp_path: Path) -> None:
    drawn = {
        style: invoke("graph", file, "--format", style, *data_of(file, tmp_path)).stdout
        for style in ("svg", "mermaid", "dot")
    }
    names = list(YAML(typ="safe").load(file)["stages"])
    root = ElementTree.fromstring(drawn["svg"])
    assert root.tag.endswith("svg") and float(root.get("width", "0").removesuffix("px") or 1) > 0
    words = set(" ".join(root.itertext()).split())
    assert set(names) <= words
    assert drawn["mermaid"].lstrip().startswith(("flowchart", "graph", "---", "%%"))
    assert drawn["dot"].lstrip().startswith("digraph")
    for style in ("mermaid", "dot"):
        assert not [name for name in names if name not in drawn[style]], style


def tree_of_tiny(**changes: Any) -> dict[str, Any]:
    """The tiny pipeline as a mapping; ``changes`` are options by ``stage__option``, or settings of the pipeline."""
    tree: dict[str, Any] = YAML(typ="safe").load(TINY)
    for name, value in changes.items():
        stage, _, option = name.partition("__")
        if option:
            tree["stages"][stage][option] = value
        else:
            tree[name] = value
    return tree


@pytest.fixture(scope="module")
def by_command(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A run of the tiny pipeline by the command, as a newcomer starts it."""
    run = tmp_path_factory.mktemp("tiny") / "run"
    result = invoke("run", TINY, "--run-dir", run, cache=cache)
    assert result.exit_code == 0, result.stderr
    return run


def losses(run: Path) -> list[tuple[float, float, float]]:
    return [(r["loss"], r["grad_norm"], r["accuracy"]) for r in json_lines(run / "metrics.jsonl")]


@pytest.mark.timeout(60)
def test_the_tiny_run_leaves_a_record_per_step_with_every_key(by_command: Path) -> None:
    records = json_lines(by_command / "metrics.jsonl")
    outcome = json.loads((by_command / "outcome.json").read_text())
    assert [r["step"] for r in records] == list(range(1, 13)) and outcome["steps"] == 12
    for record in records:
        assert set(record) >= RECORD_KEYS
        assert 0 < record["grad_norm_clipped"] <= 1.0 + 1e-6 and record["loss"] > 0 and record["terms"] > 0
        assert record["grad_norm_clipped"] <= record["grad_norm"] * (1 + 1e-6)
        assert record["lr"] > 0 and 0 <= record["padding"] < 1 and 0 <= record["accuracy"] <= 1
        assert record["length_mean"] <= record["length_max"] <= 64
        assert "target->drafter" in record["waits_secs"] and min(record["waits_secs"].values()) >= 0
    assert sum(r["tokens"] for r in records) == outcome["tokens"]
    assert sum(r["samples"] for r in records) == outcome["samples"] == 192
    buckets = sum((Counter(r["buckets"]) for r in records), Counter())
    assert dict(buckets) == outcome["batches_per_bucket"]


def test_the_pause_for_a_checkpoint_is_told_where_it_fell(by_command: Path) -> None:
    # Snapshots before the first step (for the evaluator) and after the tenth: told by the record that follows.
    pauses = {r["step"]: r["checkpoint_pause_secs"] for r in json_lines(by_command / "metrics.jsonl")}
    assert {step for step, secs in pauses.items() if secs > 0} == {1, 11}


def test_every_window_spans_the_buckets_as_planned(by_command: Path, tmp_path: Path) -> None:
    pipeline = load(TINY, load_plugins(builtin=[stages]))
    size, mixes, together = pipeline.graph.nodes["drafter"].config.accumulate, [], 0
    for _, epoch in groupby(headers(pipeline.graph, pipeline.seed, tmp_path), key=lambda info: info.epoch):
        order = [info.bucket for info in epoch]
        for at in range(0, len(order), size):
            window = Counter(order[at : at + size])
            mixes.append({str(bucket): count for bucket, count in sorted(window.items())})
            together += len(window) > 1
            others_left = set(order[at:]) - set(window)
            assert len(window) > 1 or not others_left, f"{window} while {others_left} had batches left"
    assert [r["buckets"] for r in json_lines(by_command / "metrics.jsonl")] == mixes
    assert len(mixes) == 12 and together == 10, "21 batches an epoch: every full window spans buckets"


def test_the_tiny_run_keeps_checkpoints_and_evaluations(by_command: Path) -> None:
    from flowdflash.dflash.export import load_zlab

    folders = sorted(p.name for p in (by_command / "checkpoints").glob("step-*"))
    assert folders == ["step-000010", "step-000012"]
    assert (by_command / "checkpoints" / "latest").read_text().strip() == "step-000012"
    config, _ = load_zlab(by_command / "checkpoints" / "step-000012" / "draft")
    assert (config.block_size, config.mask_token_id, config.vocab_size) == (4, 127, 128)
    evaluations = json_lines(by_command / "evaluations.jsonl")
    assert [(e["step"], e["identical"], e["prompts"]) for e in evaluations] == [(0, 4, 4), (12, 4, 4)]


@pytest.mark.timeout(60)
def test_the_same_pipeline_in_process_has_the_same_losses(by_command: Path, tmp_path: Path) -> None:
    outcome = run_pipeline(tree_of_tiny(), run_dir=tmp_path / "again")
    assert (outcome.status, outcome.steps) == ("finished", 12)
    assert losses(tmp_path / "again") == losses(by_command)


@pytest.mark.timeout(60)
def test_more_targets_and_dispatch_workers_change_no_loss(by_command: Path, tmp_path: Path) -> None:
    tree = tree_of_tiny(target__replicas=3, dispatch__workers=2, acceptance__at_start=False, acceptance__at_end=False)
    del tree["stages"]["acceptance"]
    outcome = run_pipeline(tree, run_dir=tmp_path / "wide")
    (target,) = [s for s in outcome.stages if s.stage == "target"]
    assert target.replicas == 3
    assert losses(tmp_path / "wide") == losses(by_command)


@pytest.mark.timeout(60)
def test_another_seed_has_other_losses(by_command: Path, tmp_path: Path) -> None:
    tree = tree_of_tiny(seed=8, drafter__max_steps=2)
    del tree["stages"]["acceptance"]
    run_pipeline(tree, run_dir=tmp_path / "other")
    assert losses(tmp_path / "other")[0] != losses(by_command)[0]


@pytest.mark.timeout(60)
def test_in_order_of_arrival_every_batch_is_trained_on_once_and_the_order_is_recorded(tmp_path: Path) -> None:
    tree = tree_of_tiny(ordering="arrival", target__replicas=3)
    del tree["stages"]["acceptance"]
    outcome = run_pipeline(tree, run_dir=tmp_path / "run")
    records = json_lines(tmp_path / "run" / "metrics.jsonl")
    assert (outcome.status, outcome.batches) == ("finished", 42)
    assert sorted(seq for r in records for seq in r["seqs"]) == list(range(42))
    assert sum(r["batches"] for r in records) == 42
