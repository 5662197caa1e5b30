from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, threading
from pathlib import Path
import torch
from runtime_fakes import FakeDrafter, FakeTarget, Pipeline
from flowdflash.runtime import openmp

if not openmp.is_gnu():
    sys.exit("another OpenMP")
torch.set_num_threads(2)

def others():
    "Threads of the process that are none of Python's: the members of teams."
    return len(os.listdir("/proc/self/task")) - threading.active_count()

before = others()
numbers = torch.ones(1 << 20)
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


@pytest.mark.timeout(120)
@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP is looked for on Linux alone")
def test_a_stage_that_has_computed_leaves_no_team_behind_for_the_next(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]), "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, env=env)
    if done.stderr.startswith("another OpenMP"):
        pytest.skip("torch runs on another OpenMP here")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "1"] * 14, "seven batches, twice: none before a kernel, one after it"
