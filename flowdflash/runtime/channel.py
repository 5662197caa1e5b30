"""Bounded channels between threads: by items and by bytes, with two different ends, "finished" and "failed".

Waiting is done on condition variables, never by polling. A channel ends in one of four ways:

* ``finish``: a producer has no more items; when all have said so, readers drain what is left and then get ``END``;
* ``cancel``: the reader wants no more; ``put`` answers False from then on, so that producers can stop;
* ``interrupt``: the reader stops waiting; it still gets what is there, then ``END``;
* ``abort``: something failed; both sides raise ``ChannelAborted``, so that a failure never looks like end of data. With
  ``drain`` the reader first gets what is there.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Generic, Literal, TypeVar

T = TypeVar("T")


class End(Enum):
    """Type of ``END``."""

    END = "end"


END: Final = End.END
"""What ``get`` returns when there is nothing more to come."""


class ChannelAborted(Exception):
    """Raised on both sides of a channel when the run has failed elsewhere; ``error`` is that failure."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        super().__init__(str(error))


@dataclass(frozen=True, slots=True)
class ChannelStats:
    """Counters of one channel since it was made.

    Attributes:
        name: name of the edge.
        capacity: most items that may wait.
        capacity_bytes: most bytes that may wait, 0 for no limit.
        depth, depth_bytes: what waits now.
        high_water, high_water_bytes: the most that has ever waited.
        items_put, items_got: what went in and out.
        discarded: items put but never got, because the reader wanted no more or the run failed.
        put_wait_secs: time that producers were blocked, summed over producers.
        get_wait_secs: time that readers waited for an item.
    """

    name: str
    capacity: int
    capacity_bytes: int
    depth: int
    depth_bytes: int
    high_water: int
    high_water_bytes: int
    items_put: int
    items_got: int
    discarded: int
    put_wait_secs: float
    get_wait_secs: float


class Channel(Generic[T]):
    """First in, first out.

    The byte limit never blocks an item when the channel is empty, nor any of the first ``free_items`` items: a reader
    that needs a whole accumulation window before it frees anything must be able to get one.
    """

    def __init__(
        self, name: str, capacity: int, capacity_bytes: int = 0, *, producers: int = 1, free_items: int = 0
    ) -> None:
        if capacity < 1 or capacity_bytes < 0 or producers < 1:
            raise ValueError(f"channel {name!r}: capacity and producers must be at least 1, capacity_bytes at least 0")
        self.name, self.capacity, self.capacity_bytes = name, capacity, capacity_bytes
        self._free_items = free_items
        lock = threading.Lock()
        self._room = threading.Condition(lock)
        self._ready = threading.Condition(lock)
        self._items: deque[tuple[T, int]] = deque()
        self._producers = producers
        self._error: BaseException | None = None
        self._cancelled = self._interrupted = self._draining = False
        self._depth = self._bytes = self._high_water = self._high_water_bytes = 0
        self._put = self._got = self._discarded = 0
        self._put_wait_secs = self._get_wait_secs = 0.0

    def put(self, item: T, place: int = 0) -> bool:
        """Add an item, waiting for room. False if the reader wants no more. ``place`` matters in ``OrderedChannel``.

        Raises:
            ChannelAborted: the run has failed.
        """
        nbytes: int = getattr(item, "nbytes", 0)
        with self._room:
            if not self._admits(place, nbytes):
                begin = time.monotonic()
                while not self._admits(place, nbytes):
                    self._room.wait()
                self._put_wait_secs += time.monotonic() - begin
            if self._error is not None:
                raise ChannelAborted(self._error)
            if self._cancelled:
                return False
            if self._producers == 0:
                raise RuntimeError(f"channel {self.name!r}: put after every producer had finished")
            self._store(place, item, nbytes)
            self._put += 1
            self._depth += 1
            self._bytes += nbytes
            if self._depth > self._high_water:
                self._high_water = self._depth
            if self._bytes > self._high_water_bytes:
                self._high_water_bytes = self._bytes
            self._ready.notify()
            return True

    def get(self) -> T | Literal[End.END]:
        """The next item, waiting for one; ``END`` when there is nothing more to come.

        Raises:
            ChannelAborted: the run has failed.
        """
        with self._ready:
            if not (self._has_next() or self._over()):
                begin = time.monotonic()
                while not (self._has_next() or self._over()):
                    self._ready.wait()
                self._get_wait_secs += time.monotonic() - begin
            if self._error is not None and not (self._draining and self._has_next()):
                raise ChannelAborted(self._error)
            if not self._has_next():
                self._check_gap()
                return END
            item, nbytes = self._fetch()
            self._got += 1
            self._depth -= 1
            self._bytes -= nbytes
            self._room.notify_all()
            return item

    def finish(self) -> None:
        """One producer has no more items. The channel is finished when all its producers are."""
        with self._ready:
            if self._producers == 0:
                raise RuntimeError(f"channel {self.name!r}: finished more often than it has producers")
            self._producers -= 1
            if self._producers == 0:
                self._ready.notify_all()

    def cancel(self) -> None:
        """The reader wants no more: drop what waits, answer False to every ``put``."""
        with self._ready:
            self._cancelled = True
            self._drop()

    def interrupt(self) -> None:
        """The reader stops waiting: it gets what is there, then ``END``."""
        with self._ready:
            self._interrupted = True
            self._ready.notify_all()

    def abort(self, error: BaseException, *, drain: bool = False) -> None:
        """Something failed: wake both sides. The first error is kept; ``drain`` leaves the reader what waits."""
        with self._ready:
            if self._error is None:
                self._error = error
            self._draining = drain
            if drain:
                self._wake()
            else:
                self._drop()

    @property
    def exhausted(self) -> bool:
        """Every producer has finished and every item has been got: the true end of data."""
        with self._ready:
            return self._producers == 0 and self._depth == 0 and not self._cancelled and self._error is None

    def stats(self) -> ChannelStats:
        """Counters, consistent among themselves."""
        with self._ready:
            return ChannelStats(
                self.name,
                self.capacity,
                self.capacity_bytes,
                self._depth,
                self._bytes,
                self._high_water,
                self._high_water_bytes,
                self._put,
                self._got,
                self._discarded,
                self._put_wait_secs,
                self._get_wait_secs,
            )

    def _admits(self, place: int, nbytes: int) -> bool:
        """No reason for this item to wait (it may be refused instead)."""
        if self._error is not None or self._cancelled:
            return True
        if self._depth >= self.capacity:
            return False
        limit = self.capacity_bytes
        return not limit or not self._depth or self._put < self._free_items or self._bytes + nbytes <= limit

    def _over(self) -> bool:
        return self._producers == 0 or self._interrupted or self._cancelled or self._error is not None

    def _drop(self) -> None:
        self._discarded += self._depth
        self._depth = self._bytes = 0
        self._clear()
        self._wake()

    def _wake(self) -> None:
        self._ready.notify_all()
        self._room.notify_all()

    def _has_next(self) -> bool:
        return bool(self._items)

    def _store(self, place: int, item: T, nbytes: int) -> None:
        self._items.append((item, nbytes))

    def _fetch(self) -> tuple[T, int]:
        return self._items.popleft()

    def _clear(self) -> None:
        self._items.clear()

    def _check_gap(self) -> None:
        """Nothing can be missing from a FIFO."""


class OrderedChannel(Channel[T]):
    """Hands items over by ``place`` (0, 1, 2, ...), whatever the order in which they arrive: a bounded reorder buffer.

    An item waits while its place is ``capacity`` or more ahead of the next one due. The item that is due is never
    blocked, neither by count nor by bytes; so as long as every producer brings its items in rising order, the one that
    holds the item due can always deliver it, and no deadlock is possible.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._held: dict[int, tuple[T, int]] = {}
        self._due = 0

    def _admits(self, place: int, nbytes: int) -> bool:
        if self._error is not None or self._cancelled or place == self._due:
            return True
        if place >= self._due + self.capacity:
            return False
        limit = self.capacity_bytes
        return not limit or self._put < self._free_items or self._bytes + nbytes <= limit

    def _has_next(self) -> bool:
        return self._due in self._held

    def _store(self, place: int, item: T, nbytes: int) -> None:
        if place < self._due or place in self._held:
            raise RuntimeError(f"channel {self.name!r}: place {place} was delivered twice")
        self._held[place] = (item, nbytes)

    def _fetch(self) -> tuple[T, int]:
        fetched = self._held.pop(self._due)
        self._due += 1
        return fetched

    def _clear(self) -> None:
        self._held.clear()

    def _check_gap(self) -> None:
        if self._held and self._producers == 0:
            raise RuntimeError(f"channel {self.name!r}: place {self._due} never arrived, though later ones did")
