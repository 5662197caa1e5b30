"""Kill it anywhere, resume it: the run ends bit for bit as if nobody had touched it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DRIVER = Path(__file__).with_name("chaos_runs.py")


def stories(folder: Path, seeds: list[int], *, kills: int) -> list[dict[str, Any]]:
    """Runs with 1 and 4 target replicas that are killed and resumed, in a process of their own that forks."""
    done = subprocess.run(
        [sys.executable, str(DRIVER), str(folder), json.dumps(seeds), "[1, 4]", str(kills)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


@pytest.mark.timeout(300)
def test_runs_that_are_killed_at_random_moments_end_as_one_that_is_not(tmp_path: Path) -> None:
    rows = stories(tmp_path, [1, 2], kills=3)
    assert [row["replicas"] for row in rows] == [1, 4]
    for row in rows:
        assert row["differences"] == [], row
        assert row["steps"] == 16
        assert sum(death["exit"] != 0 for death in row["landed"]) >= 2, row


@pytest.mark.timeout(3600)
@pytest.mark.skipif("FLOWDFLASH_CHAOS_RUNS" not in os.environ, reason="set FLOWDFLASH_CHAOS_RUNS to a number of runs")
def test_many_runs_that_are_killed_end_as_one_that_is_not(tmp_path: Path) -> None:
    seeds = list(range(100, 100 + int(os.environ["FLOWDFLASH_CHAOS_RUNS"])))
    assert [row for row in stories(tmp_path, seeds, kills=5) if row["differences"]] == []
