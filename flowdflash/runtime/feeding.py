"""What feeds the target: the plan, and batches of tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from flowdflash.items import BatchInfo, TokenBatch
from flowdflash.runtime.channel import END, Channel
from flowdflash.runtime.dispatch import Dispatch, Routed
from flowdflash.runtime.outlets import Outlet, put_to
from flowdflash.runtime.planner import Planner
from flowdflash.runtime.worker import Work


class PlanWork(Work):
    """Plans, and hands batch headers to the dispatcher."""

    gets_by_working: ClassVar[bool] = True

    def __init__(self, stage: str, planner: Planner, outlets: Sequence[Outlet]) -> None:
        super().__init__(stage)
        self.planner, self._outlets = planner, outlets
        self._batches: Iterator[BatchInfo] = planner.batches()
        self._unwanted = False

    def over(self) -> bool:
        """Whether the readers have stopped reading."""
        return self._unwanted

    def get(self) -> Any:
        """The next batch of the plan."""
        return next(self._batches, END)

    def process(self, item: BatchInfo) -> Iterable[BatchInfo]:
        """The batch, stamped."""
        return (item.stamped(self.stage, time.monotonic()),)

    def put(self, output: BatchInfo) -> bool:
        """Hand it on."""
        self._unwanted = not put_to(self._outlets, output)
        return not self._unwanted

    def leave(self) -> None:
        """The plan has ended, or nobody wants more of it."""
        for outlet in self._outlets:
            outlet.finish()


class DispatchWork(Work):
    """Takes a routed batch, fetches its tokens, puts it into the channel of its replica."""

    def __init__(
        self,
        stage: str,
        number: int,
        dispatch: Dispatch,
        fill: Callable[[BatchInfo], TokenBatch],
        channels: Sequence[Channel[TokenBatch]],
    ) -> None:
        super().__init__(stage, number)
        self._dispatch, self._fill, self._channels = dispatch, fill, channels

    def get(self) -> Any:
        """The next batch and its replica; the time that it waited for a replica is time blocked on output."""
        routed = self._dispatch.take()
        if routed is not END:
            self.meter.wait_in_secs -= routed.blocked_secs
            self.meter.wait_out_secs += routed.blocked_secs
        return routed

    def process(self, item: Routed) -> Iterable[tuple[Routed, TokenBatch]]:
        """Tokens, padded."""
        batch = self._fill(item.info)
        return ((item, replace(batch, info=item.info.stamped(self.stage, time.monotonic()))),)

    def put(self, output: tuple[Routed, TokenBatch]) -> bool:
        """Hand it to its replica, in the order in which batches were routed to it."""
        routed, batch = output
        return self._channels[routed.replica].put(batch, routed.ticket)

    def leave(self) -> None:
        """No replica gets more from this thread."""
        for channel in self._channels:
            channel.finish()
