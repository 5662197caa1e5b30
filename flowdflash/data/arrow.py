"""Rows of Arrow tables: of a Parquet file, row group by row group, or of a data set of the ``datasets`` library."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from flowdflash.data.chat import CONVERSATION_KEYS, UNREAD_KEYS
from flowdflash.data.rows import CHUNK_ROWS, NOT_UTF8, PARQUET, Progress, Row, read_jsonl
from flowdflash.errors import DataInvalid

UNREADABLE = "value that cannot be read"
CONVERSATIONS = ("messages", "conversations", "prompt")
READ = CONVERSATION_KEYS | {*CONVERSATIONS, *UNREAD_KEYS["row"], "weight", "finish_reason", "stop_reason"}
"""Columns that decide a sample."""


def optional(module: str, extra: str, what: str) -> Any:
    """A module of a package that only some sources need.

    Raises:
        DataInvalid: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataInvalid(f"{what}: reading it needs a package: pip install 'flowdflash[{extra}]' ({error})") from None


def is_parquet(path: Path) -> bool:
    """Does a file begin as Parquet does?"""
    try:
        with path.open("rb") as file:
            return file.read(len(PARQUET)) == PARQUET
    except OSError as error:
        raise DataInvalid(f"{path}: cannot be read: {error.strerror or error}") from error


def read_rows(path: Path) -> Iterator[Row]:
    """Rows of a file of either format, told apart by its leading bytes."""
    return read_parquet(path) if is_parquet(path) else read_jsonl(path)


def read_parquet(path: Path, *, limit: int = 0, progress: Progress | None = None) -> Iterator[Row]:
    """Rows of a Parquet file, in order; their ``line`` is the row number from 1, ``limit`` 0 reads all.

    Raises:
        DataInvalid: it is no whole Parquet file, or has no column that a conversation could be in.
    """
    if not is_parquet(path):
        raise DataInvalid(f"{path}: this is no Parquet file; the source chat_jsonl reads JSONL")
    parquet, errors = (optional(f"pyarrow.{name}", "parquet", str(path)) for name in ("parquet", "lib"))
    try:
        with parquet.ParquetFile(path) as file:
            check_columns(file.schema_arrow.names, str(path))
            batches = file.iter_batches(batch_size=CHUNK_ROWS)
            yield from arrow_rows(batches, file.metadata.num_rows, limit=limit, progress=progress)
    except (errors.ArrowException, OSError) as error:
        raise DataInvalid(f"{path}: cannot be read as Parquet: {' '.join(str(error).split())}") from error


def check_columns(names: Iterable[str], what: str) -> None:
    """Refuse a table without a column of conversations or prompts."""
    if not set(CONVERSATIONS) & set(names):
        raise DataInvalid(
            f"{what}: no column `messages`, `conversations` or `prompt`; it has {', '.join(names) or 'none'}"
        )


def arrow_rows(tables: Iterable[Any], total: int, *, limit: int = 0, progress: Progress | None = None) -> Iterator[Row]:
    """Rows of the tables or record batches of one input of ``total`` rows.

    A null inside a row counts as absent: Arrow fills every struct up with nulls, so that a message has the keys of all
    messages and the arguments of a tool call those of all tools. So does NaN, the null of pandas, which JSON has not.
    """
    number = 0
    for table in tables:
        size = table.nbytes // max(1, table.num_rows)
        for value, error in _values(table):
            number += 1
            if error is None:
                yield Row(number, {key: _filled(inner) for key, inner in value.items()}, nbytes=size)
            else:
                problem = NOT_UTF8 if isinstance(error, UnicodeDecodeError) else UNREADABLE
                yield Row(number, None, problem, str(error), size)
            if number == limit:
                return
        if progress is not None:
            progress(number, total)


def _values(table: Any) -> Iterator[tuple[Any, Exception | None]]:
    """The rows of a table. One bad value fails the whole table, so the table is halved until its row is found."""
    try:
        values = table.to_pylist()
    except (ValueError, OverflowError):
        if table.num_rows == 1:
            yield _columns(table)
            return
        half = table.num_rows // 2
        yield from _values(table.slice(0, half))
        yield from _values(table.slice(half))
    else:
        yield from ((value, None) for value in values)


def _columns(row: Any) -> tuple[Any, Exception | None]:
    """A table of one row, column by column: a value that nobody reads, such as a date out of range, is left out."""
    value: dict[str, Any] = {}
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            (value[name],) = column.to_pylist()
        except (ValueError, OverflowError) as error:
            if name in READ:
                return None, error
    return value, None


def _filled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: kept for key, inner in value.items() if (kept := _filled(inner)) is not None}
    if isinstance(value, list):
        return [_filled(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
