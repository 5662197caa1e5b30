"""A thread with a mailbox, and the one loop that every stage runs in: get, process, put."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, ClassVar, Literal

from flowdflash.errors import StageFailed
from flowdflash.items import BatchInfo
from flowdflash.runtime.channel import END, ChannelAborted
from flowdflash.runtime.meter import WorkerMeter
from flowdflash.runtime.openmp import release_team
from flowdflash.stage import OpenContext, Stage


class Work:
    """What one thread does with its items; one subclass per kind of stage."""

    gets_by_working: ClassVar[bool] = False
    """Time spent in ``get`` is work, not waiting."""

    def __init__(self, stage: str, replica: int = 0) -> None:
        self.stage, self.replica = stage, replica
        self.meter = WorkerMeter()

    def begin(self) -> Iterable[Any]:
        """Outputs before the first item."""
        return ()

    def over(self) -> bool:
        """No further item is wanted."""
        return False

    def get(self) -> Any:
        """The next item, or ``END``."""
        raise NotImplementedError

    def process(self, item: Any) -> Iterable[Any]:
        """Outputs for one item."""
        raise NotImplementedError

    def put(self, output: Any) -> bool:
        """Pass an output on; False if nobody wants it."""
        raise NotImplementedError

    def settle(self, item: Any, wanted: bool) -> None:
        """An item is dealt with; ``wanted`` if all of its outputs found a reader."""
        if wanted:
            self.meter.passed += 1
        else:
            self.meter.drop("no stage wanted it any more")

    def finish(self) -> Iterable[Any]:
        """Outputs after the last item."""
        return ()

    def leave(self) -> None:
        """Tell the readers that nothing more comes."""

    def turn(self, waited: Callable[[], None]) -> AbstractContextManager[None]:
        """Held while the stage computes; ``waited`` is called when it is held."""
        waited()
        return nullcontext()

    def about(self, item: Any) -> BatchInfo | None:
        """The batch that an item belongs to."""
        return getattr(item, "info", None)


def pump(work: Work) -> None:
    """Run a stage to its end.

    Raises:
        ChannelAborted: the run has failed elsewhere.
        StageFailed: this stage failed; says at which batch.
    """
    _guarded(work, None, lambda: _emit(work, work.begin))
    while not _guarded(work, None, work.over) and _turn(work):
        pass
    _guarded(work, None, lambda: _emit(work, work.finish))
    work.leave()
    work.meter.state = "done"


def _turn(work: Work) -> bool:
    """One item. A function of its own, so that no batch is kept alive by a local name while the next is awaited."""
    meter = work.meter
    begin = time.monotonic()
    meter.state = "at work" if work.gets_by_working else "waiting for input"
    item = _guarded(work, None, work.get)
    meter.moved_at = time.monotonic()
    elapsed = meter.moved_at - begin
    if work.gets_by_working:
        meter.busy_secs += elapsed
    else:
        meter.wait_in_secs += elapsed
    if item is END:
        return False
    meter.taken += 1
    wanted = _guarded(work, item, lambda: _emit(work, lambda: work.process(item)))
    work.settle(item, wanted)
    return True


def _emit(work: Work, outputs: Callable[[], Iterable[Any]]) -> bool:
    """Make outputs and pass each on; time the two apart, since outputs may come from a generator."""
    meter, clock = work.meter, time.monotonic
    iterator: Iterator[Any] | None = None
    wanted = True
    begin = clock()

    def waited() -> None:
        nonlocal begin
        now = clock()
        meter.wait_in_secs += now - begin
        meter.state, meter.moved_at = "at work", now
        begin = now

    while True:
        meter.state = "waiting for its turn"
        with work.turn(waited):
            if iterator is None:
                iterator = iter(outputs())
            output = next(iterator, END)
            release_team()
        meter.moved_at = made = clock()
        meter.busy_secs += made - begin
        if output is END:
            return wanted
        meter.state = "blocked on output"
        wanted &= work.put(output)
        meter.moved_at = begin = clock()
        meter.wait_out_secs += begin - made


def _guarded(work: Work, item: Any, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except (ChannelAborted, StageFailed):
        raise
    except BaseException as error:
        info = work.about(item) if item is not None else None
        batch, sample_ids = (info.seq, info.sample_ids) if info is not None else (None, ())
        raise StageFailed(work.stage, error, replica=work.replica, batch=batch, sample_ids=sample_ids) from error


@dataclass(frozen=True, slots=True, eq=False)
class Opening:
    """A stage and what it is opened with."""

    stage: Stage
    context: OpenContext


Phase = Literal["open", "plan", "run", "close"]


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """A thread has done what it was told; ``error`` if it could not."""

    worker: Worker
    phase: Phase
    error: BaseException | None


class Worker:
    """One thread. Its stages are opened, run and closed on it, at the executor's word."""

    def __init__(
        self, work: Work, stages: Sequence[tuple[str, Stage]], replies: SimpleQueue[Any], *, feeds: bool
    ) -> None:
        self.work, self.stages, self.feeds = work, tuple(stages), feeds
        self.name = f"{work.stage}[{work.replica}]"
        self._replies = replies
        self._orders: SimpleQueue[tuple[Phase, Callable[[], None]] | None] = SimpleQueue()
        self._tried: list[Opening] = []
        # A daemon, so that a thread stuck in a read that nothing can interrupt does not keep the process alive.
        self._thread = threading.Thread(target=self._main, name=f"flowdflash-{self.name}", daemon=True)
        self._thread.start()

    @property
    def tried(self) -> bool:
        """Some stage of this thread has been opened, or was tried to be."""
        return bool(self._tried)

    def tell(self, phase: Phase, action: Callable[[], None]) -> None:
        """Have the thread do something; it answers with a ``Reply``."""
        self._orders.put((phase, action))

    def open(self, openings: Sequence[Opening]) -> None:
        """Open the stages one after the other. On the thread.

        Raises:
            StageFailed: a stage could not be opened.
        """
        for opening in openings:
            self._tried.append(opening)
            self._named(opening, "open", partial(opening.stage.open, opening.context))

    def close(self, failed: Callable[[StageFailed], None]) -> None:
        """Close whatever was tried to be opened, the last one first, each once. On the thread."""
        while self._tried:
            opening = self._tried.pop()
            try:
                self._named(opening, "close", opening.stage.close)
            except StageFailed as error:
                failed(error)

    def dismiss(self) -> None:
        """Let the thread end when it has done all it was told."""
        self._orders.put(None)

    def join(self) -> None:
        """Wait for the thread to end."""
        self._thread.join()

    def _named(self, opening: Opening, phase: Literal["open", "close"], action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            ctx = opening.context
            raise StageFailed(ctx.stage, error, phase=phase, replica=ctx.replica) from error

    def _main(self) -> None:
        while (order := self._orders.get()) is not None:
            phase, action = order
            error: BaseException | None = None
            try:
                action()
            except BaseException as caught:
                error = caught
            release_team()
            self._replies.put(Reply(self, phase, error))
