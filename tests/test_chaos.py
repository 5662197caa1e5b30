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
from cli_runs import invoke

DRIVER = Path(__file__).with_name("chaos_runs.py")


def driven(*arguments: str) -> list[dict[str, Any]]:
    """What the driver tells, in a process of its own that forks."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(DRIVER), *arguments], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


RUNS = int(os.environ.get("FLOWDFLASH_CHAOS_RUNS", "2"))
"""How many runs are killed and resumed; every other one with 4 target replicas."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(1, max(RUNS, 1) + 1, 2))
def test_runs_that_are_killed_at_random_moments_end_as_one_that_is_not(tmp_path: Path, seed: int) -> None:
    rows = driven(str(tmp_path), json.dumps([seed, seed + 1]), "[1, 4]", "3")
    assert [row["replicas"] for row in rows] == [1, 4]
    for row in rows:
        assert row["differences"] == [], row
        assert row["steps"] == 16
        assert row["landed"][0]["exit"] != 0, row


@pytest.mark.timeout(300)
def test_signals_stop_a_run_at_any_moment_and_it_goes_on_as_if_nobody_had(tmp_path: Path) -> None:
    for row in driven("signals", str(tmp_path)):
        twice, evaluating = "twice" in row["case"], row["case"].startswith("SIGTERM during an evaluation")
        assert row["exit"] == (143 if "SIGTERM" in row["case"] else 130), row
        assert (row["status"], row["aborted"]) == ("interrupted", twice), row
        assert row["newest"] == "interrupted" or twice, row
        assert row["damaged"] == [] and row["abandoned"] == [], row
        assert not evaluating or row["evaluated"][:2] == ([] if "skipped" in row["case"] else [0, 4]), row
        assert row["secs"] < 60, "a second or so, on a machine that does nothing else"
        assert (row["resumed"], row["differences"]) == (0, []), row


FIFO = """
from flowdflash.stage import Source

class Fifo(Source):
    "Waits for somebody who never writes."
    type = "fifo"
    streaming = True

    def epochs(self):
        with open("PIPE") as pipe:
            print("reading", flush=True)
            pipe.read()
        return iter(())

    def tokens(self, sample_id):
        raise KeyError(sample_id)

from flowdflash.plugin import hookimpl

@hookimpl
def flowdflash_register(registry):
    registry.register(Fifo)
"""


PIPELINE = """
version: 1
plugins: [./fifo.py]
stages:
  corpus: {kind: source, SOURCE}
  buckets: {kind: bucketer, type: length, inputs: corpus, buckets: 2, token_budget: 64}
  dispatch: {kind: dispatcher, type: pull, inputs: buckets}
  target: {kind: target-forward, type: toy, inputs: dispatch}
  drafter: {kind: drafter, type: dflash, inputs: target, block_size: 4, schedule: constant, device: cpu}
  save: {kind: sink, type: checkpoint, inputs: drafter.checkpoints}
"""


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A named pipe beside a pipeline whose plugin knows how to wait for it."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "fifo.py").write_text(FIFO.replace("PIPE", str(tmp_path / "pipe")))
    return tmp_path / "pipe"


@pytest.mark.parametrize("source", ["chat_jsonl", "chat_parquet", "tokens"])
def test_a_pipe_is_refused_where_rows_are_read_more_than_once(pipe: Path, source: str) -> None:
    options = f"type: {source}, path: pipe, tokenizer: SmolLM2-135M-Instruct"
    (pipe.parent / "p.yaml").write_text(PIPELINE.replace("SOURCE", options))
    refused = invoke("validate", pipe.parent / "p.yaml")
    assert refused.exit_code == 78
    assert f"stages.corpus.path: {pipe} is a pipe or a device, but it is read more than once" in refused.stdout


@pytest.mark.timeout(300)
def test_a_source_that_blocks_on_a_pipe_stops_on_ctrl_c(pipe: Path) -> None:
    folder = pipe.parent
    (folder / "p.yaml").write_text(PIPELINE.replace("SOURCE", "type: fifo"))
    command = [sys.executable, "-m", "flowdflash.cli", "run", "p.yaml", "--run-dir", "r"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "FLOWDFLASH_CACHE_DIR": str(folder / "cache")}
    writer, told = os.open(pipe, os.O_RDWR), ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd=folder
    ) as run:
        assert run.stdout is not None
        while not told.endswith("reading\n") and (line := run.stdout.readline()):
            told += line
        run.send_signal(signal.SIGINT)
        told += run.communicate(timeout=240)[0]
    os.close(writer)
    assert run.returncode == 130, told
    outcome = json.loads((folder / "r" / "outcome.json").read_text())
    assert outcome["status"] == "interrupted" and outcome["abandoned"] == ["buckets[0]"]
    assert (folder / "r" / "checkpoints" / "latest").is_file(), "that of an interrupted run"
