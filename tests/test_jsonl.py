"""The local record of every optimizer step."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime_fakes import make_record

from flowdflash.errors import FlowdflashError
from flowdflash.items import BatchInfo, StepRecord
from flowdflash.stage import Check, OpenContext
from flowdflash.stages.jsonl import Jsonl

RECORD = make_record(1, [BatchInfo(0, 0, 0, 2, (5,), (3,), (3,), 3, 3, 3.0)], 0.5, {"a->b": 0.25})


def opened(tmp_path: Path, **options: Any) -> Jsonl:
    sink = Jsonl(Jsonl.Config(**options))
    sink.open(OpenContext("metrics", tmp_path, tmp_path))
    return sink


def lines(path: Path) -> list[dict[str, Any]]:
    strict = lambda name: pytest.fail(f"{name} is not JSON")  # noqa: E731
    return [json.loads(line, parse_constant=strict) for line in path.read_text().splitlines()]


def test_every_field_of_a_record_is_in_its_line_at_once(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    sink.write(RECORD)
    (line,) = lines(tmp_path / "metrics.jsonl")  # before close
    assert set(line) == {f.name for f in fields(StepRecord)}
    assert line == RECORD.as_dict()
    sink.write(replace(RECORD, step=2))
    assert [entry["step"] for entry in lines(tmp_path / "metrics.jsonl")] == [1, 2]
    assert sink.summary() == {"path": str(tmp_path / "metrics.jsonl"), "records": 2}
    sink.close()
    sink.close()


def test_numbers_that_json_does_not_know_are_null_and_named(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    odd = {"loss": math.nan, "grad_norm": math.inf, "accuracy_per_slot": (0.5, -math.inf), "terms": np.int64(3)}
    sink.write(replace(RECORD, loss_per_bucket={"2": math.nan}, **odd))
    sink.close()
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert line["loss"] is None and line["loss_per_bucket"] == {"2": None} and line["terms"] == 3
    assert line["nonfinite"] == {
        "loss": "nan",
        "loss_per_bucket.2": "nan",
        "grad_norm": "inf",
        "accuracy_per_slot.1": "-inf",
    }


def test_two_sinks_never_share_a_file(tmp_path: Path) -> None:
    sink = opened(tmp_path, path="logs/steps.jsonl")
    with pytest.raises(FlowdflashError, match="exists already"):
        opened(tmp_path, path="logs/steps.jsonl")
    sink.close()
    assert (tmp_path / "logs" / "steps.jsonl").exists()


@pytest.mark.parametrize("path", ["../out.jsonl", "a/../../b.jsonl", "."])
def test_a_path_that_leaves_the_run_folder_is_refused(path: str) -> None:
    check = Check("metrics")
    Jsonl(Jsonl.Config(path=path)).check(check)
    assert [p.path for p in check.problems] == ["path"]


def test_the_default_path_is_fine() -> None:
    check = Check("metrics")
    Jsonl(Jsonl.Config()).check(check)
    assert check.problems == []


def test_writing_before_open_is_a_mistake() -> None:
    with pytest.raises(FlowdflashError, match="before open"):
        Jsonl(Jsonl.Config()).write(RECORD)
