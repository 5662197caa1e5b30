"""Rows that outlive a kill while they gather: ``<name>.partial``, from which the whole file is written at the end.

Its first line says what the rows are made from. A batch follows another as one block: a line that tells which samples
its rows belong to, then a line per row. Each block is forced to disk, so that at most the one that was being written is
lost; what is left of that one is cut off. The rows lie in the order in which batches came, and are put into the order
of the samples when all are there.
"""

from __future__ import annotations

import gzip
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from flowdflash.errors import DataInvalid


@dataclass(frozen=True, slots=True)
class Entry:
    """One row: to which sample it belongs, why it is left out (empty if it is not), and the row itself."""

    sample_id: int
    dropped: str
    row: Mapping[str, Any]


class PartialFile:
    """Rows that gather beside the file that they will be.

    Args:
        path: the file; a name that ends in ``.gz`` is compressed.
        made_from: what decides the rows, as JSON has it; rows made from something else are refused.

    Attributes:
        batches: numbers of the batches that are in it, and why their samples were left out (empty if not), in order.

    Raises:
        DataInvalid: another run writes to it, or it holds other rows.
    """

    def __init__(self, path: Path, made_from: Mapping[str, Any]) -> None:
        self.path = path.with_name(f"{path.name}.partial")
        self.batches: dict[int, tuple[str, ...]] = {}
        self._final = path
        self._places: list[tuple[int, int, str, int, int]] = []  # epoch, sample, why it was dropped, offset, bytes
        self._lock = FileLock(path.with_name(f".{path.name}.lock"))
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise DataInvalid(f"{path}: another run is writing to it") from None
        try:
            self._file = self._opened(json.loads(json.dumps(made_from)))
        except BaseException:
            self._unlock()
            raise

    def _opened(self, made_from: Mapping[str, Any]) -> IO[bytes]:
        if not self.path.exists() or not (end := self._read(made_from)):
            file = self.path.open("w+b")
            self._append(file, _line({"made_from": made_from}))
            return file
        file = self.path.open("r+b")
        file.truncate(end)
        file.seek(end)
        return file

    def _read(self, made_from: Mapping[str, Any]) -> int:
        """Take up what is there; where its last whole block ends."""
        with self.path.open("rb") as file:
            if not (head := file.readline()).endswith(b"\n"):
                return 0
            if changed := _differences(self._parsed(head, {"made_from"})["made_from"], made_from):
                raise DataInvalid(
                    f"{self.path} holds rows of a run that was not the same ({'; '.join(changed)}): go on with that "
                    "run as it was, or delete the file"
                )
            end = file.tell()
            while (head := file.readline()).endswith(b"\n"):
                block = self._parsed(head, {"seq", "epoch", "samples", "dropped"})
                start = file.tell()
                lines = [file.readline() for _ in block["samples"]]
                if lines and not lines[-1].endswith(b"\n"):
                    break
                self._note(block, start, list(map(len, lines)))
                end = file.tell()
        return end

    def _parsed(self, line: bytes, keys: Set[str]) -> Mapping[str, Any]:
        try:
            found: Mapping[str, Any] = json.loads(line)
            if not keys <= found.keys():
                raise ValueError("it is no line of such a file")
        except (ValueError, TypeError, AttributeError) as error:
            raise DataInvalid(f"{self.path} is damaged, so no run can go on with it ({error}): delete it") from None
        return found

    def _note(self, block: Mapping[str, Any], start: int, sizes: Sequence[int]) -> None:
        self.batches[block["seq"]] = tuple(block["dropped"])
        ends = accumulate(sizes, initial=start)
        for sample, why, offset, size in zip(block["samples"], block["dropped"], ends, sizes, strict=False):
            self._places.append((block["epoch"], sample, why, offset, size))

    def add(self, seq: int, epoch: int, entries: Sequence[Entry]) -> None:
        """One batch; on disk when this returns."""
        block = {
            "seq": seq,
            "epoch": epoch,
            "samples": [entry.sample_id for entry in entries],
            "dropped": [entry.dropped for entry in entries],
        }
        head, lines = _line(block), [_line(entry.row) for entry in entries]
        start = self._file.tell() + len(head)
        self._append(self._file, b"".join([head, *lines]))
        self._note(block, start, list(map(len, lines)))

    def _append(self, file: IO[bytes], block: bytes) -> None:
        file.write(block)
        file.flush()
        os.fsync(file.fileno())

    def write_dropped(self, path: Path) -> None:
        """Write the rows that were left out."""
        write_lines(path, self._lines(dropped=True))

    def complete(self) -> None:
        """Write the file, which is whole now, and remove the partial one."""
        write_lines(self._final, self._lines(dropped=False), compress=self._final.name.endswith(".gz"))
        self._file.close()
        self.path.unlink()

    def _lines(self, *, dropped: bool) -> Iterator[bytes]:
        end = self._file.tell()
        for _, _, why, offset, size in sorted(self._places):
            if bool(why) == dropped:
                self._file.seek(offset)
                yield self._file.read(size)
        self._file.seek(end)

    def close(self) -> None:
        """Leave it for the run that goes on with it; without a batch there is nothing to leave."""
        if not self._file.closed:
            self._file.close()
            if not self.batches:
                self.path.unlink()
        self._unlock()

    def _unlock(self) -> None:
        # Removed while still held, so that nobody else's lock is ever taken away.
        Path(self._lock.lock_file).unlink(missing_ok=True)
        self._lock.release()


def write_lines(path: Path, lines: Iterable[bytes], *, compress: bool = False) -> None:
    """Write a file so that it is whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        with fresh.open("wb") as file:
            if compress:
                # No time stamp inside: the same rows give the same file.
                with gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) as packed:
                    packed.writelines(lines)
            else:
                file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def _line(row: Mapping[str, Any]) -> bytes:
    # UTF-8 has no half surrogate pairs; backslashreplace writes them as the escapes of JSON.
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def _differences(before: Any, now: Any, path: str = "") -> list[str]:
    """What differs between two trees, by dotted name."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        names = dict.fromkeys([*before, *now])
        return [
            text
            for name in names
            for text in _differences(before.get(name), now.get(name), f"{path}.{name}" if path else name)
        ]
    return [] if before == now else [f"{path} {before} then, {now} now"]
