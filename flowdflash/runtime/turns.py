"""Stages that compute on the CPU take turns."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flowdflash.runtime.channel import ChannelAborted


class Turns:
    """First come, first served; one at a time.

    Each stage that computes on the CPU uses all cores. Two of them at once have two teams of threads on the same cores,
    which wait for each other at every step of every kernel and get much less done than one after the other.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: deque[object] = deque()
        self._taken = False
        self._error: BaseException | None = None

    @contextmanager
    def turn(self, waited: Callable[[], None]) -> Iterator[None]:
        """Hold the turn; ``waited`` is called once it has come.

        Raises:
            ChannelAborted: the run has failed meanwhile.
        """
        ticket = object()
        with self._condition:
            self._waiting.append(ticket)
            self._condition.wait_for(lambda: self._error or (not self._taken and self._waiting[0] is ticket))
            self._waiting.remove(ticket)
            if self._error is not None:
                raise ChannelAborted(self._error)
            self._taken = True
        try:
            waited()
            yield
        finally:
            with self._condition:
                self._taken = False
                self._condition.notify_all()

    def abort(self, error: BaseException) -> None:
        """Wake everybody who waits, with an error."""
        with self._condition:
            self._error = error
            self._condition.notify_all()
