"""``flowdflash run --resume`` and ``flowdflash compare``, on a pipeline of a few steps."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from chaos_runs import PIPELINE
from click.testing import CliRunner, Result

from flowdflash.cli import main
from flowdflash.config.changes import changes
from flowdflash.runtime.checkpoints import saved_checkpoints
from flowdflash.runtime.compare import compare_runs

STOP = """
import os, signal
from flowdflash.plugin import hookimpl

@hookimpl
def flowdflash_step(record):
    if record.step == 5 and os.environ.get("STOP_AT_STEP_5"):
        # As Ctrl-C, but before this returns: a signal waits for the main thread, and the next step may be quicker.
        signal.getsignal(signal.SIGINT)(signal.SIGINT, None)
"""


def flowdflash(*arguments: str | Path, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments], env=env)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``straight``, a run that nobody touched; ``stopped``, interrupted after step 5; and their pipeline."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "stop.py").write_text(STOP)
    short = PIPELINE.replace("REPLICAS", "1").replace("epochs: 2", "epochs: 1").replace("keep: 2", "keep: 5")
    (folder / "p.yaml").write_text(short.replace("seed: 7", "seed: 7\nplugins: [./stop.py]"))
    cache = {"FLOWDFLASH_CACHE_DIR": str(folder / "cache")}
    straight = flowdflash("run", folder / "p.yaml", "--run-dir", folder / "straight", env=cache)
    assert straight.exit_code == 0, straight.output
    stopped = flowdflash(
        "run", folder / "p.yaml", "--run-dir", folder / "stopped", env={**cache, "STOP_AT_STEP_5": "1"}
    )
    assert stopped.exit_code == 130, stopped.output
    assert f"go on with: flowdflash run --resume {folder / 'stopped'}" in stopped.output
    return folder


@pytest.fixture
def stopped(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run that was interrupted."""
    monkeypatch.setenv("FLOWDFLASH_CACHE_DIR", str(runs / "cache"))
    return Path(shutil.copytree(runs / "stopped", tmp_path / "stopped"))


def test_a_run_stopped_at_a_step_boundary_goes_on_and_ends_the_same(runs: Path, stopped: Path) -> None:
    assert json.loads((stopped / "outcome.json").read_text())["status"] == "interrupted"
    done = flowdflash("run", "--resume", stopped)
    assert done.exit_code == 0, done.output
    assert "resuming after step 5 (10 batches done)" in done.output and "finished: 8 optimizer steps" in done.output
    compared = flowdflash("compare", runs / "straight", stopped)
    assert compared.exit_code == 0, compared.output
    assert "steps 1 to 8" in compared.output and compared.output.endswith("the runs are the same\n")
    again = flowdflash("run", "--resume", stopped)
    assert again.exit_code == 0 and "nothing is left to do" in again.output


def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(runs: Path, stopped: Path) -> None:
    newest = saved_checkpoints(stopped)[-1]
    assert newest.step == 5
    (newest.folder / "state.pt").write_bytes(b"")
    done = flowdflash("run", "--resume", stopped)
    assert done.exit_code == 0, done.output
    assert "state.pt has 0 bytes" in done.output and "goes on from step-000004" in done.output
    assert compare_runs(runs / "straight", stopped).differences == ()


def test_a_run_without_any_checkpoint_starts_at_its_beginning_and_ends_the_same(runs: Path, stopped: Path) -> None:
    shutil.rmtree(stopped / "checkpoints")
    done = flowdflash("run", "--resume", stopped)
    assert done.exit_code == 0 and "starts at its beginning" in done.output
    assert compare_runs(runs / "straight", stopped).differences == ()


def test_another_pipeline_is_refused_with_what_differs(runs: Path, stopped: Path) -> None:
    refused = flowdflash("run", "--resume", stopped, "--set", "stages.drafter.lr=0.001", "--set", "seed=8")
    assert refused.exit_code == 78
    assert "stages.drafter.lr: 0.003 when the run began, 0.001 now" in refused.output
    assert "seed: 7 when the run began, 8 now" in refused.output and "as it began" in refused.output
    assert "step-000005" in (stopped / "checkpoints" / "latest").read_text()
    assert json.loads((stopped / "outcome.json").read_text())["status"] == "interrupted"


def test_what_no_weight_depends_on_may_be_changed(runs: Path, stopped: Path) -> None:
    text = (runs / "p.yaml").read_text().replace("lr: 3e-3", "lr: 0.003").replace("replicas: 1", "replicas: 2")
    other = runs / "other.yaml"
    other.write_text(text.replace("keep: 5", "keep: 1"))
    done = flowdflash("run", "--resume", stopped, other)
    assert done.exit_code == 0, done.output
    assert "changed: stages.save.keep: 5 before, 1 now" in done.output
    assert "changed: stages.target.replicas: 1 before, 2 now" in done.output
    assert "drafter" not in done.output.split("resuming")[0]
    assert [saved.step for saved in saved_checkpoints(stopped)] == [8]
    assert compare_runs(runs / "straight", stopped).differences == ()


def test_the_command_line_says_what_is_missing_or_too_much(stopped: Path, tmp_path: Path) -> None:
    assert flowdflash("run").exit_code == 2
    assert flowdflash("run", "--resume", stopped, "--run-dir", tmp_path / "x").exit_code == 2
    empty = tmp_path / "empty"
    empty.mkdir()
    nothing = flowdflash("run", "--resume", empty)
    assert nothing.exit_code == 1 and "there is no pipeline.yaml" in nothing.output


def change_record(run: Path, step: int, /, **given: Any) -> None:
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[step - 1].update(given)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def twins(runs: Path, tmp_path: Path) -> tuple[Path, Path]:
    """The same run twice, with other times."""
    a, b = (Path(shutil.copytree(runs / "straight", tmp_path / name)) for name in "ab")
    change_record(b, 3, step_secs=9.0, waits_secs={}, checkpoint_pause_secs=1.0)
    assert compare_runs(a, b).same
    return a, b


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"loss": 5.0}, "step 3: loss is"),
        ({"lr": 1e-9}, "step 3: lr is"),
        ({"seqs": [4, 6]}, "step 3: seqs is"),
        ({"step": 4}, "step 3: step is 3 and 4"),
    ],
)
def test_compare_says_where_two_runs_part(twins: tuple[Path, Path], given: dict[str, Any], text: str) -> None:
    a, b = twins
    change_record(b, 3, **given)
    change_record(b, 5, loss=1.0)
    found = compare_runs(a, b)
    assert found.steps == 2 and len(found.differences) == 1 and text in found.differences[0]
    told = flowdflash("compare", a, b, "--format", "json")
    assert told.exit_code == 1 and json.loads(told.output)["same"] is False


def test_compare_finds_a_gap_that_both_runs_have(twins: tuple[Path, Path]) -> None:
    for run in twins:
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join([*lines[:2], *lines[3:]]))
    assert "there is a gap or a repeat" in compare_runs(*twins).differences[0]


def test_compare_finds_a_bit_in_weights_and_moments(twins: tuple[Path, Path]) -> None:
    a, b = twins
    folder = saved_checkpoints(b)[-1].folder
    held = torch.load(folder / "state.pt", weights_only=True)
    next(iter(held["tensors"].values())).view(-1)[0] *= 1 + 2e-7
    held["state"]["optimizer"]["state"][0]["exp_avg"].view(-1)[0] += 1.0
    torch.save(held, folder / "state.pt")
    manifest = json.loads((folder / "checkpoint.json").read_text())
    content = (folder / "state.pt").read_bytes()
    manifest["files"]["state.pt"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "checkpoint.json").write_text(json.dumps(manifest))
    weights, moments = compare_runs(a, b).differences
    assert "weights." in weights and "state.optimizer.state.0.exp_avg differs by up to 1" in moments


def test_compare_finds_other_data_evaluations_and_ends(twins: tuple[Path, Path]) -> None:
    a, b = twins
    (b / "plan.json").write_text(json.dumps({"batches": 3, "sha256": "x"}))
    (b / "evaluations.jsonl").write_text("")
    lines = (b / "metrics.jsonl").read_text().splitlines(keepends=True)
    (b / "metrics.jsonl").write_text("".join(lines[:-1]))
    for saved in saved_checkpoints(b)[1:]:
        shutil.rmtree(saved.folder)
    told = "\n".join(compare_runs(a, b).differences)
    for text in ("has 8 steps, the second 7", "plan: other samples", "evaluations: 3 and 0", "at step 8 and at step 2"):
        assert text in told
    (b / "metrics.jsonl").unlink()
    missing = flowdflash("compare", a, b)
    assert missing.exit_code == 1 and "has no metrics.jsonl" in missing.output


def test_changes_are_of_values_not_of_spelling(tmp_path: Path) -> None:
    from flowdflash import stages
    from flowdflash.config.check import load_text
    from flowdflash.plugin.loader import load_plugins

    plugins = load_plugins(builtin=[stages])
    text = PIPELINE.replace("REPLICAS", "1")

    def told(other: str) -> list[tuple[str, bool]]:
        before, after = (load_text(t, plugins, tmp_path) for t in (text, other))
        return [(change.path, change.safe) for change in changes(before, after)]

    assert told(text.replace("3e-3", "0.003").replace("name: chaos", "name: other")) == []
    assert told(text.replace("inputs: target", "inputs: {from: target, capacity: 5}")) == [
        ("stages.drafter.inputs.capacity", True)
    ]
    assert told(text.replace("type: stratified", "type: shuffle")) == [("stages.order", False)]
    assert told(text.replace("  metrics:", "  metrics2:")) == [("stages.metrics", False), ("stages.metrics2", False)]
    assert told(text.replace("seed: 7", "seed: 7\nordering: arrival")) == [("ordering", False)]
