"""Rows of a JSONL file: plain, gzip or zstd, told apart by their leading bytes."""

from __future__ import annotations

import importlib
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from math import isinf
from pathlib import Path
from typing import Any, BinaryIO

from flowdflash.errors import DataInvalid

BLOCK_BYTES = 1 << 20
PACKED_BYTES = 1 << 14
"""Read at once of compressed data, which may grow a thousandfold."""
CHUNK_ROWS = 1000
CHUNK_BYTES = 1 << 20
LINE_BYTES = 1 << 26
"""Most bytes of a line; a file that is one line must not be read into memory."""
START_BYTES = 1000
"""How much of a longer one is kept, to be told."""
BOM = b"\xef\xbb\xbf"
PARQUET = b"PAR1"
OTHER_FORMATS = {
    b"\xff\xfe": "UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "UTF-16 text; save it as UTF-8",
    PARQUET: "a Parquet file and not JSONL; the source chat_parquet reads it",
    b"ARROW1": "an Arrow file and not JSONL; write it as Parquet",
    b"BZh": "a bzip2 file; unpack it, or pack it with gzip or zstd",
    b"\xfd7zXZ": "an xz file; unpack it, or pack it with gzip or zstd",
    b"PK\x03\x04": "a zip file; unpack it, or pack it with gzip or zstd",
    b"version https://git-lfs": "a pointer to a file in Git LFS; fetch the file itself: git lfs pull",
}
"""What a file that begins like this is, since no JSON does; and what to do."""
NOT_JSON, NOT_UTF8, CUT_OFF, TOO_DEEP = "not JSON", "not UTF-8", "truncated last line", "JSON nested too deeply"
ENDLESS = "line too long to be a row"
DUPLICATE_KEY = "key twice in an object"
Progress = Callable[[int, int], None]


class DuplicateKey(ValueError):
    """An object that has a key twice: which of the values counts is anybody's guess."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise DuplicateKey(repr(Counter(key for key, _ in pairs).most_common(1)[0][0]))
    return value


def _no_json(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _number(text: str) -> float:
    value = float(text)
    if isinf(value):
        raise ValueError(f"{text[:40]} is too large for a number, and no JSON could hold it again")
    return value


parse_json: Callable[[str], Any] = json.JSONDecoder(
    object_pairs_hook=_object, parse_constant=_no_json, parse_float=_number
).decode
"""The value of a JSON text; ValueError for what ``json.loads`` lets pass: NaN, numbers beyond all bounds, and a
key that comes twice."""


class Ending(Enum):
    """How a line ends: with a newline, with the file, where compressed data breaks off, or beyond ``LINE_BYTES``."""

    NEWLINE = "newline"
    FILE = "file"
    CUT = "cut"
    BEYOND = "beyond"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of an input, readable or not.

    Attributes:
        line: 1-based line in its file (or row number, where a file has no lines).
        value: the parsed JSON value; the text of the line where ``problem`` is set.
        problem: why the row could not be read; empty if it could.
        detail: what exactly was found.
        nbytes: size of the row in the file, uncompressed.
        part: number of the file within the input, from 0.
    """

    line: int
    value: Any
    problem: str = ""
    detail: str = ""
    nbytes: int = 0
    part: int = 0

    def __reduce__(self) -> tuple[Any, ...]:  # many go to other processes, and field by field costs twice as much
        return Row, (self.line, self.value, self.problem, self.detail, self.nbytes, self.part)


@dataclass(frozen=True, slots=True)
class RowInput:
    """Where the rows of a source come from.

    Attributes:
        name: what a person calls it.
        files: whose bytes decide the rows.
        read: ``read(limit=..., progress=...)`` gives all rows, or the first ones, in order.
        unit: what ``progress`` counts.
        selection: what else decides the rows: the format where it is not JSONL, which part of the files.
    """

    name: str
    files: tuple[Path, ...]
    read: Callable[..., Iterator[Row]]
    unit: str = "bytes"
    selection: tuple[str, ...] = ()


def read_jsonl(
    path: Path,
    *,
    limit: int = 0,
    progress: Progress | None = None,
    parse: Callable[[str], Any] = parse_json,
) -> Iterator[Row]:
    """Rows of a JSONL file, in order. Blank lines are no rows; ``limit`` 0 reads all.

    A byte-order mark is dropped at the start of any line, since joining files with ``cat`` puts one in the middle.
    ``progress`` is told the bytes read of the file as it lies on disk, and its size. ``parse`` makes a value of a line.

    Raises:
        DataInvalid: the file cannot be read at all, its compression is damaged, or it is of another format.
    """
    count = 0
    for line, raw, ended in _lines(path, progress):
        text = raw.removeprefix(BOM).strip()
        if not text and ended not in (Ending.CUT, Ending.BEYOND):
            continue
        row = _parsed(text, line, ended, parse)
        if not count and text.startswith(b"[") and _opens_array(row):
            raise DataInvalid(f"{path}: this is a JSON array; write one object a line (jq -c '.[]' FILE)")
        if not count and text == b"{":
            raise DataInvalid(f"{path}: a JSON object over several lines; write one object a line (jq -c . FILE)")
        yield row
        count += 1
        if count == limit:
            return


def chunks(rows: Iterable[Row], most: int = CHUNK_ROWS) -> Iterator[list[Row]]:
    """Rows in chunks bounded by count and by bytes, so that memory does not grow with the file."""
    chunk: list[Row] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += row.nbytes
        if len(chunk) >= most or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _opens_array(row: Row) -> bool:
    """Is a first row that begins with a bracket the start, or the whole, of an array of rows?"""
    return row.problem in (NOT_JSON, CUT_OFF, ENDLESS) or (
        not row.problem and any(isinstance(i, dict) for i in row.value)
    )


def _parsed(raw: bytes, line: int, ended: Ending, parse: Callable[[str], Any]) -> Row:
    def bad(problem: str, detail: str) -> Row:
        return Row(line, raw.decode("utf-8", "replace"), problem, detail, len(raw))

    if ended is Ending.CUT:
        return bad(CUT_OFF, "the compressed file breaks off here")
    if ended is Ending.BEYOND:
        return bad(ENDLESS, f"it has more than {LINE_BYTES:,} bytes; only its start is kept")
    try:
        return Row(line, parse(raw.decode("utf-8")), nbytes=len(raw))
    except UnicodeDecodeError as error:
        if ended is Ending.FILE and error.reason == "unexpected end of data":
            return bad(CUT_OFF, "the last line ends inside a character and has no newline")
        return bad(NOT_UTF8, f"byte {error.start + 1} of the line: {error.reason}")
    except RecursionError:
        return bad(TOO_DEEP, "")
    except DuplicateKey as error:
        return bad(DUPLICATE_KEY, str(error))
    except ValueError as error:
        if b"\r" in raw:
            return bad(NOT_JSON, f"{error}; lines end with a carriage return alone: save the file with LF")
        if ended is Ending.FILE:
            return bad(CUT_OFF, f"the last line is no complete JSON value and has no newline: {error}")
        return bad(NOT_JSON, str(error))


def _lines(path: Path, progress: Progress | None) -> Iterator[tuple[int, bytes, Ending]]:
    """Numbered lines split at newlines only: JSON strings may hold any other line separator."""
    number, size = 1, 0
    pieces: list[bytes] = []  # of the line not ended yet; joined once, so that a very long line stays linear

    def ended(how: Ending) -> tuple[int, bytes, Ending]:
        whole = b"".join(pieces)
        return (number, whole, how) if size <= LINE_BYTES else (number, whole[:START_BYTES], Ending.BEYOND)

    for block, cut in _blocks(path, progress):
        first, *others = block.split(b"\n")
        size += len(first)
        if size <= LINE_BYTES or not pieces:
            pieces.append(first)
        for following in others:
            yield ended(Ending.NEWLINE)
            number, size, pieces = number + 1, len(following), [following]
        if cut:
            yield ended(Ending.CUT)
            return
    if size:
        yield ended(Ending.FILE)


def _blocks(path: Path, progress: Progress | None) -> Iterator[tuple[bytes, bool]]:
    """Uncompressed blocks, each with True if the data breaks off after it."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            head = file.read(4)
            file.seek(0)
            decoder, first = _decoder(head, path), True
            for block, cut in _plain(file) if decoder is None else _inflated(file, decoder, path):
                if first and block:
                    _refuse_other_format(block[:512], path)
                    first = False
                if progress is not None:
                    progress(file.tell(), size)
                yield block, cut
    except OSError as error:
        raise DataInvalid(f"{path}: cannot be read: {error.strerror or error}") from error


def _refuse_other_format(head: bytes, path: Path) -> None:
    one_nul = len(head) > 1 and head[:2].count(0) == 1  # ASCII in two bytes each
    found = "UTF-16 text; save it as UTF-8" if one_nul else ""
    found = "a tar archive; unpack it, and name the file inside" if head[257:262] == b"ustar" else found
    found = found or next((told for start, told in OTHER_FORMATS.items() if head.startswith(start)), "")
    if found:
        raise DataInvalid(f"{path}: this is {found}")


def _plain(file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    while block := file.read(BLOCK_BYTES):
        yield block, False


def _inflated(file: BinaryIO, decoder: Callable[[], Any], path: Path) -> Iterator[tuple[bytes, bool]]:
    """Members of a gzip file or frames of a zstd file, one after the other, as ``cat`` joins them."""
    stream: Any = None
    try:
        while data := file.read(PACKED_BYTES):
            # Tape blocks and some tools pad a file with zeros, which start no member.
            while data := data if stream else data.lstrip(b"\0"):
                stream = stream or decoder()
                yield stream.decompress(data), False
                data, stream = (stream.unused_data, None) if stream.eof else (b"", stream)
    except (zlib.error, _zstd_error()) as error:
        raise DataInvalid(f"{path}: damaged compressed data: {error}; fetch or write the file again") from error
    if stream is not None:
        yield b"", True


def _decoder(head: bytes, path: Path) -> Callable[[], Any] | None:
    if head[:2] == b"\x1f\x8b":
        return lambda: zlib.decompressobj(wbits=31)
    if head == b"\x28\xb5\x2f\xfd" or (head[1:] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F):
        try:
            zstandard = importlib.import_module("zstandard")
        except ImportError:
            raise DataInvalid(
                f"{path}: compressed with zstd, which needs a package: pip install zstandard, or unpack the file"
            ) from None
        return lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
    return None


def _zstd_error() -> type[Exception]:
    try:
        return importlib.import_module("zstandard").ZstdError  # type: ignore[no-any-return]
    except ImportError:
        return zlib.error
