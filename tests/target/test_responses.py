from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowdflash.data.learnt import is_cut_off, unlearnt
from flowdflash.errors import DataInvalid
from flowdflash.items import Answer, GeneratedBatch
from flowdflash.stages.responses import Responses

from .models import batch_of, context, problems

USER = {"role": "user", "content": "q"}
MADE_FROM = {"plan": "abc", "seed": 7, "stages": {"generator": {"type": "transformers", "temperature": 0.0}}}


def sink(path: Path, **options: Any) -> Responses:
    return Responses(Responses.Config(path=path, **options))


def generated(
    first: int,
    answers: Sequence[str | Answer | tuple[Answer, ...]],
    *,
    rows: Sequence[dict[str, Any]] | None = None,
    seq: int = 0,
    epoch: int = 0,
) -> GeneratedBatch:
    """A batch of which each prompt was answered by a text, an answer, or answers turn by turn."""
    info = batch_of([[1]] * len(answers), first_id=first, seq=seq, epoch=epoch).info
    given = [{"messages": [USER], "n": first + i} for i in range(len(answers))] if rows is None else rows
    made = [(Answer(a, 4),) if isinstance(a, str) else (a,) if isinstance(a, Answer) else a for a in answers]
    return GeneratedBatch(info, tuple(made), tuple(given))


def opened(
    path: Path, tmp_path: Path, *, batches: int, made_from: Mapping[str, Any] = MADE_FROM, **options: Any
) -> Responses:
    stage = sink(path, **options)
    stage.open(replace(context(tmp_path, tmp_path, batches=batches), made_from=made_from))
    return stage


def written(
    path: Path, tmp_path: Path, items: Sequence[GeneratedBatch], *, batches: int = 0, **options: Any
) -> Responses:
    """A run of the sink; by default one that comes to its end."""
    stage = opened(path, tmp_path, batches=batches or len(items), **options)
    try:
        for item in items:
            stage.write(item)
    finally:
        stage.close()
    return stage


def rejects(tmp_path: Path) -> list[dict[str, Any]]:
    return lines(tmp_path / "run" / "target" / "rejects.jsonl")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_rows_are_written_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.jsonl"
    stage = written(path, tmp_path, [generated(2, ["c", "d"], seq=0), generated(0, ["a", "é"], seq=1)], batches=2)
    rows = lines(path)
    assert [row["n"] for row in rows] == [0, 1, 2, 3]
    assert rows[1] == {
        "messages": [USER, {"role": "assistant", "content": "é"}],
        "n": 1,
        "finish_reason": "stop",
        "response_tokens": 4,
    }
    expected = {"responses_kept": 4, "responses_dropped": {}, "batches_of_an_earlier_run": 0}
    assert stage.summary() == {"path": str(path), **expected}
    assert [p.name for p in path.parent.iterdir()] == ["out.jsonl"]


def test_an_older_answer_is_replaced_and_earlier_turns_stay(tmp_path: Path) -> None:
    old = {"role": "assistant", "content": "old"}
    row = {"messages": [USER, old, USER, old]}
    written(tmp_path / "out.jsonl", tmp_path, [generated(0, ["new"], rows=[row])])
    assert [m["content"] for m in lines(tmp_path / "out.jsonl")[0]["messages"]] == ["q", "old", "q", "new"]
    assert row["messages"][-1] is old, "the row of the batch is not changed"


def test_half_a_surrogate_pair_in_another_key_stays_as_it_was(tmp_path: Path) -> None:
    row = {"messages": [USER], "title": "é \ud83d"}
    written(tmp_path / "out.jsonl", tmp_path, [generated(0, ["new", ""], rows=[row, row])])
    assert lines(tmp_path / "out.jsonl")[0]["title"] == rejects(tmp_path)[0]["row"]["title"] == row["title"]


def test_a_second_epoch_adds_responses_of_its_own(tmp_path: Path) -> None:
    written(tmp_path / "out.jsonl", tmp_path, [generated(0, ["b"], seq=1, epoch=1), generated(0, ["a"])])
    assert [row["messages"][-1]["content"] for row in lines(tmp_path / "out.jsonl")] == ["a", "b"]


def test_gz_is_compressed_and_equal_for_equal_rows(tmp_path: Path) -> None:
    for name in ("one.jsonl.gz", "two.jsonl.gz"):
        written(tmp_path / name, tmp_path, [generated(0, ["a"])])
    one = (tmp_path / "one.jsonl.gz").read_bytes()
    assert json.loads(gzip.decompress(one))["n"] == 0
    assert one == (tmp_path / "two.jsonl.gz").read_bytes()


def test_an_existing_file_is_not_replaced_unless_asked(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("precious\n")
    with pytest.raises(DataInvalid, match="overwrite: true"):
        written(path, tmp_path, [generated(0, ["a"])])
    assert path.read_text() == "precious\n"
    written(path, tmp_path, [generated(0, ["a"])], overwrite=True)
    assert len(lines(path)) == 1


@pytest.mark.parametrize("rows", [[], [{}], [{"messages": [{"role": "assistant", "content": "x"}]}]])
def test_a_source_without_usable_rows_is_named(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    with pytest.raises(DataInvalid, match="row"):
        written(tmp_path / "out.jsonl", tmp_path, [generated(0, ["a"], rows=rows)])


def test_a_name_that_no_source_reads_is_refused(tmp_path: Path) -> None:
    assert [path for path, _ in problems(sink(tmp_path / "out.txt"))[0]] == ["path"]
    assert problems(sink(tmp_path / "out.jsonl.gz"))[0] == []


def test_what_is_dropped_is_counted_by_reason_and_listed(tmp_path: Path) -> None:
    refused = Answer("", 0, rejected="refused by the server with status 400", detail="too long")
    item = generated(0, [Answer("a", 9, "length"), Answer("b", 1), Answer(" \n", 5), Answer("d", 5), refused])
    stage = written(tmp_path / "out.jsonl", tmp_path, [item], min_tokens=2)
    assert [row["n"] for row in lines(tmp_path / "out.jsonl")] == [3]
    assert stage.summary()["responses_dropped"] == {
        "cut at the token limit": 1,
        "shorter than min_tokens": 1,
        "empty": 1,
        "refused by the server with status 400": 1,
    }
    assert [(entry["sample"], entry["row"]["n"]) for entry in rejects(tmp_path)] == [(n, n) for n in (0, 1, 2, 4)]
    assert rejects(tmp_path)[-1]["detail"] == "too long"
    written(tmp_path / "all.jsonl", tmp_path, [item], keep="all")
    assert [row["finish_reason"] for row in lines(tmp_path / "all.jsonl")] == ["length", "stop", "stop"]


def test_answers_stand_between_the_questions_and_a_conversation_ends_before_one_that_is_not_kept(
    tmp_path: Path,
) -> None:
    row = {"messages": [{"role": "user", "content": text} for text in "abc"]}
    turns = [
        (Answer("1", 2), Answer("2", 3), Answer("3", 4, reasoning="hm")),
        (Answer("1", 2), Answer("2", 9, "length")),
        (Answer("", 1),),
    ]

    def kept(keep: str) -> list[tuple[str, str, int]]:
        path = tmp_path / f"{keep}.jsonl"
        written(path, tmp_path, [generated(0, turns, rows=[row] * 3)], keep=keep)
        told = lines(path)
        return [("".join(m["content"] for m in t["messages"]), t["finish_reason"], t["response_tokens"]) for t in told]

    assert kept("stop") == [("a1b2c3", "stop", 9), ("a1", "stop", 2)]
    assert [(entry["sample"], entry["turn"], entry["reason"]) for entry in rejects(tmp_path)] == [
        (1, 1, "cut at the token limit"),
        (2, 0, "empty"),
    ]
    assert lines(tmp_path / "stop.jsonl")[0]["messages"][-1]["reasoning_content"] == "hm"
    assert kept("all") == [("a1b2c3", "stop", 9), ("a1b2", "length", 11)]
    assert rejects(tmp_path)[0]["reason"] == "asked after an answer that was cut"


BATCHES = [
    generated(2, ["c", Answer("é", 9, "length")], seq=0),
    generated(0, ["a", "b"], seq=1),
    generated(4, ["e"], seq=2),
]


def test_a_run_killed_at_any_byte_goes_on_and_ends_with_the_same_file(tmp_path: Path) -> None:
    straight = tmp_path / "straight.jsonl"
    written(straight, tmp_path, BATCHES)
    listed = rejects(tmp_path)
    path, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    written(path, tmp_path, BATCHES[:2], batches=3)
    assert not path.exists()
    whole = partial.read_bytes()
    ends = [n + 1 for n, byte in enumerate(whole) if byte == 10]
    blocks = [ends[0], ends[3], ends[6]]  # after the head, and after each batch: one line and two rows
    for size in sorted(
        {*range(0, len(whole), 17), *(end + by for end in ends for by in (-1, 0, 1) if end + by <= len(whole))}
    ):
        partial.write_bytes(whole[:size])
        stage = opened(path, tmp_path, batches=3)
        done = sorted(stage.batches_done)
        assert done == list(range(max(sum(size >= end for end in blocks) - 1, 0)))
        for item in BATCHES[len(done) :]:
            stage.write(item)
        stage.close()
        assert path.read_bytes() == straight.read_bytes() and rejects(tmp_path) == listed
        assert stage.summary()["responses_dropped"] == {"cut at the token limit": 1}
        assert not partial.exists()
        path.unlink()


def test_a_batch_that_is_there_already_is_not_written_twice(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    written(path, tmp_path, BATCHES[:1], batches=3)
    written(path, tmp_path, BATCHES)
    assert [row["n"] for row in lines(path)] == [0, 1, 2, 4]


def test_a_run_killed_before_it_could_remove_the_partial_file_ends_without_more_work(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    written(path, tmp_path, BATCHES[:2], batches=3)
    stage = opened(path, tmp_path, batches=3)
    stage._opened.complete = lambda: None  # type: ignore[method-assign]
    stage.write(BATCHES[2])
    stage.close()
    assert (tmp_path / "out.jsonl.partial").exists()
    path.write_text("whole, from before the kill\n")
    stage = opened(path, tmp_path, batches=3)
    assert sorted(stage.batches_done) == [0, 1, 2]
    stage.close()
    assert [row["n"] for row in lines(path)] == [0, 1, 2, 4]


@pytest.mark.parametrize(
    ("made_from", "options", "told"),
    [
        ({**MADE_FROM, "plan": "other"}, {}, "plan abc then, other now"),
        (
            {**MADE_FROM, "stages": {"generator": {"type": "transformers", "temperature": 0.7}}},
            {},
            "stages.generator.temperature 0.0 then, 0.7 now",
        ),
        (MADE_FROM, {"min_tokens": 3, "overwrite": True}, "responses.min_tokens 1 then, 3 now"),
    ],
)
def test_what_another_pipeline_has_left_is_neither_mixed_in_nor_lost(
    tmp_path: Path, made_from: Mapping[str, Any], options: dict[str, Any], told: str
) -> None:
    path = tmp_path / "out.jsonl"
    written(path, tmp_path, BATCHES[:1], batches=3)
    left = (tmp_path / "out.jsonl.partial").read_bytes()
    with pytest.raises(DataInvalid, match=told):
        opened(path, tmp_path, batches=3, made_from=made_from, **options)
    assert (tmp_path / "out.jsonl.partial").read_bytes() == left
    opened(path, tmp_path, batches=3).close()


def test_a_damaged_partial_file_is_refused(tmp_path: Path) -> None:
    path, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    written(path, tmp_path, BATCHES[:2], batches=3)
    whole = partial.read_bytes().splitlines(keepends=True)
    for bad in (b"nonsense\n", b"[]\n", b'{"messages": []}\n'):
        partial.write_bytes(b"".join([whole[0], bad, *whole[2:]]))
        with pytest.raises(DataInvalid, match="damaged"):
            opened(path, tmp_path, batches=3)
    for lines_left in (whole[1:], whole[:1] * 2):
        partial.write_bytes(b"".join(lines_left))
        with pytest.raises(DataInvalid, match="damaged"):
            opened(path, tmp_path, batches=3)


def test_two_runs_never_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = opened(path, tmp_path, batches=3)
    with pytest.raises(DataInvalid, match="another run"):
        opened(path, tmp_path, batches=3)
    first.close()
    assert list(tmp_path.iterdir()) == [], "without an answer nothing is left"


def test_a_streaming_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataInvalid, match="streaming"):
        opened(tmp_path / "out.jsonl", tmp_path, batches=0)


def test_a_file_is_not_replaced_by_no_answer_at_all(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    written(path, tmp_path, [generated(0, ["a"])])
    before = path.read_bytes()
    for _ in range(2):  # and again when the run goes on
        with pytest.raises(DataInvalid, match=r"every response was dropped \(empty 2; see .*rejects.jsonl\)"):
            written(path, tmp_path, [generated(0, ["", " "])], overwrite=True, batches=1)
        assert path.read_bytes() == before
        assert [entry["reason"] for entry in rejects(tmp_path)] == ["empty", "empty"]


def test_answers_never_replace_the_prompts_that_they_are_made_from(tmp_path: Path) -> None:
    prompts, link = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("{}\n")
    link.symlink_to(prompts)
    facts = {"files": (prompts.resolve(),)}
    for path in (prompts, link):
        ((place, message),) = problems(sink(path, overwrite=True), **facts)[0]
        assert place == "path" and "would replace it" in message
    assert problems(sink(tmp_path / "other.jsonl"), **facts)[0] == []


def test_answers_that_were_there_before_are_not_to_be_learnt(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    before = [USER, {"role": "assistant", "content": "somebody's"}, USER]
    written(path, tmp_path, [generated(0, ["own"], rows=[{"messages": before}])])
    (row,) = lines(path)
    assert [message.get("weight") for message in row["messages"]] == [None, 0, None, None]
    assert unlearnt(row) == {0} and row["messages"][3] == {"role": "assistant", "content": "own"}


def test_what_a_row_says_of_its_old_answers_is_not_said_of_the_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    old = {"messages": [USER], "stop_reason": "max_tokens", "weight": 0, "n": 1}
    written(path, tmp_path, [generated(0, ["own"], rows=[old])])
    (row,) = lines(path)
    assert row["n"] == 1 and not is_cut_off(row) and unlearnt(row) == frozenset()
