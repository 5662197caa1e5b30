"""The estimate of host memory, part by part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flowdflash_dspark
import numpy as np
import pytest

from flowdflash import stages
from flowdflash.cli import host_memory as estimate
from flowdflash.config.check import load
from flowdflash.plugin.loader import load_plugins
from flowdflash.runtime.plan_memory import memory
from flowdflash.testing import make_batches

ROOT = Path(__file__).resolve().parent.parent
SMOLLM2 = 134_515_008
"""Parameters of the default target."""


def told(path: Path) -> dict[str, int] | None:
    pipeline = load(path, load_plugins(builtin=[stages, flowdflash_dspark]))
    table = make_batches([0] * 30, np.arange(100, 130))
    return estimate.host_memory(pipeline.graph, table, memory(pipeline.graph, table, "plan", Path()))


@pytest.mark.parametrize(("fast", "item_bytes"), [(True, 2), (False, 4)])
def test_the_default_pipeline_holds_two_targets_the_draft_and_kept_features(
    monkeypatch: pytest.MonkeyPatch, fast: bool, item_bytes: int
) -> None:
    monkeypatch.setattr(estimate, "_fast_bfloat16", lambda: fast)
    parts: Any = told(ROOT / "pipelines" / "dflash.yaml")
    assert parts["weights of target"] == SMOLLM2 * item_bytes
    assert parts["target of acceptance"] == SMOLLM2 * 4 + 2 * 4 * 32 * 8 * 49152
    assert parts["kept features, mapped"] == sum(range(100, 130)) * 5 * 576 * 2
    assert ("compiled kernels" in parts) == fast, "600 shapes, of which oneDNN keeps a kernel each in bfloat16"
    assert not fast or parts["compiled kernels"] == 600 * 700 * 1024
    draft = parts["checkpoints on their way"] // (12 * 6)
    assert parts["checkpoints on their way"] == draft * 12 * 6, "two sinks: two waiting and one in work each"
    tables, logits = 2 * 49152 * 576 * item_bytes, 2 * 4 * 1 * 16 * 7 * 49152
    assert parts["drafter with its optimizer"] == draft * 16 + tables + logits
    assert 5e6 < draft < 6e6


def changed(folder: Path, before: str, after: str) -> Path:
    """The default pipeline with one thing written otherwise."""
    text = (ROOT / "pipelines" / "dflash.yaml").read_text()
    assert before in text
    (folder / "p.yaml").write_text(text.replace(before, after).replace("../data", str(ROOT / "data")))
    return folder / "p.yaml"


def test_more_replicas_more_targets_and_nothing_is_mapped_that_is_not_kept(tmp_path: Path) -> None:
    path = changed(tmp_path, "    keep: disk\n    max_bytes: 3GiB\n", "    replicas: 3\n    dtype: bfloat16\n")
    parts: Any = told(path)
    assert parts["weights of target"] == 3 * SMOLLM2 * 2 and "kept features, mapped" not in parts


def test_a_target_of_unknown_size_gives_no_estimate(tmp_path: Path) -> None:
    assert told(changed(tmp_path, "SmolLM2-135M-Instruct", "owner/unknown")) is None


def test_a_target_with_experts_gives_no_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {**(estimate.facts_of("SmolLM2-135M-Instruct") or {}), "num_experts": 4}
    monkeypatch.setattr(estimate, "facts_of", lambda ref: facts)
    assert told(ROOT / "pipelines" / "dflash.yaml") is None


def test_a_slot_more_drafts_where_the_anchors_does_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "_fast_bfloat16", lambda: False)
    text = changed(tmp_path, "    type: dflash\n", "    type: dspark\n    markov_rank: 8\n").read_text()
    text = text.replace("    init: target\n", "").replace(
        "    type: transformers\n", "    type: transformers\n    last_hidden: true\n"
    )
    (tmp_path / "p.yaml").write_text(text)
    parts: Any = told(tmp_path / "p.yaml")
    draft = parts["checkpoints on their way"] // (12 * 6)
    assert parts["drafter with its optimizer"] == draft * 16 + 2 * 49152 * 576 * 4 + 2 * 4 * 16 * 8 * 49152
    assert parts["target of acceptance"] == SMOLLM2 * 4 + 2 * 4 * 32 * 9 * 49152
