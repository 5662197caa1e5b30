"""Kill it anywhere, resume it: the run ends bit for bit as if nobody had touched it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DRIVER = Path(__file__).with_name("chaos_runs.py")


def driven(*arguments: str) -> list[dict[str, Any]]:
    """What the driver tells, in a process of its own that forks."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(DRIVER), *arguments], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def stories(folder: Path, seeds: list[int], *, kills: int) -> list[dict[str, Any]]:
    """Runs with 1 and 4 target replicas that are killed and resumed."""
    return driven(str(folder), json.dumps(seeds), "[1, 4]", str(kills))


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


@pytest.mark.timeout(300)
def test_signals_stop_a_run_at_any_moment_and_it_goes_on_as_if_nobody_had(tmp_path: Path) -> None:
    for row in driven("signals", str(tmp_path)):
        twice = "twice" in row["case"]
        assert row["exit"] == (143 if "SIGTERM" in row["case"] else 130), row
        assert (row["status"], row["aborted"]) == ("interrupted", twice), row
        assert row["newest"] == "interrupted" or twice, row
        assert row["damaged"] == [] and row["abandoned"] == [], row
        assert (row["resumed"], row["differences"]) == (0, []), row


FIFO = """
from flowdflash.stage import Source

class Fifo(Source):
    "Waits for somebody who never writes."
    type = "fifo"
    streaming = True

    def epochs(self):
        with open("PIPE") as pipe:
            pipe.read()
        return iter(())

    def tokens(self, sample_id):
        raise KeyError(sample_id)

from flowdflash.plugin import hookimpl

@hookimpl
def flowdflash_register(registry):
    registry.register(Fifo)
"""


@pytest.mark.timeout(300)
def test_a_source_that_blocks_on_a_pipe_stops_on_ctrl_c(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "fifo.py").write_text(FIFO.replace("PIPE", str(pipe)))
    (tmp_path / "p.yaml").write_text(
        """
version: 1
plugins: [./fifo.py]
stages:
  corpus: {kind: source, type: fifo}
  buckets: {kind: bucketer, type: length, inputs: corpus, buckets: 2, token_budget: 64}
  dispatch: {kind: dispatcher, type: pull, inputs: buckets}
  target: {kind: target-forward, type: toy, inputs: dispatch}
  drafter: {kind: drafter, type: dflash, inputs: target, block_size: 4, schedule: constant, device: cpu}
  save: {kind: sink, type: checkpoint, inputs: drafter.checkpoints}
"""
    )
    command = [sys.executable, "-m", "flowdflash.cli", "run", "p.yaml", "--run-dir", "r"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "FLOWDFLASH_CACHE_DIR": str(tmp_path / "cache")}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd=tmp_path
    ) as run:
        writer = os.open(pipe, os.O_WRONLY)  # returns once the source has opened it too
        run.send_signal(signal.SIGINT)
        told, _ = run.communicate(timeout=240)
        os.close(writer)
    assert run.returncode == 130, told
    outcome = json.loads((tmp_path / "r" / "outcome.json").read_text())
    assert outcome["status"] == "interrupted" and outcome["abandoned"] == ["buckets[0]"]
    assert (tmp_path / "r" / "checkpoints" / "latest").is_file(), "that of an interrupted run"
