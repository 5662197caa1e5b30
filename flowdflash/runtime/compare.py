"""Are two runs the same? Ids, losses and learning rates of every step, weights and moments at the end, bit for bit."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowdflash.errors import FlowdflashError
from flowdflash.journal import entries
from flowdflash.runtime.checkpoints import damage, load_checkpoint, saved_checkpoints

MEASURED = frozenset({"step_secs", "checkpoint_pause_secs", "waits_secs", "secs", "plain_secs", "speedup"})
"""Entries that are measured with a clock, and so are never the same twice."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two runs have in common, and where they part.

    Attributes:
        steps: optimizer steps that are equal, from the first on.
        equal: what was compared and found equal, a line each.
        differences: what was not, the first first.
    """

    steps: int
    equal: tuple[str, ...]
    differences: tuple[str, ...]

    @property
    def same(self) -> bool:
        """No difference was found."""
        return not self.differences


def compare_runs(a: Path, b: Path, metrics: str = "metrics.jsonl") -> Comparison:
    """Compare two runs by what they wrote.

    Args:
        a: folder of a run.
        b: folder of another.
        metrics: file of their records, in their folders.

    Raises:
        FlowdflashError: a folder has no records.
    """
    records = [_records(run, metrics) for run in (a, b)]
    steps, parting = _compare_records(*records)
    equal, differences = [f"steps 1 to {steps}: batches, losses, learning rates and counts"] if steps else [], []
    differences += parting
    for what, found in (
        ("plan: samples of every batch", _compare_plans(a, b)),
        ("evaluations", _compare_evaluations(a, b)),
        ("newest checkpoint: weights, moments, counters, ledger", _compare_checkpoints(a, b)),
    ):
        differences += found
        if not found:
            equal.append(what)
    return Comparison(steps, tuple(equal), tuple(differences))


def _records(run: Path, name: str) -> list[dict[str, Any]]:
    path = run / name
    if not path.is_file():
        raise FlowdflashError(f"{run} has no {name}: a run is compared by the records of a jsonl sink")
    try:
        return entries(path)
    except ValueError as error:
        raise FlowdflashError(f"{path} is not a file of records: {error}") from error


def _compare_records(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> tuple[int, list[str]]:
    """How many records are equal, and the first difference."""
    for place, (one, other) in enumerate(zip(a, b, strict=False)):
        parts = list(_parts(one, other, ""))
        if parts:
            return place, [f"step {one.get('step')}: {'; '.join(parts[:6])}"]
        if one.get("step") != place + 1:
            return place, [
                f"record {place + 1} of both runs is that of step {one.get('step')}: there is a gap or a repeat"
            ]
    if len(a) != len(b):
        return min(len(a), len(b)), [f"the first run has {len(a)} steps, the second {len(b)}"]
    return len(a), []


def _parts(one: Any, other: Any, name: str) -> Iterator[str]:
    """Where two plain values differ."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys([*one, *other]):
            if key not in MEASURED:
                yield from _parts(one.get(key), other.get(key), f"{name}.{key}" if name else str(key))
    elif one != other and not (_nan(one) and _nan(other)):
        yield f"{name} is {one!r} and {other!r}"


def _nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _compare_plans(a: Path, b: Path) -> list[str]:
    plans = []
    for run in (a, b):
        try:
            plans.append(json.loads((run / "plan.json").read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            return [f"plan: {run / 'plan.json'} cannot be read: {error}"]
    if plans[0]["sha256"] != plans[1]["sha256"]:
        return [f"plan: other samples, or in other batches ({plans[0]['batches']} and {plans[1]['batches']} batches)"]
    return []


def _compare_evaluations(a: Path, b: Path) -> list[str]:
    found = [entries(run / "evaluations.jsonl") for run in (a, b)]
    for one, other in zip(*found, strict=False):
        parts = list(_parts(one, other, ""))
        if parts:
            return [f"evaluation at step {one.get('step')}: {'; '.join(parts[:6])}"]
    return [] if len(found[0]) == len(found[1]) else [f"evaluations: {len(found[0])} and {len(found[1])}"]


def _compare_checkpoints(a: Path, b: Path) -> list[str]:
    newest = []
    for run in (a, b):
        whole = [saved for saved in saved_checkpoints(run) if not damage(saved)]
        if not whole:
            return [f"checkpoints: {run} has none that is complete"]
        newest.append(load_checkpoint(whole[-1].folder))
    one, other = newest
    if one.step != other.step:
        return [f"newest checkpoint: at step {one.step} and at step {other.step}"]
    found: list[str] = []
    for what, left, right in (
        ("weights", one.draft_tensors, other.draft_tensors),
        ("state", one.state, other.state),
        ("ledger", one.ledger, other.ledger),
        ("config", one.draft_config, other.draft_config),
    ):
        parts = list(_unequal(left, right, what))
        if parts:
            more = f", and {len(parts) - 4} more" if len(parts) > 4 else ""
            found.append(f"checkpoint at step {one.step}: {'; '.join(parts[:4])}{more}")
    return found


def _unequal(one: Any, other: Any, name: str) -> Iterator[str]:
    """Where two trees of tensors and plain values differ in a bit."""
    import torch

    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys([*one, *other]):
            if key not in one or key not in other:
                yield f"{name}.{key} is in one of them only"
            else:
                yield from _unequal(one[key], other[key], f"{name}.{key}")
    elif isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            yield f"{name} is {list(one.shape)} {one.dtype} and {list(other.shape)} {other.dtype}"
        elif not torch.equal(_bits(one), _bits(other)):
            apart = (one.double() - other.double()).abs().max()
            yield f"{name} differs by up to {float(apart):.3g}"
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for place, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from _unequal(left, right, f"{name}.{place}")
    else:
        yield from _parts(one, other, name)


def _bits(tensor: Any) -> Any:
    import torch

    # By bytes: NaN is not equal to itself, and -0.0 equals 0.0.
    return tensor.contiguous().reshape(-1).view(torch.uint8)
