"""Kill runs at random moments, resume them, compare: ``python benchmarks/chaos.py --runs 200``.

Prints a table of where the kills landed and how many differences to an untouched run there are, which must be 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

DRIVER = Path(__file__).resolve().parent.parent / "tests" / "chaos_runs.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="runs, each killed up to --kills times")
    parser.add_argument("--kills", type=int, default=4, help="most kills per run")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 4], help="target replicas, in turn")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    options = parser.parse_args()
    if min(options.runs, options.kills, options.jobs, *options.replicas) < 1:
        parser.error("--runs, --kills, --jobs and --replicas are at least 1")
    seeds = list(range(options.first_seed, options.first_seed + options.runs))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for job in range(min(options.jobs, len(seeds))):
            own = [json.dumps(seeds[job :: options.jobs]), json.dumps(options.replicas), str(options.kills)]
            command = [sys.executable, str(DRIVER), f"{folder}/{job}", *own]
            jobs.append(subprocess.Popen(command, stdout=subprocess.PIPE, env=env))
        told = [job.communicate()[0] for job in jobs]
    if any(job.returncode for job in jobs):
        sys.exit(1)
    rows = [row for text in told for row in json.loads(text)]
    landed = Counter(where_it_landed(death) for row in rows for death in row["landed"] if death["exit"])
    print(f"{'landed at':66} {'killed':>7}")
    for where, count in sorted(landed.items()):
        print(f"{where:66} {count:>7}")
    bad = [row for row in rows if row["differences"]]
    print(f"{len(rows)} runs, {sum(landed.values())} kills, {len(bad)} runs with differences")
    for row in bad:
        print(json.dumps(row, indent=1))
    sys.exit(1 if bad else 0)


def where_it_landed(death: dict[str, object]) -> str:
    """A row of the table: what the process was about to do, without the numbers of steps."""
    where = "".join("N" if ch.isdigit() else ch for ch in str(death["where"]))
    while "NN" in where:
        where = where.replace("NN", "N")
    delay = death.get("delay_us")
    when = "inside or just after" if delay == -1 else "soon after" if delay else "before"
    return f"{'SIGINT' if death.get('signal') == 2 else 'SIGKILL'} {when} {where}"


if __name__ == "__main__":
    main()
