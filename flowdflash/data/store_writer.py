"""Writes a token store, chunk by chunk."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np

from flowdflash.data.align import Ids
from flowdflash.data.packed import Packed
from flowdflash.data.rejects import LENGTH_REASONS, Accounts, Rejection
from flowdflash.data.rows import Row
from flowdflash.errors import FlowdflashError
from flowdflash.items import IntArray

FORMAT = 5
"""Raise it when the same rows, tokenizer and options begin to give other samples or another layout."""
OFFSETS = ("offsets", "note_offsets")
COLUMNS = (*OFFSETS, "lines", "parts", "turns", "supervised")
VOCABULARY = ("token_ids", "supervised_token_ids")


class StoreWriter:
    """Writes a store into an empty folder; ``finish`` makes it whole."""

    def __init__(self, folder: Path) -> None:
        self.accounts = Accounts()
        self._folder = folder
        self._columns: dict[str, list[IntArray]] = {name: [] for name in COLUMNS}
        self._seen = {name: np.zeros(0, np.bool_) for name in VOCABULARY}
        self._files = ExitStack()

    def __enter__(self) -> StoreWriter:
        def created(name: str) -> IO[bytes]:
            return self._files.enter_context((self._folder / name).open("wb"))

        self._ids, self._mask, self._notes, self._rejects = map(
            created, ("ids.bin", "mask.bin", "notes.bin", "rejects.jsonl")
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def add(self, rows: Sequence[Row], results: Packed) -> None:
        """Take in what became of some rows.

        Raises:
            FlowdflashError: the results are not of as many rows.
        """
        books, counts = self.accounts, results.samples
        if len(counts) != len(rows):
            raise FlowdflashError(f"{len(counts)} results for {len(rows)} rows; please report this")
        books.rows_read += len(rows)
        books.rows_kept += int(np.count_nonzero(counts))
        books.rows_other_split += sum(
            number not in results.rejections for number in np.flatnonzero(counts == 0).tolist()
        )
        for number, rejections in results.rejections.items():
            for rejection in rejections:
                self._add_rejection(rows[number], rejection)
            if counts[number]:
                books.samples_rejected.update(rejection.reason for rejection in rejections)
            self._count_rejected(rows[number], rejections, kept=bool(counts[number]))
        self._add_samples(rows, results)

    def _count_rejected(self, row: Row, rejections: Sequence[Rejection], *, kept: bool) -> None:
        """A row that gave nothing goes under one reason: a fault of its own before its length."""
        books = self.accounts
        bad = next((rejection for rejection in rejections if rejection.reason not in LENGTH_REASONS), None)
        if not kept:
            books.rejected[(bad or rejections[0]).reason] += 1
        if bad is not None:
            books.rejected_bad += 1
            books.first_bad = books.first_bad or (row.part, row.line, str(bad).encode("utf-8", "replace").decode())

    def _add_samples(self, rows: Sequence[Row], results: Packed) -> None:
        ids, mask, counts, books = results.ids, results.mask, results.samples, self.accounts
        before = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
        ends = np.cumsum(results.lengths)
        supervised = before[ends] - before[ends - results.lengths]
        parts = (
            results.lengths,
            results.note_lengths,
            np.repeat(np.array([row.line for row in rows], np.int64), counts),
            np.repeat(np.array([row.part for row in rows], np.int64), counts),
            results.turns,
            supervised,
        )
        for name, part in zip(COLUMNS, parts, strict=True):
            self._columns[name].append(part)
        books.samples += len(supervised)
        books.truncated += int(np.count_nonzero(results.truncated))
        books.tokens += len(ids)
        books.supervised_tokens += int(before[-1])
        books.turns_without_end_token += int(results.open_turns.sum())
        self._ids.write(ids.astype("<i4", copy=False).tobytes())
        self._mask.write(mask.tobytes())
        self._notes.write(results.notes)
        self._see("token_ids", ids)
        self._see("supervised_token_ids", ids[mask])

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
        columns = {name: np.concatenate([np.zeros(0, np.int64), *parts]) for name, parts in self._columns.items()}
        for name in OFFSETS:
            columns[name] = np.concatenate([[0], np.cumsum(columns[name], dtype=np.int64)])
        seen = {name: np.flatnonzero(flags) for name, flags in self._seen.items()}
        np.savez(self._folder / "samples.npz", **columns, **seen)  # type: ignore[arg-type]  # of its option allow_pickle
        meta = {"format": FORMAT, "key": key, "accounts": self.accounts.as_dict()}
        (self._folder / "meta.json").write_text(json.dumps(meta, indent=1), "utf-8")
        for file in self._folder.iterdir():
            sync(file)
        sync(self._folder)


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a folder
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
