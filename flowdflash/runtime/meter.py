"""Where the time goes: busy, waiting for input, blocked on output, per stage; and what holds the run back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from flowdflash.runtime.channel import ChannelStats

State = Literal["at work", "waiting for input", "waiting for its turn", "blocked on output", "done"]


@dataclass(slots=True)
class WorkerMeter:
    """Counters of one thread; written by that thread alone, readable by any.

    Attributes:
        busy_secs, wait_in_secs, wait_out_secs: at work, waiting for input, blocked on output.
        taken: items taken in.
        passed: of these, items that were passed on, or used up by a stage that ends a branch.
        dropped: of these, items that were not, by reason.
        state: what the thread is at.
        moved_at: when it last took an item, made an output or passed one on.
    """

    busy_secs: float = 0.0
    wait_in_secs: float = 0.0
    wait_out_secs: float = 0.0
    taken: int = 0
    passed: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    state: State = "at work"
    moved_at: float = 0.0

    def drop(self, reason: str, count: int = 1) -> None:
        """Count items that are not passed on."""
        if count:
            self.dropped[reason] = self.dropped.get(reason, 0) + count


@dataclass(frozen=True, slots=True)
class StageSnapshot:
    """One stage, summed over its replicas.

    Attributes:
        stage: name in the pipeline.
        replicas: threads that did its work.
        busy_secs, wait_in_secs, wait_out_secs: summed over replicas.
        taken, passed: items.
        dropped: items by reason.
        busy_share: busy time by run time and replicas.
    """

    stage: str
    replicas: int
    busy_secs: float
    wait_in_secs: float
    wait_out_secs: float
    taken: int
    passed: int
    dropped: Mapping[str, int]
    busy_share: float

    @property
    def balanced(self) -> bool:
        """Taken = passed on + dropped."""
        return self.taken == self.passed + sum(self.dropped.values())


def stage_snapshot(stage: str, meters: Iterable[WorkerMeter], run_secs: float) -> StageSnapshot:
    """The counters of all replicas of a stage, summed."""
    meters = list(meters)
    dropped: dict[str, int] = {}
    for meter in meters:
        for reason, count in tuple(meter.dropped.items()):
            dropped[reason] = dropped.get(reason, 0) + count
    busy = sum(meter.busy_secs for meter in meters)
    return StageSnapshot(
        stage,
        len(meters),
        busy,
        sum(meter.wait_in_secs for meter in meters),
        sum(meter.wait_out_secs for meter in meters),
        sum(meter.taken for meter in meters),
        sum(meter.passed for meter in meters),
        dropped,
        busy / (run_secs * len(meters)) if run_secs > 0 and meters else 0.0,
    )


def edge_snapshot(name: str, channels: Iterable[ChannelStats]) -> ChannelStats:
    """The channels of one edge (one per replica of its reader), summed; high-water marks and depths are summed too."""
    stats = list(channels)
    return ChannelStats(
        name,
        *(sum(int(getattr(s, column)) for s in stats) for column in _COUNTS),
        *(sum(float(getattr(s, column)) for s in stats) for column in ("put_wait_secs", "get_wait_secs")),
    )


_COUNTS = (
    "capacity",
    "capacity_bytes",
    "depth",
    "depth_bytes",
    "high_water",
    "high_water_bytes",
    "items_put",
    "items_got",
    "discarded",
)


def bottleneck(stages: Iterable[StageSnapshot]) -> str:
    """The stage that was busy for the largest share of its replicas' time; empty if none has worked."""
    busiest = max(stages, key=lambda snapshot: snapshot.busy_share, default=None)
    return busiest.stage if busiest is not None and busiest.busy_share > 0 else ""
