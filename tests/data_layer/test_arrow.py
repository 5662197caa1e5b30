from __future__ import annotations

import datetime
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowdflash.data import arrow as module
from flowdflash.data.arrow import read_parquet
from flowdflash.errors import DataInvalid
from flowdflash.stage import Check
from flowdflash.stages.chat_parquet import ChatParquet
from flowdflash.stages.hf_dataset import HfDataset

from .fixtures import T_TOOLS, say

Open = Callable[..., Any]
GOOD = [say("hi", "hello"), say("one", "two", "three", "four"), say("é", "👍")]


def parquet(path: Path, rows: list[Any], **options: Any) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def samples(source: Any) -> list[tuple[list[int], list[bool]]]:
    (table,) = source.epochs()
    return [(ids.tolist(), mask.tolist()) for ids, mask in map(source.tokens, table.ids.tolist())]


def test_parquet_gives_the_samples_and_accounts_of_jsonl(open_source: Open, tmp_path: Path) -> None:
    rows = [GOOD[0], {"messages": []}, *GOOD[1:], say("a", "")]
    expected = open_source(rows)
    path = parquet(tmp_path / "rows.parquet", rows, row_group_size=2)
    source = open_source(path, type=ChatParquet, run="other")
    assert samples(source) == samples(expected) and source.summary() == expected.summary()
    assert [source.describe(n) for n in range(3)] == [f"{path}:{line}" for line in (1, 3, 4)]
    entries = [json.loads(line) for line in (tmp_path / "other" / "corpus" / "rejects.jsonl").read_text().splitlines()]
    assert [(entry["line"], entry["row"]) for entry in entries] == [(2, rows[1]), (5, rows[4])]


def test_split_and_limit_count_rows_of_parquet(open_source: Open, tmp_path: Path) -> None:
    rows = [say(f"question {n % 20}", f"answer {n}") for n in range(60)]
    path = parquet(tmp_path / "rows.parquet", rows, row_group_size=7)
    assert open_source(path, type=ChatParquet, limit_rows=9).summary()["rows_read"] == 9
    parts = {
        part: open_source(path, type=ChatParquet, split=part, held_out_rows=5).summary()
        for part in ("train", "held_out")
    }
    assert [(p["rows_read"], p["rows_kept"]) for p in parts.values()] == [(60, 45), (60, 15)]
    jsonl = open_source(rows, split="held_out", held_out_rows=5).summary()
    assert jsonl == parts["held_out"]


def test_rows_are_read_a_chunk_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ROWS", 4)
    path = parquet(tmp_path / "rows.parquet", [say(str(n), "a") for n in range(10)], row_group_size=5)
    told: list[tuple[int, int]] = []
    rows = read_parquet(path, progress=lambda done, total: told.append((done, total)))
    assert (next(rows).line, told) == (1, [])
    assert [row.line for row in rows] == list(range(2, 11))
    assert told[-1] == (10, 10) and len(told) > 2
    assert all(row.nbytes > 0 for row in read_parquet(path))


def test_null_inside_a_row_of_a_table_counts_as_absent(open_source: Open, tmp_path: Path) -> None:
    def called(name: str, **arguments: Any) -> dict[str, Any]:
        calls = [{"function": {"name": name, "arguments": arguments}}]
        turns = [{"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "3"}]
        return {"messages": [*say("do it")["messages"], *turns, {"role": "assistant", "content": "done"}]}

    rows = [called("add", a=1, b=2), called("open", file="x"), say("hi", "hello")]
    path = parquet(tmp_path / "rows.parquet", rows)
    # The table has every key in every struct; the text of a call must not.
    assert samples(open_source(path, T_TOOLS, type=ChatParquet)) == samples(open_source(rows, T_TOOLS))


def test_columns_that_json_has_no_values_for_reach_rejects_and_prompts(open_source: Open, tmp_path: Path) -> None:
    rows = [{**say("hi"), "when": datetime.date(2024, 5, 1), "raw": b"\xff"}, {"messages": [], "raw": b"\xff"}]
    rows[0] |= {"score": math.nan, "scores": [1.0, math.inf]}
    source = open_source(parquet(tmp_path / "rows.parquet", rows), type=ChatParquet, task="generate")
    assert source.row(0)["when"] == "2024-05-01"
    assert source.row(0)["score"] is None and source.row(0)["scores"] == [1.0, None]
    (line,) = (tmp_path / "run" / "corpus" / "rejects.jsonl").read_text().splitlines()
    assert json.loads(line)["row"]["raw"] == "b'\\xff'"


def test_store_of_one_format_is_never_taken_for_that_of_another(open_source: Open, tmp_path: Path) -> None:
    path = parquet(tmp_path / "rows.parquet", GOOD)
    open_source(path, type=ChatParquet)
    with pytest.raises(DataInvalid, match="chat_parquet reads it"):
        open_source(path)


@pytest.mark.parametrize(("module_name", "extra"), [("pyarrow.parquet", "parquet"), ("datasets", "hf")])
def test_missing_package_is_named_with_its_extra(
    open_source: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module_name: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module_name, None)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataInvalid, match=rf"pip install 'flowdflash\[{extra}\]'"):
        if extra == "hf":
            open_source([], type=HfDataset, dataset="owner/name")
        else:
            open_source(tmp_path / "rows.parquet", type=ChatParquet)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    found = pytest.importorskip("datasets")
    for place in ("datasets.config", "huggingface_hub.constants"):
        monkeypatch.setattr(f"{place}.HF_HUB_OFFLINE", True)
    found.disable_progress_bars()
    return found


def test_saved_data_set_gives_the_samples_of_jsonl(open_source: Open, tmp_path: Path, library: Any) -> None:
    rows = [*GOOD, {"messages": []}]
    folder = tmp_path / "saved"
    library.DatasetDict({"train": library.Dataset.from_list(rows)}).save_to_disk(folder)
    source = open_source([], type=HfDataset, dataset=str(folder))
    expected = open_source(rows)
    assert samples(source) == samples(expected) and source.summary() == expected.summary()
    assert source.describe(2) == f"{folder}[train]:3"
    assert open_source([], type=HfDataset, dataset=str(folder), limit_rows=2).summary()["rows_read"] == 2


def test_each_split_of_a_data_set_has_a_store_of_its_own(open_source: Open, tmp_path: Path, library: Any) -> None:
    folder = tmp_path / "saved"
    splits = {name: library.Dataset.from_list(GOOD[:n]) for name, n in (("train", 3), ("test", 1))}
    library.DatasetDict(splits).save_to_disk(folder)
    for name, rows in (("train", 3), ("test", 1)):
        source = open_source([], type=HfDataset, dataset=str(folder), dataset_split=name)
        assert source.summary()["rows_read"] == rows
    with pytest.raises(DataInvalid, match=r"no such split; the folder holds train, test"):
        open_source([], type=HfDataset, dataset=str(folder), dataset_split="valid")


def test_data_set_that_cannot_be_had_is_an_error_that_names_it(open_source: Open, tmp_path: Path, library: Any) -> None:
    with pytest.raises(DataInvalid, match=r"^owner/name\[train\]: cannot be loaded: .*Offline"):
        open_source([], type=HfDataset, dataset="owner/name")
    with pytest.raises(DataInvalid, match=r"cannot be loaded: FileNotFoundError"):
        open_source([], type=HfDataset, dataset=str(tmp_path))
    library.Dataset.from_list([{"text": "a"}]).save_to_disk(tmp_path / "other")
    with pytest.raises(DataInvalid, match="no column `messages`, `conversations` or `prompt`; it has text"):
        open_source([], type=HfDataset, dataset=str(tmp_path / "other"))


def test_options_of_the_hub_are_refused_for_a_folder(tmp_path: Path) -> None:
    for options, places in (
        ({"dataset": "owner/name", "subset": "x", "revision": "main"}, set()),
        ({"dataset": str(tmp_path), "subset": "x", "revision": "main"}, {"subset", "revision"}),
        ({"dataset": "./gone"}, {"dataset"}),
    ):
        check = Check("corpus")
        config = HfDataset.Config.model_validate({**options, "tokenizer": "some/model"}, context={"base": tmp_path})
        assert HfDataset(config).check(check)["task"] == "train"
        assert {problem.path for problem in check.problems} == places


def test_a_date_out_of_range_that_nobody_reads_costs_no_row(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    messages = pa.array([row["messages"] for row in GOOD])
    dates = pa.array([0, 2**50, 1], pa.timestamp("ms"))
    pq.write_table(pa.table({"messages": messages, "when": dates, "score": [1, 2, 3]}), tmp_path / "rows")
    rows = list(read_parquet(tmp_path / "rows"))
    assert [(row.problem, row.value["messages"], row.value["score"]) for row in rows] == [
        ("", good["messages"], n) for n, good in enumerate(GOOD, 1)
    ]
    assert ["when" in row.value for row in rows] == [True, False, True]
    pq.write_table(pa.table({"messages": messages, "tools": dates}), tmp_path / "rows")
    assert [row.problem for row in read_parquet(tmp_path / "rows")] == ["", module.UNREADABLE, ""]
