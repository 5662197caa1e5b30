from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from flowdflash.data import rows as module
from flowdflash.data.rows import (
    BOM,
    CUT_OFF,
    DUPLICATE_KEY,
    ENDLESS,
    NOT_JSON,
    NOT_UTF8,
    TOO_DEEP,
    Row,
    chunks,
    read_jsonl,
)
from flowdflash.errors import DataInvalid

THREE = b'{"a": 1}\n{"a": 2}\n{"a": 3}\n'


def read(tmp_path: Path, data: bytes, name: str = "rows.jsonl") -> list[Row]:
    path = tmp_path / name
    path.write_bytes(data)
    return list(read_jsonl(path))


def values(rows: list[Row]) -> list[object]:
    return [row.value for row in rows]


def test_byte_order_mark_changes_nothing_at_the_start_nor_in_the_middle(tmp_path: Path) -> None:
    plain, marked = read(tmp_path, THREE), read(tmp_path, BOM + THREE)
    assert values(plain) == values(marked)
    joined = read(tmp_path, THREE + BOM + THREE)
    assert values(joined) == values(plain) * 2
    assert [row.line for row in joined] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress, lambda data: data], ids=["gzip", "zstd", "plain"])
def test_compression_is_told_by_leading_bytes_and_not_by_name(tmp_path: Path, pack: object) -> None:
    packed = pack(THREE)  # type: ignore[operator]
    for name in ("rows.jsonl", "rows.gz", "rows.zst"):
        assert values(read(tmp_path, packed, name)) == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert len(read(tmp_path, packed + packed)) == 6


def test_padding_after_a_gzip_member_is_no_damage(tmp_path: Path) -> None:
    assert len(read(tmp_path, gzip.compress(THREE) + b"\0" * 512)) == 3
    assert len(read(tmp_path, gzip.compress(THREE) + b"\0" * (3 << 20) + gzip.compress(THREE))) == 6


def test_data_that_grows_a_thousandfold_is_unpacked_in_small_blocks(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(gzip.compress(b"\n" * (48 << 20)))
    sizes = [len(block) for block, _ in module._blocks(path, None)]
    assert sum(sizes) == 48 << 20 and max(sizes) <= 20 << 20


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress], ids=["gzip", "zstd"])
def test_compressed_file_that_breaks_off_is_named_as_truncated(tmp_path: Path, pack: object) -> None:
    rows = read(tmp_path, pack(THREE)[:-3])  # type: ignore[operator]
    assert rows[-1].problem == CUT_OFF
    assert "breaks off" in rows[-1].detail


def test_damaged_compression_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(THREE * 50))
    packed[14] ^= 0xFF
    packed[20] ^= 0xFF
    with pytest.raises(DataInvalid, match=r"rows\.jsonl: damaged compressed data"):
        read(tmp_path, bytes(packed))


def test_zstd_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(DataInvalid, match="pip install zstandard"):
        read(tmp_path, zstandard.compress(THREE))
    assert len(read(tmp_path, gzip.compress(THREE))) == 3


def test_last_line_without_a_newline_is_read(tmp_path: Path) -> None:
    assert values(read(tmp_path, b'{"a": 1}')) == [{"a": 1}]


def test_last_line_cut_off_is_named_with_its_line(tmp_path: Path) -> None:
    rows = read(tmp_path, THREE + b'{"a": "cut in the mid')
    assert [row.problem for row in rows] == ["", "", "", CUT_OFF]
    assert (rows[-1].line, rows[-1].value) == (4, '{"a": "cut in the mid')


def test_last_line_cut_inside_a_character_is_truncated_and_not_bad_text(tmp_path: Path) -> None:
    assert read(tmp_path, THREE + '{"a": "é'.encode()[:-1])[-1].problem == CUT_OFF


def test_blank_lines_are_no_rows_but_keep_their_line_numbers(tmp_path: Path) -> None:
    rows = read(tmp_path, THREE + b"\n \r\n" + THREE)
    assert [row.line for row in rows] == [1, 2, 3, 6, 7, 8]
    assert not any(row.problem for row in rows)
    assert read(tmp_path, b"") == read(tmp_path, b"\n\n\n") == []


def test_faults_of_a_line_have_names_of_their_own(tmp_path: Path) -> None:
    deep = b"[" * 100_000
    rows = read(tmp_path, b"{broken\n\xff\xfa\n" + deep + b"\nnull\n")
    assert [row.problem for row in rows] == [NOT_JSON, NOT_UTF8, TOO_DEEP, ""]


def test_what_json_loads_lets_pass_without_a_word_is_a_fault(tmp_path: Path) -> None:
    rows = read(tmp_path, b'{"a": NaN}\n{"a": -Infinity}\n{"a": {"b": 1, "b": 2}}\n{"a": -1e400}\n{"a": 1e300}\n')
    assert [row.problem for row in rows] == [NOT_JSON, NOT_JSON, DUPLICATE_KEY, NOT_JSON, ""]
    assert [row.detail for row in rows[:3]] == ["NaN is no JSON value", "-Infinity is no JSON value", "'b'"]


def test_a_line_without_an_end_is_named_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in (7, 1 << 20):
        monkeypatch.setattr(module, "BLOCK_BYTES", block)
        monkeypatch.setattr(module, "LINE_BYTES", 100)
        monkeypatch.setattr(module, "START_BYTES", 10)
        data = b'{"a": 1}\n' + b'"' + b"x" * 500 + b'"\n' + b" " * 101 + b'\n{"a": 2}\n'
        first, long, blank, last = read(tmp_path, data)
        assert (first.value, last.value, last.line) == ({"a": 1}, {"a": 2}, 4)
        assert (long.line, long.problem, long.value) == (2, ENDLESS, '"xxxxxxxxx')
        assert blank.problem == ENDLESS and "more than 100 bytes" in blank.detail
        with pytest.raises(DataInvalid, match="this is a JSON array"):
            read(tmp_path, b'[{"a": 1}' + b', {"a": 1}' * 20 + b"]")


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (bz2.compress(THREE), "a bzip2 file"),
        (lzma.compress(THREE), "an xz file"),
        (THREE.ljust(257, b"\0")[:257] + b"ustar" + THREE, "a tar archive"),
        (b"PK\x03\x04...", "a zip file"),
        (b"ARROW1\0\0", "an Arrow file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a pointer to a file in Git LFS"),
        (b'{\n "a": 1\n}\n', "a JSON object over several lines"),
    ],
)
def test_a_file_of_another_kind_is_called_what_it_is(tmp_path: Path, data: bytes, told: str) -> None:
    for packed in (data, gzip.compress(data)):
        with pytest.raises(DataInvalid, match=rf"rows\.jsonl: .*{told}"):
            read(tmp_path, packed)


def test_frames_of_zstd_that_hold_no_data_are_passed_over(tmp_path: Path) -> None:
    note = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"notes"
    assert len(read(tmp_path, note + zstandard.compress(THREE) + note + zstandard.compress(THREE) + note)) == 6


def test_array_is_told_from_a_first_row_that_is_a_list(tmp_path: Path) -> None:
    for array in (b'[{"a": 1}, {"a": 2}]\n', b'[\n{"a": 1}\n]\n', b'[{"a": 1},\n'):
        with pytest.raises(DataInvalid, match=r"rows\.jsonl: this is a JSON array"):
            read(tmp_path, array)
    assert values(read(tmp_path, b"[]\n[1]\n" + THREE))[:2] == [[], [1]]
    assert read(tmp_path, THREE + b'[{"a": 1}]\n')[3].value == [{"a": 1}]


def test_other_line_separators_do_not_end_a_row(tmp_path: Path) -> None:
    data = json.dumps({"a": "x\u2028y\u0085z"}, ensure_ascii=False).encode()
    assert values(read(tmp_path, data + b"\r\n" + data)) == [{"a": "x\u2028y\u0085z"}] * 2


def test_utf16_and_missing_files_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(DataInvalid, match="UTF-16"):
        read(tmp_path, "{}\n".encode("utf-16"))
    with pytest.raises(DataInvalid, match=r"gone\.jsonl: cannot be read"):
        list(read_jsonl(tmp_path / "gone.jsonl"))


def test_limit_counts_rows_and_progress_ends_at_the_size_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n" + THREE)
    told: list[tuple[int, int]] = []
    assert len(list(read_jsonl(path, limit=2))) == 2
    list(read_jsonl(path, progress=lambda done, total: told.append((done, total))))
    assert told[-1] == (len(THREE) + 1, len(THREE) + 1)


def test_chunks_are_bounded_by_rows_and_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 10)
    rows = [Row(n, None, nbytes=size) for n, size in enumerate([1, 1, 9, 20, 1, 1, 1])]
    assert [[row.line for row in chunk] for chunk in chunks(rows, 2)] == [[0, 1], [2, 3], [4, 5], [6]]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(max_size=30), max_size=12), st.integers(1, 64))
def test_block_size_never_changes_the_rows(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], block: int
) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_bytes("\n".join(json.dumps(text) for text in texts).encode())
    packed = path.with_name("rows.gz")
    packed.write_bytes(b"".join(gzip.compress(line + b"\n") for line in path.read_bytes().split(b"\n")) + b"\0" * 99)
    before = module.BLOCK_BYTES, module.PACKED_BYTES
    module.BLOCK_BYTES = module.PACKED_BYTES = block
    try:
        assert [row.value for row in read_jsonl(path)] == [row.value for row in read_jsonl(packed)] == texts
    finally:
        module.BLOCK_BYTES, module.PACKED_BYTES = before
