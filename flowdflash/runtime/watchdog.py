"""Says where a run is stuck, once nothing has moved for long. It never stops the run."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

from flowdflash.runtime.channel import Channel, ChannelStats
from flowdflash.runtime.wiring import Wiring
from flowdflash.runtime.worker import Worker
from flowdflash.stage import Report


class Watchdog:
    """Looks, when the executor would only wait, whether any thread has moved; it has no thread of its own.

    Args:
        wiring: what may get stuck.
        report: told about a stall, once.
        stall_secs: how long nothing may move; 0 for ever.
        clock: the one that the meters use.
    """

    def __init__(
        self, wiring: Wiring, report: Report, stall_secs: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._wiring, self._report, self._stall_secs, self._clock = wiring, report, stall_secs, clock
        self._since = clock()
        self._told: float | None = None

    def start(self) -> None:
        """What has not moved before now is no stall."""
        self._since = self._clock()

    def look(self) -> float | None:
        """Report a stall that is new; seconds until it makes sense to look again, None for never."""
        if not self._stall_secs:
            return None
        moved_at = max(self._since, *(worker.work.meter.moved_at for worker in self._wiring.workers))
        quiet_secs = self._clock() - moved_at
        if quiet_secs < self._stall_secs:
            return self._stall_secs - quiet_secs
        if moved_at != self._told:
            self._told = moved_at
            self._report.warn("\n".join(self._lines(quiet_secs)))
        return self._stall_secs

    def _lines(self, quiet_secs: float) -> Iterator[str]:
        yield f"nothing has moved for {quiet_secs:.0f} s; the run goes on waiting (Ctrl-C stops it, twice at once)"
        yield from (f"stuck: {line}" for line in self._stuck())
        for worker in self._wiring.workers:
            meter = worker.work.meter
            yield f"stage {worker.name}: {meter.state}, {meter.taken:,} items taken"
        for channel in (channel for group in self._wiring.channels.values() for channel in group):
            stats = channel.stats()
            limit = f" of {stats.capacity_bytes:,}" if stats.capacity_bytes else ""
            yield f"edge {stats.name}: {_fill(stats)} items wait, {stats.depth_bytes:,}{limit} bytes"
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident():
                stack = "".join(traceback.format_stack(frame)).rstrip()
                yield f"thread {names.get(ident, ident)}:\n{stack}"

    def _stuck(self) -> Iterator[str]:
        """The edges that do not move because of the stage at their one end."""
        workers = self._wiring.workers
        at_work = [worker for worker in workers if worker.work.meter.state == "at work"]
        for worker in at_work:
            waiting = [stats for stats in (c.stats() for c in self._inboxes(worker)) if stats.depth]
            if waiting:
                for stats in waiting:
                    yield f"{worker.name} takes nothing from edge {stats.name}, where {_fill(stats)} wait"
            else:
                outputs = ", ".join(edge.name for edge in self._wiring.graph.outputs(worker.work.stage))
                yield f"{worker.name} puts nothing on edge {outputs}" if outputs else f"{worker.name} in its last item"
        if at_work:
            return
        for worker in workers:
            for stats in (channel.stats() for channel in self._inboxes(worker)):
                if stats.depth and worker.work.meter.state == "waiting for input":
                    yield f"{worker.name} waits although edge {stats.name} holds {_fill(stats)}; no stage is at work"

    def _inboxes(self, worker: Worker) -> list[Channel[object]]:
        """What one thread reads from."""
        inputs = self._wiring.graph.nodes[worker.work.stage].inputs
        group = self._wiring.channels.get(" + ".join(edge.name for edge in inputs), [])
        return group if len(group) == 1 else group[worker.work.replica : worker.work.replica + 1]


def _fill(stats: ChannelStats) -> str:
    return f"{stats.depth} of {stats.capacity}"
