"""Tokens and loss masks on disk: flat arrays, memory-mapped, keyed by everything that decides what is in them.

A store is a folder: ``ids.bin`` (int32) and ``mask.bin`` (bytes 0 and 1), one sample after the other; ``samples.npz``
with a column per fact; ``rejects.jsonl``; ``notes.bin`` for text kept beside samples; and ``meta.json``, written last.
It is built under a lock in a folder of its own, forced to disk and moved into place, so that a store either is there
as a whole or is not there.
"""

from __future__ import annotations

import gc
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from zipfile import BadZipFile

import numpy as np
from filelock import BaseFileLock, FileLock, Timeout

from flowdflash.data.align import Mask
from flowdflash.data.encode import RowResult
from flowdflash.data.encoding import Encoding, encoded
from flowdflash.data.packed import Packed, pack
from flowdflash.data.rejects import Accounts
from flowdflash.data.rows import Row
from flowdflash.data.store_writer import COLUMNS, FORMAT, VOCABULARY, StoreWriter, sync
from flowdflash.errors import DataInvalid
from flowdflash.items import IntArray

PATIENCE_SECS = 1.0
"""Before a person is told that another run is waited for."""


@dataclass(frozen=True, slots=True)
class Places:
    """Says ``file:line`` of a row; ``names`` are those of the files."""

    names: tuple[str, ...]

    def __call__(self, row: Row) -> str:
        """Place of a row."""
        return f"{self.name(row.part)}:{row.line}"

    def name(self, part: int) -> str:
        """What a file is called."""
        return self.names[part] if part < len(self.names) else f"file {part}"


class Encoder(Protocol):
    """What turns rows into samples. Pickled where rows are many, so that other processes have one too."""

    @property
    def fingerprint(self) -> str:
        """Hash over everything but the rows that decides the samples."""

    def encode(self, rows: Sequence[Row], where: Callable[[Row], str]) -> list[RowResult]:
        """What becomes of each row, in order. Called by several threads at a time."""


def store_key(encoder: Encoder, files: Iterable[Path], **more: Any) -> str:
    """SHA-256 over the bytes of the files in order, the encoder, what else is given, and the format.

    Names and dates of files do not count.
    """
    digest = hashlib.sha256(json.dumps([FORMAT, encoder.fingerprint, more], sort_keys=True).encode())
    for file in files:
        try:
            with file.open("rb") as data:
                digest.update(hashlib.file_digest(data, "sha256").digest())
        except OSError as error:
            raise DataInvalid(f"{file}: cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


class TokenStore:
    """A finished store, open for reading from any thread.

    Args:
        folder: where it lies.
        names: names of the files it was made from, for telling a person where a sample comes from.

    Attributes:
        accounts: what became of the rows.
        lengths, supervised: ``[n]`` tokens, and tokens with a loss, per sample.
        token_ids, supervised_token_ids: sorted ids that occur, and that occur with a loss.

    Raises:
        OSError, ValueError, KeyError, TypeError, BadZipFile: there is no whole store in the folder.
    """

    def __init__(self, folder: Path, names: Sequence[str] = ()) -> None:
        self.folder, self._places = folder, Places(tuple(names))
        meta = json.loads((folder / "meta.json").read_text("utf-8"))
        self.key: str = meta["key"]
        self.accounts = Accounts.from_dict(meta["accounts"])
        with np.load(folder / "samples.npz") as columns:
            self._offsets, self._note_offsets, self._lines, self._parts, self._turns, self.supervised = (
                columns[name] for name in COLUMNS
            )
            self.token_ids, self.supervised_token_ids = (columns[name] for name in VOCABULARY)
        self.lengths: IntArray = np.diff(self._offsets)
        self._ids = _mapped(folder / "ids.bin", np.dtype("<i4"), int(self._offsets[-1]))
        self._mask = _mapped(folder / "mask.bin", np.dtype(np.bool_), int(self._offsets[-1]))
        self._notes = _mapped(folder / "notes.bin", np.dtype(np.uint8), int(self._note_offsets[-1]))

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, sample: int) -> tuple[IntArray, Mask]:
        """``input_ids [n]`` int64 and ``loss_mask [n]`` bool, copies."""
        where = self._slice(self._offsets, sample)
        return self._ids[where].astype(np.int64), np.array(self._mask[where])

    def note(self, sample: int) -> Any:
        """What was kept beside a sample, parsed; None if nothing was."""
        text = bytes(self._notes[self._slice(self._note_offsets, sample)])
        return json.loads(text) if text else None

    def describe(self, sample: int) -> str:
        """``file:line`` of the row that a sample comes from."""
        self._slice(self._offsets, sample)
        return f"{self._places.name(int(self._parts[sample]))}:{self._lines[sample]}"

    def turn(self, sample: int) -> int:
        """The assistant turn that a sample stands for, from 0; -1 for all turns of its row."""
        self._slice(self._offsets, sample)
        return int(self._turns[sample])

    def write_rejects(self, path: Path) -> None:
        """Write every rejection, a JSON object a line: file, line, reason, detail, turn, row."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + ".part")
        with (
            (self.folder / "rejects.jsonl").open(encoding="ascii") as rejects,
            draft.open("w", encoding="ascii") as out,
        ):
            for line in rejects:
                entry = json.loads(line)
                out.write(json.dumps({"file": self._places.name(entry.pop("part")), **entry}) + "\n")
        draft.replace(path)

    def first_bad(self) -> str:
        """Place and reason of the first row with a fault of its own; empty if there is none."""
        if not self.accounts.first_bad:
            return ""
        part, line, reason = self.accounts.first_bad
        return f"{self._places.name(part)}:{line}: {reason}"

    def _slice(self, offsets: IntArray, sample: int) -> slice:
        if not 0 <= sample < len(self):
            raise IndexError(f"no sample {sample}: the store holds {len(self)}")
        return slice(int(offsets[sample]), int(offsets[sample + 1]))


def open_or_build(
    folder: Path,
    key: str,
    rows: Callable[[], Iterable[Row]],
    encoder: Encoder,
    *,
    names: Sequence[str] = (),
    warn: Callable[[str], None] = lambda text: None,
    nbytes: int = 0,
    unchanged: Callable[[], bool] = lambda: True,
) -> TokenStore:
    """The store of a key in ``folder``, built from ``rows()`` unless it is there. Safe between runs and machines.

    ``nbytes`` is about the size of the rows, so that a large build begins with all cores; 0 if it is not known.
    ``unchanged`` is asked after a build whether the rows are still those of the key.

    Raises:
        DataInvalid: they are not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place, told = folder / key, ", ".join(names)
    with _held(FileLock(folder / f"{key}.lock"), told, warn):
        if place.exists():
            try:
                return TokenStore(place, names)
            except (OSError, ValueError, KeyError, TypeError, BadZipFile) as error:
                warn(f"the token store {place} is damaged and is built again: {error}")
                shutil.rmtree(place)
        building = folder / f"{key}.building"
        shutil.rmtree(building, ignore_errors=True)  # left by a run that was killed: whoever holds the lock is alone
        try:
            building.mkdir()
            encode = partial(_encode, encoder, Places(tuple(names)))
            _build(building, key, encoded(rows(), encode, warn, nbytes))
            if not unchanged():
                raise DataInvalid(f"{told}: changed while it was read; start again when nobody writes to it any more")
            building.replace(place)
            sync(folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
        return TokenStore(place, names)


@contextmanager
def _held(lock: BaseFileLock, told: str, warn: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock; say so if another run has to be waited for."""
    try:
        lock.acquire(timeout=PATIENCE_SECS)
    except Timeout:
        warn(f"another run prepares the tokens of {told}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _encode(encoder: Encoder, where: Callable[[Row], str], rows: Sequence[Row]) -> Packed:
    return pack(encoder.encode(rows, where))


def _build(folder: Path, key: str, encoding: Encoding) -> None:
    with StoreWriter(folder) as writer, _young_objects_only(), closing(encoding):
        for chunk, results in encoding:
            writer.add(chunk, results)
        writer.finish(key)


@contextmanager
def _young_objects_only() -> Iterator[None]:
    """The collector leaves alone what is there already: the libraries hold 400,000 objects, 0.4 s each time."""
    if gc.get_freeze_count():  # somebody else's, who would miss it
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> np.ndarray[Any, Any]:
    size = path.stat().st_size
    if size != count * dtype.itemsize:
        raise ValueError(f"{path.name} has {size} bytes, expected {count * dtype.itemsize}")
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,)) if count else np.zeros(0, dtype)
