"""Faults in every kind of stage, at every point of its life, and how long the run took to end after each.

The pipelines are those of the tests: no model, no file. A run must end within the limit, blame the stage that was at
fault, leave no thread and close every stage that it opened.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from runtime_fakes import Faults, Pipeline, threads_left
from test_executor import FAULTS, STAGES

from flowdflash.errors import StageFailed

LIMIT_SECS = 5.0
ERRORS = (ValueError, SystemExit, MemoryError, KeyboardInterrupt)


class Timed(Faults):
    """Notes when the fault came."""

    def pass_by(self, stage: str, method: str) -> None:
        try:
            super().pass_by(stage, method)
        except BaseException:
            self.came = time.perf_counter()
            raise


def faults() -> Iterator[tuple[str, str, int]]:
    """Stage, method and the number of the call that fails."""
    yield from ((stage, "open", 0) for stage in STAGES)
    yield from FAULTS
    yield from ((stage, "close", 0) for stage in STAGES)


def end_of(stage: str, method: str, call: int, error: type[BaseException], folder: Path) -> tuple[float, list[str]]:
    """Seconds from the fault to the end of the run, and what is wrong with that end."""
    options: dict[str, Any] = {"target": {"replicas": 3}, "dispatch": {"workers": 2}}
    pipeline = Pipeline(options=options, capacities=dict.fromkeys(STAGES, 1), faults=Timed())
    fault = error("injected")
    pipeline.faults.at(stage, method, call, fault)
    wrong = []
    try:
        pipeline.run(folder)
        wrong.append("the run did not fail")
    except StageFailed as failure:
        if (failure.stage, failure.cause) != (stage, fault):
            wrong.append(f"blames {failure}")
    secs = time.perf_counter() - getattr(pipeline.faults, "came", time.perf_counter())
    if secs > LIMIT_SECS:
        wrong.append("too late")
    wrong += [f"thread {name} is left" for name in threads_left()]
    opened, closed = (sorted(entry[0] for entry in pipeline.journal.of(what)) for what in ("open", "close"))
    if opened != closed:
        wrong.append(f"opened {opened}, closed {closed}")
    return secs, wrong


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows, worst = [], 0.0
    print(f"{'stage':9} {'fault in':9} {'call':>4}  {'raises':18} {'s to the end':>12}")
    for stage, method, call in faults():
        for error in ERRORS:
            with tempfile.TemporaryDirectory() as folder:
                secs, wrong = end_of(stage, method, call, error, Path(folder))
            worst = max(worst, secs)
            rows += wrong
            print(f"{stage:9} {method:9} {call + 1:>4}  {error.__name__:18} {secs:>12.3f}  {'; '.join(wrong)}".rstrip())
    print(f"worst {worst:.3f} s, limit {LIMIT_SECS:.0f} s; {len(rows)} ends were wrong")
    return 1 if rows else 0


if __name__ == "__main__":
    sys.exit(main())
