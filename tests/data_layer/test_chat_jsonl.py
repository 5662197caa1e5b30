from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from flowdflash.data import stored
from flowdflash.data.rejects import UNSUPERVISED_AFTER_CUT
from flowdflash.errors import DataInvalid, ModelInvalid
from flowdflash.stage import Check
from flowdflash.stages.chat_jsonl import ChatJsonl
from flowdflash.target.load import load_tokenizer

from .fixtures import END, T_GEN, T_PLAIN, T_THINK, f_row, make_tokenizer, say, write_rows

Open = Callable[..., ChatJsonl]
GOOD = [say("hi", "hello"), say("one", "two", "three", "four"), say("é", "👍")]


def hashes(source: ChatJsonl) -> list[tuple[bytes, bytes]]:
    (table,) = source.epochs()
    return [tuple(part.tobytes() for part in source.tokens(n)) for n in table.ids.tolist()]  # type: ignore[misc]


def refused(tmp_path: Path, **options: Any) -> set[str]:
    path = write_rows(tmp_path / "rows.jsonl", GOOD)
    check = Check("corpus")
    ChatJsonl(ChatJsonl.Config(**{"path": path, "tokenizer": "some/model", **options})).check(check)
    assert all(problem.hint for problem in check.problems)
    return {problem.path for problem in check.problems}


def test_table_agrees_with_the_tokens_in_every_epoch(open_source: Open) -> None:
    source = open_source(GOOD, epochs=3)
    tables = list(source.epochs())
    assert [table.epoch for table in tables] == [0, 1, 2]
    for table in tables:
        assert table.last
        for n, sample in enumerate(table.ids.tolist()):
            ids, mask = source.tokens(sample)
            assert (ids.dtype, mask.dtype) == (np.int64, np.bool_)
            assert (len(ids), len(mask), int(mask.sum())) == (table.lengths[n], table.lengths[n], table.supervised[n])


def test_supervised_places_of_a_row_of_known_size(open_source: Open) -> None:
    ids, mask = open_source([f_row(10, 6)]).tokens(0)
    assert np.flatnonzero(mask).tolist() == list(range(29, 36))
    assert ids[35] == END


def test_odd_rows_are_listed_and_good_ones_keep_their_order(open_source: Open, tmp_path: Path) -> None:
    def odd(*roles: str) -> dict[str, Any]:
        return {"messages": [{"role": role, "content": "x"} for role in roles]}

    rows = [GOOD[0], odd("user", "user", "assistant"), odd("assistant", "user", "assistant")]
    rows += [odd("system", "user", "assistant"), odd("user", "assistant", "user"), GOOD[1]]
    source = open_source(rows)
    path = str(tmp_path / "rows.jsonl")
    assert [source.describe(n) for n in range(3)] == [f"{path}:{line}" for line in (1, 4, 6)]
    summary = source.summary()
    assert (summary["rows_read"], summary["rows_kept"], summary["samples"]) == (6, 3, 3)
    assert summary["rejected"] == {
        "two user turns in a row": 1,
        "opens with an assistant turn": 1,
        "ends without an answer": 1,
    }
    listed = [json.loads(line) for line in (tmp_path / "run" / "corpus" / "rejects.jsonl").read_text().splitlines()]
    assert [(entry["file"], entry["line"]) for entry in listed] == [(path, 2), (path, 3), (path, 5)]
    assert [entry["row"] for entry in listed] == [rows[1], rows[2], rows[4]]
    with pytest.raises(
        DataInvalid, match=r"rows\.jsonl:2: two user turns in a row.*3 bad rows in all.*on_bad_row: skip"
    ):
        open_source(rows, on_bad_row="error")


def test_dialects_give_the_same_samples(open_source: Open) -> None:
    names = {"user": "human", "assistant": "gpt"}
    messages = [row["messages"] for row in GOOD]
    sharegpt = [[{"from": names[m["role"]], "value": m["content"]} for m in row] for row in messages]
    expected = hashes(open_source(GOOD))
    assert hashes(open_source([{"conversations": row} for row in messages])) == expected
    assert hashes(open_source([{"conversations": row} for row in sharegpt])) == expected


def test_byte_order_mark_gives_the_same_samples(open_source: Open, tmp_path: Path) -> None:
    plain = write_rows(tmp_path / "a.jsonl", GOOD).read_bytes()
    expected = hashes(open_source(tmp_path / "a.jsonl"))
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + plain)
    assert hashes(open_source(tmp_path / "b.jsonl")) == expected
    (tmp_path / "c.jsonl").write_bytes(plain + b"\xef\xbb\xbf" + plain)
    assert hashes(open_source(tmp_path / "c.jsonl")) == expected * 2


def test_cut_off_last_line_is_one_reject_with_its_line(open_source: Open, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", GOOD)
    path.write_text(path.read_text() + json.dumps(GOOD[0])[:30])
    source = open_source(path)
    assert source.summary()["rejected"] == {"truncated last line": 1}
    (entry,) = map(json.loads, (tmp_path / "run" / "corpus" / "rejects.jsonl").read_text().splitlines())
    assert (entry["line"], entry["reason"]) == (4, "truncated last line")


@pytest.mark.parametrize("data", ["", "\n\n\n"])
def test_file_without_rows_is_an_error(open_source: Open, tmp_path: Path, data: str) -> None:
    (tmp_path / "rows.jsonl").write_text(data)
    with pytest.raises(DataInvalid, match="holds no rows"):
        open_source(tmp_path / "rows.jsonl")


def test_only_bad_rows_are_an_error_that_counts_and_lists_them(open_source: Open, tmp_path: Path) -> None:
    with pytest.raises(
        DataInvalid, match=r"no usable row among 2 \(empty conversation 2\); the first: .*rows\.jsonl:1"
    ):
        open_source([{"messages": []}] * 2)
    assert len((tmp_path / "run" / "corpus" / "rejects.jsonl").read_text().splitlines()) == 2
    with pytest.raises(DataInvalid, match=r"\(3 in the other part of the split\); correct the rows"):
        open_source(GOOD, split="held_out", held_out_share=1e-9)


def test_long_rows_are_rejected_before_bucketing(open_source: Open) -> None:
    rows = [f_row(300, 20)] * 4 + [f_row(10, 20)] * 4
    for options in ({}, {"on_bad_row": "error"}):  # a long row is no bad row
        source = open_source(rows, max_length=64, **options)
        assert source.summary()["rejected"] == {UNSUPERVISED_AFTER_CUT: 4}
        (table,) = source.epochs()
        assert len(table) == 4
        assert table.supervised.min() == 21
    with pytest.raises(DataInvalid, match=r"no usable row among 4.*max_length"):
        open_source(rows[:4], max_length=64)


def test_truncation_is_counted_and_adds_no_end_mark(open_source: Open) -> None:
    source = open_source([f_row(10, 100), f_row(10, 5)], max_length=64)
    assert source.summary()["truncated"] == 1
    ids, mask = source.tokens(0)
    assert END not in ids[mask].tolist()
    assert len(ids) == 64


def test_missing_template_is_an_error_before_any_row_is_read(open_source: Open, tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match="has no chat template"):
        open_source(write_rows(tmp_path / "rows.jsonl", GOOD), None)
    assert not (tmp_path / "cache" / "tokens").exists()


def test_nothing_but_supervised_tokens_is_an_error(open_source: Open) -> None:
    bare = "{% for m in messages if m['role'] == 'assistant' %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(DataInvalid, match="every token is supervised"):
        open_source([say("hi", "hello")], bare)


def test_share_of_supervised_tokens_is_reported(open_source: Open) -> None:
    summary = open_source([f_row(10, 6)]).summary()
    assert (summary["tokens"], summary["supervised_tokens"]) == (37, 7)
    assert summary["supervised_share"] == pytest.approx(7 / 37)


def test_template_that_rewrites_earlier_turns_gives_more_samples_than_rows(open_source: Open) -> None:
    rows = [say("q", "<think>ab</think>a", "r", "<think>ab</think>b"), say("q", "a", "r", "b")]
    source = open_source(rows, T_THINK)
    assert (source.summary()["rows_kept"], source.summary()["samples"]) == (2, 3)
    assert source.describe(0) == source.describe(1) != source.describe(2)


def stores(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir()}


def test_second_open_reads_the_cache_and_still_writes_rejects_and_summary(open_source: Open, tmp_path: Path) -> None:
    rows = [*GOOD, {"messages": []}]
    first, second = open_source(rows, run="one"), open_source(rows, run="two")
    assert len(stores(tmp_path)) == 1
    assert first.summary() == second.summary()
    assert hashes(first) == hashes(second)
    one, two = ((tmp_path / run / "corpus" / "rejects.jsonl").read_text() for run in ("one", "two"))
    assert one == two != ""


def test_edited_row_template_or_option_builds_anew(open_source: Open, tmp_path: Path) -> None:
    before = hashes(open_source(GOOD))
    edited = hashes(open_source([say("hi", "hullo"), *GOOD[1:]]))
    assert edited != before
    assert len(stores(tmp_path)) == 2
    open_source(GOOD, T_GEN)
    open_source(GOOD, max_length=100)
    assert len(stores(tmp_path)) == 4
    assert hashes(open_source(GOOD)) == before
    assert len(stores(tmp_path)) == 4


def test_split_keeps_a_prompt_in_one_part_and_counts_the_other(open_source: Open) -> None:
    rows = [say(f"question {n % 20}", f"answer {n}") for n in range(60)]
    parts = {part: open_source(rows, split=part, held_out_rows=5) for part in ("train", "held_out")}
    held_out = parts["held_out"].summary()
    assert (held_out["rows_read"], held_out["rows_kept"], held_out["rows_other_split"]) == (60, 15, 45)
    assert parts["train"].summary()["rows_kept"] == 45
    assert not set(hashes(parts["train"])) & set(hashes(parts["held_out"]))


def test_limit_reads_the_first_rows_only(open_source: Open) -> None:
    assert open_source(GOOD, limit_rows=2).summary()["rows_read"] == 2


def test_prompts_for_the_target_have_no_supervision_and_keep_their_messages(open_source: Open) -> None:
    source = open_source([say("a", "b", "c", "d"), {"id": 7, "x": "\ud83d", **say("only a question")}], task="generate")
    (table,) = source.epochs()
    assert table.supervised.tolist() == [0, 0]
    ids, mask = source.tokens(0)
    assert make_tokenizer().decode(ids).endswith("a<|im_end|>\n<|im_start|>assistant\n")
    assert not mask.any()
    assert source.row(0) == {"messages": [{"role": "user", "content": "a"}]}
    assert source.row(1) == {"id": 7, "x": "\ud83d", "messages": [{"role": "user", "content": "only a question"}]}
    assert open_source(GOOD).row(0) is None


def test_vocabulary_is_what_occurs_in_the_samples(open_source: Open) -> None:
    source = open_source(GOOD)
    (table,) = source.epochs()
    samples = [source.tokens(n) for n in table.ids.tolist()]
    assert source.vocabulary().token_ids.tolist() == sorted({n for ids, _ in samples for n in ids.tolist()})
    assert source.vocabulary().supervised_token_ids.tolist() == sorted({n for i, m in samples for n in i[m].tolist()})


def test_resume_with_other_data_is_refused(open_source: Open) -> None:
    source = open_source(GOOD)
    state = source.state()
    source.restore(state)
    with pytest.raises(DataInvalid, match="have changed since the checkpoint"):
        open_source(GOOD[:2]).restore(state)


def test_closed_source_lets_go_and_says_so(open_source: Open) -> None:
    source = open_source(GOOD)
    source.close()
    assert source.summary() == {}
    with pytest.raises(RuntimeError, match="not open"):
        source.tokens(0)


def test_check_gives_facts_and_accepts_good_options(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", GOOD)
    options = {"max_length": 77, "epochs": 2, "template_options": {"enable_thinking": False}}
    source = ChatJsonl(ChatJsonl.Config(path=path, tokenizer="some/model", **options))
    facts = source.check(Check("corpus"))
    assert facts == {"tokenizer": "some/model", "task": "train", "files": (path.resolve(),), **options}
    assert refused(tmp_path, **options) == set()
    assert refused(tmp_path, split="held_out", held_out_share=0.1) == set()
    assert refused(tmp_path, task="generate", over_long="drop", prompt_until="last_answer") == set()


@pytest.mark.parametrize(
    ("options", "places"),
    [
        ({"path": "gone.jsonl"}, {"path"}),
        ({"tokenizer": "no-such-model"}, {"tokenizer"}),
        ({"split": "train"}, {"split"}),
        ({"held_out_rows": 3}, {"held_out_rows"}),
        ({"split": "train", "held_out_rows": 3, "held_out_share": 0.1}, {"held_out_rows"}),
        ({"prompt_until": "last_answer"}, {"prompt_until"}),
        ({"task": "generate", "over_long": "truncate"}, {"over_long"}),
        ({"task": "generate", "generation_marks": "check"}, {"generation_marks"}),
        ({"template_options": {"tokenize": True}}, {"template_options.tokenize"}),
    ],
)
def test_options_that_would_not_be_obeyed_are_refused(
    tmp_path: Path, options: dict[str, Any], places: set[str]
) -> None:
    assert refused(tmp_path, **options) == places


def test_unknown_options_and_values_are_refused(tmp_path: Path) -> None:
    for wrong in ({"max_len": 3}, {"held_out_share": 1.0}, {"epochs": 0}, {"split": "test"}):
        with pytest.raises(ValidationError):
            ChatJsonl.Config(path=tmp_path, tokenizer="x", **wrong)


def test_importing_the_sources_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, flowdflash.data.prompts;"
        "from flowdflash.stages import chat_jsonl, chat_parquet, hf_dataset, mix, synthetic_lengths, tokens;"
        "heavy = ('torch', 'transformers', 'tokenizers', 'zstandard', 'pyarrow', 'datasets');"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=110)
    assert done.stdout.strip() == "[]"


def test_on_bad_row_error_takes_a_turn_with_a_fault_for_a_bad_row(open_source: Callable[..., ChatJsonl]) -> None:
    opened = T_PLAIN.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
    rows = [say("a", "b", "c", "<think>\nhm</think>d")]
    assert open_source(rows, opened).summary()["samples_rejected"] == {
        "generation prompt is no prefix of the answer": 1
    }
    with pytest.raises(DataInvalid, match=r"rows\.jsonl:1: generation prompt is no prefix"):
        open_source(rows, opened, on_bad_row="error")


def test_rows_of_the_other_part_are_told_of(open_source: Callable[..., ChatJsonl]) -> None:
    source = open_source([say(f"q{n}", "a") for n in range(9)], split="train", held_out_rows=4)
    (line,) = source.report.lines  # type: ignore[attr-defined]
    assert line.startswith("rows.jsonl: 9 rows, 5 kept") and line.endswith("4 rows are in the other part of the split")


def test_file_that_is_written_to_while_it_is_read_is_no_data_of_its_key(
    tmp_path: Path, open_source: Callable[..., ChatJsonl], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [say("a", "b")] * 3)
    before = path.read_bytes()
    hashed = stored.store_key

    def written_to(*arguments: Any, **options: Any) -> str:
        key = hashed(*arguments, **options)
        path.write_bytes(before * 2)
        return key

    monkeypatch.setattr(stored, "store_key", written_to)
    with pytest.raises(DataInvalid, match="changed while it was read"):
        open_source(path)
    monkeypatch.undo()
    path.write_bytes(before)
    assert open_source(path).summary()["rows_read"] == 3


def test_file_in_a_folder_that_nobody_may_look_into_is_no_fault_of_a_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(self: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", denied)
    check = Check("corpus")
    stored.check_file(check, tmp_path / "rows.jsonl", "JSONL")
    (problem,) = check.problems
    assert (problem.path, "Permission denied" in problem.message) == ("path", True)


def test_switch_that_the_template_does_not_read_is_refused(open_source: Callable[..., ChatJsonl]) -> None:
    switched = "{% if thinking %}{{ style }}{% endif %}" + T_PLAIN
    with pytest.raises(ModelInvalid, match=r"does not read thinkng; it reads style, thinking$"):
        open_source([say("a", "b")], switched, template_options={"thinkng": False})
    with pytest.raises(ModelInvalid, match=r"does not read thinking; it reads none$"):
        open_source([say("a", "b")], template_options={"thinking": False})
    assert open_source([say("a", "b")], switched, template_options={"thinking": True, "style": "x"})


def test_file_that_is_only_touched_while_it_is_read_is_the_same(
    tmp_path: Path, open_source: Callable[..., ChatJsonl], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [say("a", "b")] * 3)
    hashed = stored.store_key

    def touched(*arguments: Any, **options: Any) -> str:
        key = hashed(*arguments, **options)
        os.utime(path, (1, 1))
        return key

    monkeypatch.setattr(stored, "store_key", touched)
    assert open_source(path).summary()["rows_read"] == 3


def test_tokenizer_of_a_model_knows_what_the_model_stops_at(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    for files, stops in (
        ({"config.json": {"eos_token_id": 259}}, ("<|endoftext|>",)),
        ({"generation_config.json": {"eos_token_id": [258, 5, 259]}}, ("<|im_end|>", "<|endoftext|>")),
        ({"generation_config.json": {}}, ("<|endoftext|>",)),
        ({"config.json": {}}, ()),
    ):
        for name, text in files.items():
            (tmp_path / name).write_text(json.dumps({"model_type": "qwen3", **text}))
        assert load_tokenizer(str(tmp_path), tmp_path).generation_stops == stops
