"""What the benchmark of batch order reads from the metrics of a run."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from types import ModuleType

import pytest
from cli_runs import ROOT


@pytest.fixture
def whiplash(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("whiplash")


def test_a_smooth_trend_is_no_roughness(whiplash: ModuleType) -> None:
    found = whiplash.roughness([10 * 0.99**i for i in range(60)])
    assert found.variance == pytest.approx(0, abs=1e-20)
    assert len(found.residuals) == 60 - 2 * whiplash.NEIGHBOURS


def test_variance_is_that_of_the_log_over_the_running_median(whiplash: ModuleType) -> None:
    # Of every five windows one is a factor e above, one a factor e below: 2/5 of the squares are 1, the mean is 0.
    logs = [0.0, 1.0, 0.0, -1.0, 0.0] * 12
    edge = whiplash.NEIGHBOURS
    inner = logs[edge:-edge]
    found = whiplash.roughness([3 * math.exp(value) for value in logs])
    assert found.residuals == pytest.approx(inner)
    mean = sum(inner) / len(inner)
    assert found.variance == pytest.approx(sum((value - mean) ** 2 for value in inner) / len(inner))


def test_a_scale_of_the_series_does_not_matter(whiplash: ModuleType) -> None:
    series = [5 + math.sin(i * i) for i in range(50)]
    small, large = whiplash.roughness(series), whiplash.roughness([100 * value for value in series])
    assert small.variance == pytest.approx(large.variance) and small.ladder == large.ladder
    assert small.variance > 1e-3


def test_the_ladder_is_the_longest_run_above_the_median(whiplash: ModuleType) -> None:
    edge = whiplash.NEIGHBOURS
    series = [1.0, 0.9] * 40
    for i in [*range(20, 23), *range(40, 47)]:
        series[i] = 2.0
    found = whiplash.roughness(series)
    # Window 48 and its like are at most at the median: the run is the seven doubled windows alone.
    assert found.ladder == (40 - edge, 7)


def test_nothing_above_the_median_is_no_ladder(whiplash: ModuleType) -> None:
    assert whiplash.roughness([1.0] * 40).ladder == (0, 0)


def test_too_few_windows_are_an_error(whiplash: ModuleType) -> None:
    with pytest.raises(SystemExit, match="25 whole windows; give more --rows or --epochs"):
        whiplash.roughness([1.0] * 25)


def test_only_whole_windows_with_a_step_are_read(whiplash: ModuleType, tmp_path: Path) -> None:
    rows = [
        {"step": 1, "batches": 4, "skipped": "", "loss": 3.0},
        {"step": 2, "batches": 3, "skipped": "", "loss": 9.0},
        {"step": 3, "batches": 4, "skipped": "loss is not finite", "loss": None},
        {"step": 4, "batches": 4, "skipped": "", "loss": 2.0},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    assert [row["step"] for row in whiplash.windows(path, 4)] == [1, 4]
    assert whiplash.windows(path, 5) == []
