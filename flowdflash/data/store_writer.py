"""Writes a token store, row by row."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np

from flowdflash.data.align import Ids
from flowdflash.data.encode import RowResult, Sample
from flowdflash.data.rejects import LENGTH_REASONS, Accounts, Rejection
from flowdflash.data.rows import Row

FORMAT = 4
"""Raise it when the same rows, tokenizer and options begin to give other samples or another layout."""
COLUMNS = ("offsets", "note_offsets", "lines", "parts", "turns", "supervised")
VOCABULARY = ("token_ids", "supervised_token_ids")


class StoreWriter:
    """Writes a store into an empty folder; ``finish`` makes it whole."""

    def __init__(self, folder: Path) -> None:
        self.accounts = Accounts()
        self._folder = folder
        self._columns = {name: array("q", [0] if name.endswith("offsets") else []) for name in COLUMNS}
        self._seen = {name: np.zeros(0, np.bool_) for name in VOCABULARY}
        self._waiting: list[Sample] = []
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
