from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BOTH = """
import os, signal, sys, threading
from pathlib import Path
import torch
from runtime_fakes import FakeDrafter, FakeTarget, Pipeline
from flowdflash.runtime import openmp

if openmp._pause() is None:
    sys.exit("another OpenMP")
torch.set_num_threads(2)
numbers = torch.ones(1 << 20)
"""

TEAMS = """
EXITING = 4  # in the flags of a thread that has been joined, and is listed still

def alive(thread):
    try:
        return not int((thread / "stat").read_text().rpartition(")")[2].split()[6]) & EXITING
    except OSError:
        return False

def others():
    "Threads of the process that are none of Python's: the members of teams."
    return sum(map(alive, Path("/proc/self/task").iterdir())) - threading.active_count()

openmp.release_team()
before = others()
assert numbers.mul(2).sum() == 2 << 20 and others() == before + 1, "a team of two"
openmp.release_team()
assert others() == before
assert numbers.mul(2).sum() == 2 << 20 and others() == before + 1, "it comes back"
openmp.release_team()

found = []
def compute(*_):
    found.append(others() - before)
    numbers.mul(2)
    found.append(others() - before)

made = {"target": type("T", (FakeTarget,), {"on_cpu": True}), "drafter": type("D", (FakeDrafter,), {"on_cpu": True})}
Pipeline(classes=made, options={name: {"before": compute} for name in made}).run(Path(sys.argv[1]))
print(*found)
"""

FORK = """
numbers.mul(2)
if not (child := os.fork()):
    signal.alarm(60)
    Pipeline().run(Path(sys.argv[1]))
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def told(script: str, folder: Path) -> list[str]:
    """What a script prints that runs in a process of its own."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]), "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", BOTH + script, str(folder)], capture_output=True, text=True, env=env)
    if done.stderr.startswith("another OpenMP"):
        pytest.skip("torch runs on another OpenMP here")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.timeout(120)
@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP is looked for on Linux alone")
def test_a_stage_that_has_computed_leaves_no_team_behind_for_the_next(tmp_path: Path) -> None:
    assert told(TEAMS, tmp_path) == ["0", "1"] * 14, "seven batches, twice: none before a kernel, one after it"


@pytest.mark.timeout(120)
@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP is looked for on Linux alone")
def test_a_run_in_a_fork_does_not_wait_for_the_team_that_its_parent_had(tmp_path: Path) -> None:
    told(FORK, tmp_path)
