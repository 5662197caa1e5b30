from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from flowdflash.errors import DataInvalid
from flowdflash.items import GeneratedBatch
from flowdflash.stages.responses import Responses

from .models import batch_of, context, problems

USER = {"role": "user", "content": "q"}


def sink(path: Path, **options: Any) -> Responses:
    return Responses(Responses.Config(path=path, **options))


def generated(
    first: int,
    texts: Sequence[str],
    *,
    reasons: Sequence[Literal["stop", "length"]] = (),
    counts: Sequence[int] = (),
    rows: Sequence[dict[str, Any]] | None = None,
    seq: int = 0,
    epoch: int = 0,
) -> GeneratedBatch:
    info = batch_of([[1]] * len(texts), first_id=first, seq=seq, epoch=epoch).info
    given = [{"messages": [USER], "n": first + i} for i in range(len(texts))] if rows is None else rows
    return GeneratedBatch(
        info, tuple(texts), tuple(counts) or (4,) * len(texts), tuple(reasons) or ("stop",) * len(texts), tuple(given)
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def written(
    path: Path, tmp_path: Path, items: Sequence[GeneratedBatch], *, batches: int = 0, **options: Any
) -> Responses:
    stage = sink(path, **options)
    stage.open(context(tmp_path, tmp_path, batches=batches))
    for item in items:
        stage.write(item)
    stage.close()
    return stage


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
    assert stage.summary() == {"path": str(path), "responses_kept": 4, "responses_dropped": {}}
    assert [p.name for p in path.parent.iterdir()] == ["out.jsonl"]


def test_an_older_answer_is_replaced_and_earlier_turns_stay(tmp_path: Path) -> None:
    old = {"role": "assistant", "content": "old"}
    row = {"messages": [USER, old, USER, old]}
    written(tmp_path / "out.jsonl", tmp_path, [generated(0, ["new"], rows=[row])])
    assert [m["content"] for m in lines(tmp_path / "out.jsonl")[0]["messages"]] == ["q", "old", "q", "new"]
    assert row["messages"][-1] is old, "the row of the batch is not changed"


def test_what_is_dropped_is_counted_by_reason(tmp_path: Path) -> None:
    item = generated(0, ["a", "b", " \n", "d"], reasons=["length", "stop", "stop", "stop"], counts=[9, 1, 5, 5])
    stage = written(tmp_path / "out.jsonl", tmp_path, [item], min_tokens=2)
    assert [row["n"] for row in lines(tmp_path / "out.jsonl")] == [3]
    assert stage.summary()["responses_dropped"] == {
        "cut at the token limit": 1,
        "shorter than min_tokens": 1,
        "empty": 1,
    }
    written(tmp_path / "all.jsonl", tmp_path, [item], keep="all")
    assert [row["finish_reason"] for row in lines(tmp_path / "all.jsonl")] == ["length", "stop", "stop"]


def test_a_second_epoch_adds_responses_of_its_own(tmp_path: Path) -> None:
    written(tmp_path / "out.jsonl", tmp_path, [generated(0, ["b"], seq=1, epoch=1), generated(0, ["a"])])
    assert [row["messages"][-1]["content"] for row in lines(tmp_path / "out.jsonl")] == ["a", "b"]


def test_gz_is_compressed_and_equal_for_equal_rows(tmp_path: Path) -> None:
    for name in ("one.jsonl.gz", "two.jsonl.gz"):
        written(tmp_path / name, tmp_path, [generated(0, ["a"])])
    one = (tmp_path / "one.jsonl.gz").read_bytes()
    assert json.loads(gzip.decompress(one))["n"] == 0
    assert one == (tmp_path / "two.jsonl.gz").read_bytes()


def test_a_run_that_ended_early_leaves_a_partial_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    written(path, tmp_path, [generated(0, ["a"])], batches=2)
    assert not path.exists()
    assert len(lines(tmp_path / "out.jsonl.partial")) == 1


def test_no_response_writes_no_file(tmp_path: Path) -> None:
    written(tmp_path / "out.jsonl", tmp_path, [], batches=2)
    assert list(tmp_path.iterdir()) == []


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
    stage = sink(tmp_path / "out.jsonl")
    stage.open(context(tmp_path, tmp_path))
    with pytest.raises(DataInvalid, match=r"source|sample 0"):
        stage.write(generated(0, ["a"], rows=rows))


def test_a_name_that_no_source_reads_is_refused(tmp_path: Path) -> None:
    assert [path for path, _ in problems(sink(tmp_path / "out.txt"))[0]] == ["path"]
    assert problems(sink(tmp_path / "out.jsonl.gz"))[0] == []
