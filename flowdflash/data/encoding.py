"""Rows encoded on all cores, in the order in which they came.

In one process Python code runs on one core at a time, and the tokenizer's other cores would wait for it. So where rows
are many, processes of our own encode them, one for each core; until these are ready, and where rows are few, threads of
this process do.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from types import TracebackType

from flowdflash.data.encoding_process import (
    AHEAD,
    FORKS,
    CannotSend,
    Encode,
    EncodingProcess,
    Family,
    ProcessGone,
    sendable,
)
from flowdflash.data.packed import Packed, pack
from flowdflash.data.rows import Row, chunks

THREADS = 2
"""One renders rows while the other waits for the tokenizer, which works outside the interpreter lock on all cores."""
MANY_BYTES = 8 << 20
"""Rows of so many bytes keep one process busy for seconds, which is what others need to begin."""
MOST_PROCESSES = 32
"""One process reads and writes for all of them."""
Encoding = Generator[tuple[list[Row], Packed], None, None]


def encoded(
    rows: Iterable[Row], encode: Encode, warn: Callable[[str], None] = lambda text: None, nbytes: int = 0
) -> Encoding:
    """Chunks of rows with what became of each row, in order; memory holds a few chunks per core.

    Args:
        rows: any number of them.
        encode: what becomes of the rows of a chunk; called by several threads, and pickled for other processes.
        warn: told, by any thread, if a process was lost. Its chunk is encoded here, so nothing is lost with it.
        nbytes: what is known of the size of the rows; the size of a compressed file will do.

    Raises:
        Exception: whatever ``encode`` raises.
    """
    with _Encoders(encode, warn, nbytes) as encoders:
        ahead: deque[tuple[list[Row], Future[Packed]]] = deque()
        for chunk in chunks(rows):
            ahead.append((chunk, encoders.submit(chunk)))
            if len(ahead) > encoders.count:
                done, results = ahead.popleft()
                yield done, results.result()
        while ahead:
            done, results = ahead.popleft()
            yield done, results.result()


def cores() -> int:
    """Cores that encoding may use: those of this process, or as many as RAYON_NUM_THREADS allows the tokenizer."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    told = os.environ.get("RAYON_NUM_THREADS", "")
    return min(int(told), allowed) if told.isdecimal() and int(told) else allowed


class _Encoders:
    """Threads that each take an encoder which is free, here or in a process."""

    def __init__(self, encode: Encode, warn: Callable[[str], None], nbytes: int) -> None:
        self._here, self._warn = encode, warn
        self._most = min(cores(), MOST_PROCESSES) if os.name == "posix" else 1  # elsewhere pipes cannot be handed over
        self._pool = ThreadPoolExecutor(THREADS + AHEAD * self._most, "encode")
        self._free: SimpleQueue[Encode] = SimpleQueue()
        self._families: list[Family] = []
        self._lock, self._superfluous, self._ended = threading.Lock(), 0, False
        self._expected, self._submitted = nbytes, 0
        for _ in range(THREADS):
            self._free.put(encode)

    def __enter__(self) -> _Encoders:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        for family in self._families:
            if error is not None or not all(process.pid for process in family.processes):
                family.kill()  # rather than wait for what nobody wants any more
        self._pool.shutdown(cancel_futures=True)
        for family in self._families:
            family.close()

    @property
    def count(self) -> int:
        """How many chunks can be in work."""
        return THREADS + AHEAD * sum(len(family.processes) for family in self._families)

    def submit(self, chunk: list[Row]) -> Future[Packed]:
        """Have a chunk encoded; by processes, where many bytes are expected or have been submitted."""
        self._submitted += sum(row.nbytes for row in chunk)
        if max(self._expected, self._submitted) >= MANY_BYTES and self._most > 1:
            self._add_processes()
        return self._pool.submit(self._work, chunk)

    def _add_processes(self) -> None:
        pickled, count, self._most = sendable(self._here), self._most, 0
        try:
            for size in [count] if FORKS else [1] * count:
                family = Family(size)
                self._families.append(family)
                self._pool.submit(family.begin, pickled)
                for process in family.processes:
                    self._pool.submit(self._await, process)
        except ProcessGone as gone:
            self._lost(gone)

    def _await(self, process: EncodingProcess) -> None:
        try:
            process.wait()
        except ProcessGone as gone:
            self._lost(gone)
            return
        with self._lock:
            self._superfluous = THREADS
        for _ in range(AHEAD):
            self._free.put(process.encode)

    def _work(self, chunk: Sequence[Row]) -> Packed:
        encode = self._free.get()
        try:
            return pack([]) if self._ended else encode(chunk)
        except CannotSend:
            return self._here(chunk)
        except ProcessGone as gone:
            self._lost(gone)
            encode = self._here
            return pack([]) if self._ended else encode(chunk)
        finally:
            if encode is not self._here or self._needed():
                self._free.put(encode)

    def _needed(self) -> bool:
        """Is an encoder of this process, which has just become free, still to be used?"""
        with self._lock:
            if not self._superfluous:
                return True
            self._superfluous -= 1
            return False

    def _lost(self, gone: ProcessGone) -> None:
        if not self._ended:
            self._warn(f"a process that encodes rows is gone ({gone}); its rows are encoded by others")
