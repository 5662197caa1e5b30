from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from flowdflash.data import rows as rows_module
from flowdflash.data import store as module
from flowdflash.data.encode import RowResult, Sample
from flowdflash.data.rejects import TOO_LONG, Accounts, Rejection
from flowdflash.data.rows import Row
from flowdflash.data.store import TokenStore, open_or_build, store_key
from flowdflash.errors import DataInvalid, FlowdflashError


class Lengths:
    """An encoder whose rows are lists of lengths: a sample per length, a rejection per 0, nothing for an empty list."""

    fingerprint = "lengths"

    def __init__(self) -> None:
        self.chunks: list[int] = []

    def encode(self, rows: Sequence[Row], where: Callable[[Row], str]) -> list[RowResult]:
        self.chunks.append(len(rows))
        return [self._one(row) for row in rows]

    def _one(self, row: Row) -> RowResult:
        if row.problem:
            return RowResult(rejections=(Rejection(row.problem),))
        samples = [
            Sample(np.arange(n, dtype=np.int32) + row.line, np.arange(n) % 2 == 0, turn, note=f'"{row.line}"')
            for turn, n in enumerate(row.value)
            if n
        ]
        rejections = [Rejection(TOO_LONG, "too big", turn) for turn, n in enumerate(row.value) if not n]
        return RowResult(tuple(samples), tuple(rejections))


def rows_of(values: Iterable[list[int] | None]) -> list[Row]:
    return [Row(n + 1, value, "" if value is not None else "not JSON") for n, value in enumerate(values)]


def build(folder: Path, values: Iterable[list[int] | None], key: str = "k", **options: object) -> TokenStore:
    return open_or_build(folder, key, lambda: rows_of(values), Lengths(), names=["a.jsonl"], **options)  # type: ignore[arg-type]


def test_samples_come_back_as_they_went_in(tmp_path: Path) -> None:
    store = build(tmp_path, [[3], None, [4, 0, 2], [], [0]])
    assert store.lengths.tolist() == [3, 4, 2]
    assert store.supervised.tolist() == [2, 2, 1]
    ids, mask = store.tokens(1)
    assert (ids.tolist(), ids.dtype, mask.tolist()) == ([3, 4, 5, 6], np.int64, [True, False, True, False])
    assert mask.dtype == np.bool_
    assert [store.describe(n) for n in range(3)] == ["a.jsonl:1", "a.jsonl:3", "a.jsonl:3"]
    assert [store.turn(n) for n in range(3)] == [0, 0, 2]
    assert store.note(2) == "3"
    for wrong in (-1, 3):
        with pytest.raises(IndexError, match="the store holds 3"):
            store.tokens(wrong)


def test_rejected_row_too_deep_to_write_is_listed_without_its_text(tmp_path: Path) -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    rows = [Row(1, deep, "not JSON"), Row(2, [3])]
    store = open_or_build(tmp_path, "k", lambda: rows, Lengths(), names=["a.jsonl"])
    store.write_rejects(tmp_path / "rejects.jsonl")
    (entry,) = map(json.loads, (tmp_path / "rejects.jsonl").read_text().splitlines())
    assert (entry["line"], entry["reason"], entry["row"]) == (1, "not JSON", "nested too deeply to be written")


def test_books_count_every_row_once(tmp_path: Path) -> None:
    books = build(tmp_path, [[3], None, [4, 0, 2], [], [0]]).accounts
    assert (books.rows_read, books.rows_kept, books.rows_rejected, books.rows_other_split) == (5, 2, 2, 1)
    assert dict(books.rejected) == {"not JSON": 1, TOO_LONG: 1}
    assert dict(books.samples_rejected) == {TOO_LONG: 1}
    assert (books.rejected_bad, books.first_bad) == (1, (0, 2, "not JSON"))
    assert (books.tokens, books.supervised_tokens, books.samples) == (9, 5, 3)
    assert Accounts.from_dict(json.loads(json.dumps(books.as_dict()))) == books


def test_books_that_do_not_balance_are_an_error() -> None:
    with pytest.raises(FlowdflashError, match="books do not balance: 3 rows read, but 2 kept"):
        Accounts(rows_read=3, rows_kept=2).balance()


def test_encoder_that_loses_a_row_is_caught_and_leaves_nothing_behind(tmp_path: Path) -> None:
    class Loses(Lengths):
        def encode(self, rows: Sequence[Row], where: Callable[[Row], str]) -> list[RowResult]:
            return super().encode(rows, where)[1:]

    with pytest.raises(FlowdflashError, match="1 results for 2 rows"):
        open_or_build(tmp_path, "k", lambda: rows_of([[1], [2]]), Loses())
    assert not (tmp_path / "k").exists()
    assert not (tmp_path / "k.building").exists()


def test_rejects_are_listed_with_place_reason_and_row_and_come_back_from_the_cache(tmp_path: Path) -> None:
    values = [[3], None, [4, 0, 2], [0]]
    first = build(tmp_path / "cache", values)
    first.write_rejects(tmp_path / "run" / "one.jsonl")
    again = open_or_build(tmp_path / "cache", "k", lambda: pytest.fail("built twice"), Lengths(), names=["b.jsonl"])
    again.write_rejects(tmp_path / "run" / "two.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "run" / "two.jsonl").read_text().splitlines()]
    assert lines == [
        {"file": "b.jsonl", "line": 2, "reason": "not JSON", "row": None},
        {"file": "b.jsonl", "line": 3, "reason": TOO_LONG, "detail": "too big", "turn": 1, "row": [4, 0, 2]},
        {"file": "b.jsonl", "line": 4, "reason": TOO_LONG, "detail": "too big", "turn": 0, "row": [0]},
    ]
    assert (tmp_path / "run" / "one.jsonl").read_text() == (tmp_path / "run" / "two.jsonl").read_text().replace(
        "b.jsonl", "a.jsonl"
    )
    assert again.accounts == first.accounts
    assert again.first_bad() == "b.jsonl:2: not JSON"


def test_half_surrogate_in_a_rejected_row_breaks_no_writer(tmp_path: Path) -> None:
    row = Row(1, "bad \ud83d", "odd \ud83d")
    store = open_or_build(tmp_path, "k", lambda: [row], Lengths())
    store.write_rejects(tmp_path / "out.jsonl")
    assert json.loads((tmp_path / "out.jsonl").read_text())["row"] == "bad \ud83d"
    assert store.first_bad().encode()


@pytest.mark.parametrize("name", ["ids.bin", "mask.bin", "samples.npz", "meta.json", "notes.bin"])
def test_damaged_store_is_built_again(tmp_path: Path, name: str) -> None:
    build(tmp_path, [[3], [5]])
    (tmp_path / "k" / name).write_bytes(b"{}")
    told: list[str] = []
    store = build(tmp_path, [[3], [5]], warn=told.append)
    assert store.lengths.tolist() == [3, 5]
    assert "is damaged and is built again" in told[0]


def test_folder_left_by_a_killed_build_is_no_store_and_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "k.building").mkdir()
    (tmp_path / "k.building" / "ids.bin").write_bytes(b"half")
    assert len(build(tmp_path, [[3]])) == 1


def test_store_without_samples_can_be_opened(tmp_path: Path) -> None:
    assert len(build(tmp_path, [None])) == 0
    assert len(build(tmp_path, [None])) == 0


def test_key_follows_bytes_encoder_and_options_and_not_names(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"rows")
    two.write_bytes(b"rows")
    key = store_key(Lengths(), [one], limit_rows=0)
    assert key == store_key(Lengths(), [two], limit_rows=0)
    other = Lengths()
    other.fingerprint = "other"
    two.write_bytes(b"rowz")
    keys = {
        key,
        store_key(other, [one], limit_rows=0),
        store_key(Lengths(), [one], limit_rows=1),
        store_key(Lengths(), [two], limit_rows=0),
        store_key(Lengths(), [one, one], limit_rows=0),
    }
    assert len(keys) == 5


@pytest.mark.timeout(20)
def test_several_runs_share_one_build(tmp_path: Path) -> None:
    builds: list[int] = []
    stores: list[TokenStore] = []
    start = threading.Barrier(4)

    def rows() -> Iterable[Row]:
        builds.append(1)
        return rows_of([[n % 7 + 1] for n in range(300)])

    def run() -> None:
        start.wait(5)
        stores.append(open_or_build(tmp_path, "k", rows, Lengths()))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(builds) == 1
    assert [len(store) for store in stores] == [300] * 4


@pytest.mark.timeout(20)
def test_samples_can_be_read_from_many_threads(tmp_path: Path) -> None:
    store = build(tmp_path, [[n % 9 + 1] for n in range(200)])
    wrong: list[int] = []

    def read(seed: int) -> None:
        for sample in np.random.default_rng(seed).permutation(200).tolist():
            if store.tokens(sample)[0].tolist() != [sample + 1 + n for n in range(sample % 9 + 1)]:
                wrong.append(sample)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not wrong


@settings(max_examples=25, deadline=None)
@given(st.lists(st.one_of(st.none(), st.lists(st.integers(0, 6), max_size=3)), max_size=20), st.integers(1, 5))
def test_chunking_never_changes_the_store(
    tmp_path_factory: pytest.TempPathFactory, values: list[list[int] | None], most: int
) -> None:
    folder = tmp_path_factory.mktemp("store")
    whole = build(folder, values, key="whole")
    rows = rows_of(values)
    small = [Row(row.line, row.value, row.problem, nbytes=rows_module.CHUNK_BYTES // most) for row in rows]
    encoder = Lengths()
    cut = open_or_build(folder, "cut", lambda: small, encoder)
    assert max(encoder.chunks, default=0) <= most + 1
    assert cut.accounts == whole.accounts
    assert cut.accounts.rows_read == len(values)
    assert (folder / "cut" / "ids.bin").read_bytes() == (folder / "whole" / "ids.bin").read_bytes()
    assert (folder / "cut" / "rejects.jsonl").read_bytes() == (folder / "whole" / "rejects.jsonl").read_bytes()


def test_file_that_changes_while_it_is_read_leaves_no_store(tmp_path: Path) -> None:
    with pytest.raises(DataInvalid, match=r"a\.jsonl: changed while it was read"):
        build(tmp_path, [[3]], unchanged=lambda: False)
    assert [path.suffix for path in tmp_path.iterdir()] in ([], [".lock"])
    assert len(build(tmp_path, [[3]], unchanged=lambda: True)) == 1
    assert len(build(tmp_path, [[4]], unchanged=lambda: False)) == 1, "what is there was read from the bytes of its key"


def test_a_run_that_waits_for_the_tokens_of_another_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECS", 0.01)
    told, waiting = [], threading.Event()

    def warn(text: str) -> None:
        told.append(text)
        waiting.set()

    with FileLock(tmp_path / "k.lock"):
        thread = threading.Thread(target=build, args=(tmp_path, [[3]]), kwargs={"warn": warn})
        thread.start()
        assert waiting.wait(10)
    thread.join(10)
    assert not thread.is_alive() and told == ["another run prepares the tokens of a.jsonl; waiting for it"]


def test_a_turn_with_a_fault_of_its_own_makes_its_row_a_bad_one_though_it_is_kept(tmp_path: Path) -> None:
    class Faulty(Lengths):
        def _one(self, row: Row) -> RowResult:
            done = super()._one(row)
            return RowResult(done.samples, tuple(replace(left, reason="odd") for left in done.rejections))

    rows = rows_of([[3], [2, 0], [0]])
    store = open_or_build(tmp_path, "k", lambda: rows, Faulty(), names=["a.jsonl"])
    books = store.accounts
    assert (books.rows_kept, books.rows_rejected, books.rejected_bad) == (2, 1, 2)
    assert store.first_bad() == "a.jsonl:2: odd: too big"
