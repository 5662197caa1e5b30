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
import os
import shutil
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Protocol
from zipfile import BadZipFile

import numpy as np
from filelock import FileLock

from flowdflash.data.align import Ids, Mask
from flowdflash.data.encode import RowResult, Sample
from flowdflash.data.rejects import LENGTH_REASONS, Accounts, Rejection
from flowdflash.data.rows import Row, chunks
from flowdflash.errors import DataInvalid
from flowdflash.items import IntArray

FORMAT = 4
"""Raise it when the same rows, tokenizer and options begin to give other samples or another layout."""
COLUMNS = ("offsets", "note_offsets", "lines", "parts", "turns", "supervised")
VOCABULARY = ("token_ids", "supervised_token_ids")
ENCODING_THREADS = 2
"""One renders rows while the other waits for the tokenizer, which works outside the interpreter lock on all cores."""


class Encoder(Protocol):
    """What turns rows into samples."""

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
        self.folder, self.names = folder, tuple(names)
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
        return f"{self._name(int(self._parts[sample]))}:{self._lines[sample]}"

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
                out.write(json.dumps({"file": self._name(entry.pop("part")), **entry}) + "\n")
        draft.replace(path)

    def first_bad(self) -> str:
        """Place and reason of the first row with a fault of its own; empty if there is none."""
        if not self.accounts.first_bad:
            return ""
        part, line, reason = self.accounts.first_bad
        return f"{self._name(part)}:{line}: {reason}"

    def _name(self, part: int) -> str:
        return self.names[part] if part < len(self.names) else f"file {part}"

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
) -> TokenStore:
    """The store of a key in ``folder``, built from ``rows()`` unless it is there. Safe between runs and machines."""
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / key
    with FileLock(folder / f"{key}.lock"):
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
            _build(building, key, rows(), encoder, names)
            building.replace(place)
            _sync(folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
        return TokenStore(place, names)


def _build(folder: Path, key: str, rows: Iterable[Row], encoder: Encoder, names: Sequence[str]) -> None:
    def where(row: Row) -> str:
        return f"{names[row.part] if row.part < len(names) else f'file {row.part}'}:{row.line}"

    with _Writer(folder) as writer, _young_objects_only(), ThreadPoolExecutor(ENCODING_THREADS, "encode") as pool:
        for chunk, results in _in_order(pool, chunks(rows), lambda chunk: encoder.encode(chunk, where)):
            writer.accounts.rows_read += len(chunk)
            for row, result in zip(chunk, results, strict=True):
                writer.add(row, result)
            writer.flush()
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


def _in_order(
    pool: ThreadPoolExecutor, parts: Iterable[list[Row]], work: Callable[[list[Row]], list[RowResult]]
) -> Iterator[tuple[list[Row], list[RowResult]]]:
    """Parts with their results, a few ahead: rows are read and rendered while the tokenizer is at work on others."""
    ahead: deque[tuple[list[Row], Future[list[RowResult]]]] = deque()
    for part in parts:
        ahead.append((part, pool.submit(work, part)))
        if len(ahead) > ENCODING_THREADS:
            done, results = ahead.popleft()
            yield done, results.result()
    for done, results in ahead:
        yield done, results.result()


class _Writer:
    """Writes a store row by row."""

    def __init__(self, folder: Path) -> None:
        self.accounts = Accounts()
        self._folder = folder
        self._columns = {name: array("q", [0] if name.endswith("offsets") else []) for name in COLUMNS}
        self._seen = {name: np.zeros(0, np.bool_) for name in VOCABULARY}
        self._waiting: list[Sample] = []
        self._files = ExitStack()

    def __enter__(self) -> _Writer:
        def created(name: str) -> IO[bytes]:
            return self._files.enter_context((self._folder / name).open("wb"))

        self._ids, self._mask, self._notes, self._rejects = map(
            created, ("ids.bin", "mask.bin", "notes.bin", "rejects.jsonl")
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def add(self, row: Row, result: RowResult) -> None:
        """Take in what became of one row."""
        books = self.accounts
        for sample in result.samples:
            self._add_sample(row, sample)
        for rejection in result.rejections:
            self._add_rejection(row, rejection)
        if result.samples:
            books.rows_kept += 1
            books.samples_rejected.update(rejection.reason for rejection in result.rejections)
        elif result.rejections:
            self._count_rejected(row, result.rejections)
        else:
            books.rows_other_split += 1

    def _count_rejected(self, row: Row, rejections: Sequence[Rejection]) -> None:
        """A row goes under one reason: a fault of its own before its length."""
        books = self.accounts
        bad = next((rejection for rejection in rejections if rejection.reason not in LENGTH_REASONS), None)
        books.rejected[(bad or rejections[0]).reason] += 1
        if bad is not None:
            books.rejected_bad += 1
            books.first_bad = books.first_bad or (row.part, row.line, str(bad).encode("utf-8", "replace").decode())

    def _add_sample(self, row: Row, sample: Sample) -> None:
        self._waiting.append(sample)
        note = sample.note.encode()
        self._notes.write(note)
        supervised = int(np.count_nonzero(sample.mask))
        columns, books = self._columns, self.accounts
        columns["offsets"].append(columns["offsets"][-1] + len(sample.ids))
        columns["note_offsets"].append(columns["note_offsets"][-1] + len(note))
        for name, value in (
            ("lines", row.line),
            ("parts", row.part),
            ("turns", sample.turn),
            ("supervised", supervised),
        ):
            columns[name].append(value)
        books.samples += 1
        books.truncated += sample.truncated
        books.tokens += len(sample.ids)
        books.supervised_tokens += supervised
        books.turns_without_end_token += sample.open_turns

    def flush(self) -> None:
        """Write the tokens of the samples added since the last time."""
        if self._waiting:
            ids = np.concatenate([sample.ids for sample in self._waiting])
            mask = np.concatenate([sample.mask for sample in self._waiting])
            self._ids.write(ids.astype("<i4", copy=False).tobytes())
            self._mask.write(mask.astype(np.bool_, copy=False).tobytes())
            self._see("token_ids", ids)
            self._see("supervised_token_ids", ids[mask])
            self._waiting.clear()

    def _see(self, name: str, ids: Ids) -> None:
        highest = int(ids.max(initial=-1))
        if highest >= len(self._seen[name]):
            self._seen[name] = np.pad(self._seen[name], (0, highest + 1 - len(self._seen[name])))
        self._seen[name][ids] = True

    def _add_rejection(self, row: Row, rejection: Rejection) -> None:
        entry: dict[str, Any] = {"part": row.part, "line": row.line, "reason": rejection.reason}
        if rejection.detail:
            entry["detail"] = rejection.detail
        if rejection.turn >= 0:
            entry["turn"] = rejection.turn
        # ASCII escapes keep half surrogate pairs as they were, where UTF-8 could not hold them.
        try:
            text = json.dumps({**entry, "row": row.value}, default=str)
        except RecursionError:
            text = json.dumps({**entry, "row": "nested too deeply to be written"})
        self._rejects.write(text.encode("ascii") + b"\n")

    def finish(self, key: str) -> None:
        """Check the books, write columns and ``meta.json``, force everything to disk."""
        self.accounts.balance()
        self._files.close()
        columns = {name: np.array(column, dtype=np.int64) for name, column in self._columns.items()}
        seen = {name: np.flatnonzero(flags) for name, flags in self._seen.items()}
        np.savez(self._folder / "samples.npz", **columns, **seen)  # type: ignore[arg-type]  # of its option allow_pickle
        meta = {"format": FORMAT, "key": key, "accounts": self.accounts.as_dict()}
        (self._folder / "meta.json").write_text(json.dumps(meta, indent=1), "utf-8")
        for file in self._folder.iterdir():
            _sync(file)
        _sync(self._folder)


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> np.ndarray[Any, Any]:
    size = path.stat().st_size
    if size != count * dtype.itemsize:
        raise ValueError(f"{path.name} has {size} bytes, expected {count * dtype.itemsize}")
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,)) if count else np.zeros(0, dtype)


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a folder
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
