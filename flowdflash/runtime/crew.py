"""The threads of a run, as the calling thread sees them: told what to do, and waited for as long as it makes sense."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty

from flowdflash.errors import StageFailed
from flowdflash.runtime.channel import ChannelAborted
from flowdflash.runtime.watchdog import Watchdog
from flowdflash.runtime.wiring import Wiring
from flowdflash.runtime.worker import Phase, Reply, Worker
from flowdflash.runtime.works import DraftWork, SinkWork

SAVE_GRACE_SECS = 60.0
"""How long a thread that is writing a checkpoint may go on after the others have had their time."""

CLOSE_GRACE_SECS = 300.0
"""How long a stage of a failed run may take to close: longer than an upload that ends by itself."""

HEARTBEAT_SECS = 1.0
"""A signal that comes when this thread is about to wait, but does not yet, wakes nobody: it is heard after so long."""


class Crew:
    """Tells the threads of a run what to do and waits for their replies.

    Args:
        wiring: the run.
        watchdog: looks whether anything moves.
        grace_secs: how long a thread may go on that the run need not wait for any more.

    Attributes:
        abandoned: threads left behind, stuck in a call.
    """

    def __init__(self, wiring: Wiring, watchdog: Watchdog, grace_secs: float) -> None:
        self._wiring, self._watchdog, self._grace_secs = wiring, watchdog, grace_secs
        self._stop, self._report = wiring.stop, wiring.report
        self.abandoned: list[Worker] = []
        self._running: set[Worker] = set()
        self._phase: Phase = "open"
        self._deadline: float | None = None
        self._prolonged = False

    def do(self, workers: Sequence[Worker], phase: Phase, action: Callable[[Worker], None]) -> None:
        """Tell threads to do something and wait until they have, or until waiting makes no more sense."""
        self._running, self._phase, self._deadline = set(workers), phase, None
        for worker in workers:
            worker.tell(phase, partial(action, worker))
        self._wait()

    def give_up(self, error: BaseException) -> None:
        """Wake every thread with an error, and let those that still run end."""
        self._wiring.abort(error)
        self._limit()
        self._wait()

    def _wait(self) -> None:
        while self._running:
            self._adjust()
            left = None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)
            quiet = self._watchdog.look() if self._phase in ("run", "close") else None
            try:
                waits = [secs for secs in (left, quiet, HEARTBEAT_SECS) if secs is not None]
                reply = self._wiring.replies.get(timeout=min(waits))
            except Empty:
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    self._abandon()
                continue
            if reply is None:
                continue
            self._running.discard(reply.worker)
            if reply.error is not None and not isinstance(reply.error, ChannelAborted):
                self._wiring.fail(_as_failure(reply))

    def _adjust(self) -> None:
        """After every reply and every request to stop: what to shut down, and how long to wait still."""
        wiring, phase = self._wiring, self._phase
        if self._stop.urgent:
            wiring.abort(KeyboardInterrupt("asked twice to stop"))
            self._limit()
        if phase == "close":
            if wiring.failures and self._deadline is None:
                self._deadline = time.monotonic() + CLOSE_GRACE_SECS
            return
        if wiring.failures or (self._stop.requested and phase != "run"):
            self._limit()
        if phase != "run":
            return
        drafting = any(isinstance(worker.work, DraftWork) for worker in self._running)
        if self._stop.requested:
            wiring.interrupt_drafters()
            if not drafting:
                wiring.retire_feeders()
        if all(worker.feeds for worker in self._running):
            self._limit()

    def _limit(self) -> None:
        latest = time.monotonic() + self._grace_secs
        if self._deadline is None or self._stop.urgent:
            self._deadline = latest if self._deadline is None else min(self._deadline, latest)

    def _abandon(self) -> None:
        """Leave threads behind that are stuck. A checkpoint that is being written is worth waiting longer for, once."""
        saving: set[Worker] = set()
        if not (self._prolonged or self._stop.urgent):
            saving = {worker for worker in self._running if isinstance(worker.work, SinkWork) and worker.work.saving}
        for worker in self._running - saving:
            self.abandoned.append(worker)
            self._report.warn(
                f"thread {worker.name} is stuck in a call that cannot be interrupted; it was left behind, "
                "and its stage is closed when the call returns"
            )
        if saving:
            self._report.warn("a checkpoint is still being written; waiting for it (Ctrl-C twice leaves it)")
        self._running, self._prolonged = saving, True
        self._deadline = time.monotonic() + SAVE_GRACE_SECS


def _as_failure(reply: Reply) -> StageFailed:
    if isinstance(reply.error, StageFailed):
        return reply.error
    assert reply.error is not None
    phase = reply.phase if reply.phase in ("open", "close") else "run"
    return StageFailed(reply.worker.work.stage, reply.error, phase=phase, replica=reply.worker.work.replica)
