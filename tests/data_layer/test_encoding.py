"""Rows encoded by processes of their own: the same results in the same order, whatever becomes of a process."""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowdflash.data import encoding, encoding_process
from flowdflash.data import rows as rows_module
from flowdflash.data.encode import ChatEncoder, EncodeOptions
from flowdflash.data.encoding import cores, encoded
from flowdflash.data.encoding_process import EncodingProcess, Family, ProcessGone, sendable
from flowdflash.data.packed import Packed, pack
from flowdflash.data.rows import Row
from flowdflash.data.split import Split
from flowdflash.data.store import Places, _encode, open_or_build
from flowdflash.errors import DataInvalid

from .fixtures import T_GEN, make_tokenizer, say

pytestmark = pytest.mark.timeout(60)


def rows_of(count: int) -> list[Row]:
    """Rows of many kinds: answers of all lengths, bad rows, rows to be cut, rows without an answer."""
    odd = [3, {"messages": []}, say("only a question"), say("<|im_end|>", "markup")]
    values = [say(f"question {n}", "word " * (n % 30)) if n % 7 else odd[n // 7 % len(odd)] for n in range(count)]
    return [Row(n + 1, value, nbytes=100) for n, value in enumerate(values)]


def encoder_of(template: str | None = None) -> Callable[[Sequence[Row]], Packed]:
    tokenizer = make_tokenizer(template) if template else make_tokenizer()
    return partial(_encode, ChatEncoder(tokenizer, EncodeOptions(max_length=90)), Places(("a.jsonl",)))


def plain(packed: Packed) -> list[Any]:
    """What became of rows, as values that can be compared."""
    values = [getattr(packed, field.name) for field in fields(packed)]
    return [(value.dtype, value.tolist()) if isinstance(value, np.ndarray) else value for value in values]


def joined(done: Iterable[tuple[list[Row], Packed]]) -> list[Any]:
    """What became of the rows of several chunks, as if they had been one."""
    chunks = [packed for _, packed in done]
    starts = np.cumsum([0, *(len(packed.samples) for packed in chunks)]).tolist()
    parts = [{start + n: left for n, left in p.rejections.items()} for start, p in zip(starts, chunks, strict=False)]
    arrays = [field.name for field in fields(Packed) if field.name not in ("notes", "rejections")]
    return plain(
        Packed(
            **{name: np.concatenate([getattr(packed, name) for packed in chunks]) for name in arrays},
            notes=b"".join(packed.notes for packed in chunks),
            rejections={number: left for part in parts for number, left in part.items()},
        )
    )


@pytest.fixture(params=[True, False], ids=["forked", "each by itself"])
def by_processes(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[Family]:
    """Every chunk of ten rows is encoded by one of two processes, never here; gives the families that were begun."""
    if request.param and not encoding_process.FORKS:
        pytest.skip("forks on Linux only")
    begun: list[Family] = []

    class Listed(Family):
        def __init__(self, count: int) -> None:
            super().__init__(count)
            begun.append(self)

    monkeypatch.setattr(encoding, "Family", Listed)
    monkeypatch.setattr(encoding, "FORKS", request.param)
    monkeypatch.setattr(encoding, "MANY_BYTES", 1)
    monkeypatch.setattr(encoding, "THREADS", 0)
    monkeypatch.setattr(encoding, "cores", lambda: 2)
    monkeypatch.setattr(encoding, "chunks", partial(rows_module.chunks, most=10))
    return begun


def once_ready(rows: Iterable[Row], monkeypatch: pytest.MonkeyPatch, processes: int = 2) -> Iterable[Row]:
    """The rows, of which all but the first chunks come when the processes are ready."""
    ready, whole = threading.Semaphore(0), EncodingProcess.wait

    def wait(self: EncodingProcess) -> None:
        whole(self)
        ready.release()

    monkeypatch.setattr(EncodingProcess, "wait", wait)
    for number, row in enumerate(rows):
        if number == 30:
            for _ in range(processes):
                assert ready.acquire(timeout=50), "a process does not begin"
        yield row


def test_processes_give_the_same_results_in_the_same_order(
    by_processes: list[Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, encode = rows_of(300), encoder_of()
    done = list(encoded(once_ready(rows, monkeypatch), encode))
    assert [row.line for chunk, _ in done for row in chunk] == [row.line for row in rows]
    assert joined(done) == plain(encode(rows))
    assert sum(len(family.processes) for family in by_processes) == 2
    assert [family._first.returncode for family in by_processes] == [0] * len(by_processes)


def test_a_process_that_is_not_ready_at_the_end_is_not_waited_for(
    by_processes: list[Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "THREADS", 2)
    monkeypatch.setattr(encoding_process, "CHILD", "import sys; sys.stdin.read()")
    monkeypatch.setattr(Family, "begin", lambda self, encode: None)
    rows, encode = rows_of(40), encoder_of()
    assert joined(encoded(rows, encode)) == plain(encode(rows))
    assert [family._first.returncode for family in by_processes] == [-signal.SIGKILL] * len(by_processes)


def test_few_rows_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "Family", lambda count: pytest.fail("a process for a few rows"))
    monkeypatch.setattr(encoding, "cores", lambda: 2)
    assert sum(len(chunk) for chunk, _ in encoded(rows_of(50), encoder_of())) == 50


def test_a_process_that_is_killed_is_told_of_and_loses_no_row(
    by_processes: list[Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, encode, told = rows_of(300), encoder_of(), list[str]()
    whole = EncodingProcess.encode

    def killed_on_the_way(self: EncodingProcess, chunk: Sequence[Row]) -> Packed:
        if chunk[0].line == 101:
            os.kill(self.pid, signal.SIGKILL)
        return whole(self, chunk)

    monkeypatch.setattr(EncodingProcess, "encode", killed_on_the_way)
    assert joined(encoded(rows, encode, told.append)) == plain(encode(rows))
    assert 1 <= len(told) <= encoding_process.AHEAD
    assert "a process that encodes rows is gone" in told[0]


def test_where_no_process_can_begin_the_rows_are_encoded_here(
    by_processes: list[Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "THREADS", 2)
    monkeypatch.setattr(encoding_process, "CHILD", "raise SystemExit('no room')")
    rows, encode, told = rows_of(40), encoder_of(), list[str]()
    assert joined(encoded(rows, encode, told.append)) == plain(encode(rows))
    monkeypatch.setattr(sys, "executable", "/there/is/no/such/python")
    assert sum(len(chunk) for chunk, _ in encoded(rows, encode, told.append)) == 40
    assert "/there/is/no/such/python" in told[-1]


def test_an_error_of_the_encoder_comes_out_of_a_process_with_its_place(by_processes: list[Family]) -> None:
    contradicting = T_GEN.replace("{% generation %}", "{{ '?' }}{% generation %}")
    expected = encoder_of(contradicting)
    rows = [Row(n, say("a", "b"), nbytes=1) for n in range(1, 4)]
    with pytest.raises(DataInvalid) as here:
        expected(rows)
    with pytest.raises(DataInvalid) as there:
        list(encoded(rows, expected))
    assert str(there.value) == str(here.value)
    assert "a.jsonl:1" in str(there.value)


class _Demanding(Exception):
    def __init__(self, one: object, two: object) -> None:
        super().__init__("cannot be made again from its message")


def test_an_error_that_cannot_be_sent_is_told_in_words() -> None:
    told = encoding_process._portable(_Demanding(1, 2))
    assert type(told) is RuntimeError
    assert "_Demanding: cannot be made again" in str(told)


def test_leaving_early_leaves_no_process_and_no_thread(by_processes: list[Family]) -> None:
    encoding_rows = encoded(iter(rows_of(2000)), encoder_of())
    assert len(next(encoding_rows)[0]) == 10
    encoding_rows.close()
    assert [family._first.returncode for family in by_processes] == [-signal.SIGKILL] * len(by_processes)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("encode")]


def test_rows_that_cannot_be_sent_are_encoded_here(by_processes: list[Family]) -> None:
    value: Any = "deep"
    for _ in range(5000):
        value = [value]
    rows, encode = [Row(1, {"messages": value}, nbytes=1), Row(2, say("a", "b"), nbytes=1)], encoder_of()
    (done,) = encoded(rows, encode)
    assert plain(done[1]) == plain(encode(rows))
    assert done[1].samples.tolist() == [0, 1]


def test_answers_reach_the_thread_that_asked() -> None:
    encode, family = encoder_of(), Family(1)
    (process,) = family.processes
    try:
        family.begin(sendable(encode))
        process.wait()
        parts = [rows_of(n) for n in range(1, 41)]
        got: list[list[Any]] = [[], []]

        def ask(number: int) -> None:
            got[number] = [plain(process.encode(part)) for part in parts[number::2]]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert got == [[plain(encode(part)) for part in parts[number::2]] for number in range(2)]
    finally:
        family.close()


def test_ctrl_c_in_the_terminal_does_not_reach_the_processes() -> None:
    family = Family(2)
    try:
        family.begin(sendable(encoder_of()))
        for process in family.processes:
            process.wait()
            assert os.getpgid(process.pid) != os.getpgid(0)
    finally:
        family.close()
    with pytest.raises(ProcessGone):
        family.processes[0].encode(rows_of(1))


PARENT = """
import pickle, signal, os
from flowdflash.data.encoding_process import Family
family = Family(2)
family.begin(pickle.dumps(len))
for process in family.processes:
    process.wait()
    print(process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="only Linux lets one wait for the child of another")
def test_processes_end_when_their_parent_is_killed() -> None:
    parent = subprocess.run([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, check=False)
    assert parent.returncode == -signal.SIGKILL
    pids = [int(line) for line in parent.stdout.split()]
    assert len(pids) == 2
    for pid in pids:
        try:
            child = os.pidfd_open(pid)
        except ProcessLookupError:
            continue  # gone already
        try:
            assert select.select([child], [], [], 20)[0], "the process outlived its parent"
        finally:
            os.close(child)


def test_a_large_file_has_all_cores_from_its_first_row(
    tmp_path: Path, by_processes: list[Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "MANY_BYTES", 1 << 20)
    tokenizer = make_tokenizer()
    encoder = ChatEncoder(tokenizer, EncodeOptions())
    rows = [Row(n, say("a", "b"), nbytes=1) for n in range(1, 4)]
    store = open_or_build(tmp_path, "k", lambda: rows, encoder, nbytes=1 << 20)
    assert (sum(len(family.processes) for family in by_processes), len(store)) == (2, 3)


@pytest.mark.parametrize(("told", "expected"), [("", 4), ("2", 2), ("99", 4), ("0", 4), ("many", 4)])
def test_as_many_cores_as_the_tokenizer_may_use(monkeypatch: pytest.MonkeyPatch, told: str, expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setenv("RAYON_NUM_THREADS", told)
    assert cores() == expected


@pytest.mark.parametrize("part", ["train", "held_out"])
def test_a_pickled_encoder_gives_the_same_samples(part: Any) -> None:
    rows = rows_of(60)
    split = Split(part, prompts=9, rows=lambda: islice(rows, None))
    encoder = ChatEncoder(make_tokenizer(), EncodeOptions(max_length=50), split)
    copy = pickle.loads(pickle.dumps(encoder))
    assert copy.fingerprint == encoder.fingerprint
    assert plain(pack(copy.encode(rows))) == plain(pack(encoder.encode(rows)))
    assert any(result.samples for result in copy.encode(rows))
