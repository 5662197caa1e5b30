"""The overfit gate: a pipeline's drafter learns one answer by heart, and is accepted in full when it is decoded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import TINY, invoke, overrides

from flowdflash.dflash import training
from flowdflash.dflash.mask import block_mask

QUICK = {"stages.drafter.lr": 1e-2, "stages.drafter.num_anchors": 48, "stages.drafter.schedule": "constant"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def gate(cache: Path, *arguments: object, **changes: Any) -> Any:
    return invoke("doctor", "--gate", TINY, *overrides({**QUICK, **changes}), *arguments, cache=cache)


def test_i6_a_draft_that_knows_a_text_by_heart_is_accepted_to_the_full_block(tmp_path: Path) -> None:
    result = gate(tmp_path, "--format", "json", "--steps", 200)
    assert result.exit_code == 0, result.stdout + result.stderr
    told = json.loads(result.stdout)
    assert told["passed"] and told["accuracy"] == 1 and told["tau"] == told["span"] == 4
    assert set(told["produced"][:-1]) == {4} and sum(told["produced"]) == 48 - 1
    assert told["steps"] < 200, "it ends when the text is learnt"


def test_i6_a_draft_that_learnt_by_a_leak_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "block_mask", lambda a, keep, **given: block_mask(a + 4, keep, **given))
    result = gate(tmp_path, "--steps", 200)
    assert result.exit_code == 1 and "gate failed: the draft knows the text in training" in result.stdout, result.stdout


def test_too_few_steps_fail_and_say_so(tmp_path: Path) -> None:
    result = gate(tmp_path, "--steps", 2)
    assert result.exit_code == 1 and "2 steps" in result.stdout and "try more --steps" in result.stdout


def test_an_answer_too_short_for_a_whole_block_is_refused_before_training(tmp_path: Path) -> None:
    result = gate(tmp_path, "--new-tokens", 9, **{"stages.drafter.block_size": 8})
    assert result.exit_code == 1 and "take 10 or more" in result.stderr
