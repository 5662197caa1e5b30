"""Which checkpoints are the best: by the acceptance length that an evaluator of the same run has measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowdflash.items import Checkpoint


def measured_steps(evaluations: Path, stage: str) -> dict[int, float]:
    """Acceptance length by step, as far as it is known, by one evaluator; by the only one where ``stage`` is empty."""
    found = {}
    lines = evaluations.read_text(encoding="utf-8").splitlines(True) if evaluations.is_file() else []
    for line in lines:
        if not line.endswith("\n"):  # being written at this moment
            continue
        entry = json.loads(line)
        if stage in ("", entry.get("stage")) and isinstance(entry.get("tau_gen"), int | float):
            found[int(entry["step"])] = float(entry["tau_gen"])
    return found


def best(steps: Mapping[Path, int], measured: Mapping[int, float], count: int) -> list[Path]:
    """The best few of those that were measured, the newer of equals."""
    rated = [path for path, step in steps.items() if step in measured]
    return sorted(rated, key=lambda path: (measured[steps[path]], steps[path]))[-count:]


def best_problem(graph: Any, node: Any) -> tuple[str, str]:
    """Why nothing can be kept as best, and what to do; empty if an evaluator measures saved checkpoints on the way."""
    config = node.config
    if not config.keep_best:
        return "nothing is kept by it", "set keep_best too, or remove it"
    drafters = {edge.source for edge in node.inputs}
    readers = [other for other in graph.of_kind("sink") if drafters & {edge.source for edge in other.inputs}]
    evaluators = {o.name: o for o in readers if Checkpoint in o.cls.reads and not o.cls.saves}
    if config.best_by and config.best_by not in evaluators:
        known = ", ".join(evaluators) or "none"
        return f"no evaluator of this drafter is named {config.best_by!r}", f"there is: {known}"
    chosen = [config.best_by] if config.best_by else list(evaluators)
    if len(chosen) != 1:
        hint = "name one in best_by" if chosen else "add a sink that measures, such as acceptance"
        return f"the drafter has {len(chosen)} evaluators", hint
    every = int(getattr(evaluators[chosen[0]].config, "every_steps", 0))
    if not every or not config.every_steps or every % config.every_steps:
        hint = f"set every_steps of {chosen[0]} to a multiple of every_steps here, both above 0"
        return f"{chosen[0]} measures, on the way, no checkpoint that is saved here", hint
    return "", ""
