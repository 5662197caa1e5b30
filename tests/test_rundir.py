"""The folder of a run."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from flowdflash.runtime.rundir import RunDir, RunDirUnusable, write_atomically


def test_two_runs_within_one_second_get_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "20250102-030405")
    with RunDir.create(None, "a/b c") as first, RunDir.create(None, "a/b c") as second:
        assert first.path == tmp_path / "runs" / "a-b-c-20250102-030405"
        assert second.path.name == "a-b-c-20250102-030405-2"


def test_a_named_folder_is_used_itself_and_is_clean_afterwards(tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "x" / "y", "n") as run:
        assert run.path == tmp_path / "x" / "y"
    run.close()
    assert list(run.path.iterdir()) == []
    RunDir.create(tmp_path / "x" / "y", "n").close()


def test_a_folder_with_something_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_text("x")
    with pytest.raises(RunDirUnusable, match=r"not empty, it has 'old.txt'"):
        RunDir.create(tmp_path, "n")
    assert (tmp_path / "old.txt").read_text() == "x"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunDirUnusable, match="run folder"):
        RunDir.create(tmp_path / "file" / "run", "n")
    with pytest.raises(RunDirUnusable, match="run folder"):
        RunDir.create(tmp_path / "file", "n")


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from flowdflash.runtime.rundir import RunDir\n"
        "run = RunDir.create(Path(sys.argv[1]), 'n'); print('locked', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin is not None and holder.stdout is not None
    try:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(RunDirUnusable, match="another run is using it"):
            RunDir.create(tmp_path / "run", "n")
    finally:
        holder.communicate()


def test_provenance_says_what_ran_without_importing_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from flowdflash.runtime.rundir import RunDir\n"
        "from flowdflash.runtime import executor\n"
        "run = RunDir.create(Path(sys.argv[1]), 'n'); run.write_pipeline('version: 1\\n')\n"
        "command = ['flowdflash', 'run']; folder = Path('/data')\n"
        "run.write_provenance(pipeline_text='version: 1\\n', seed=7, pipeline_folder=folder, command=command)\n"
        "run.close(); assert 'torch' not in sys.modules and 'click' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=True)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["pipeline_folder"] == "/data" and record["seed"] == 7 and record["command"] == ["flowdflash", "run"]
    assert record["pipeline_sha256"] == hashlib.sha256(b"version: 1\n").hexdigest()
    assert set(record["versions"]) >= {"flowdflash", "torch", "numpy"}
    assert record["python"] == sys.version.split()[0] and record["cpu_count"] >= 1
    assert (tmp_path / "run" / "pipeline.yaml").read_text() == "version: 1\n"


def test_an_outcome_is_strict_json_whatever_is_in_it(tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "run", "n") as run:
        run.write_outcome({"loss": math.nan, "where": Path("a"), "parts": (math.inf, 1.5), "by": {3: 4}})
    text = (tmp_path / "run" / "outcome.json").read_text()
    record = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (record["loss"], record["parts"], record["where"], record["by"]) == ("nan", ["inf", 1.5], "a", {"3": 4})


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.json"
    write_atomically(target, "old")

    def full(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(target, "new")
    assert target.read_text() == "old"
