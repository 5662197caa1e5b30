from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowdflash.data.prompts import load_prompts
from flowdflash.errors import DataInvalid
from flowdflash.stages.chat_jsonl import ChatJsonl

from .fixtures import HEAD, PROMPT, T_EMPTY_THINK, make_tokenizer, say, write_rows


def test_prompts_are_what_serving_would_tokenise(tmp_path: Path, tokenizer: Any) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [say("hi", "hello", system="s"), {"messages": []}, say("é?")])
    told: list[str] = []
    first, second = load_prompts(path, tokenizer, warn=told.append)
    assert told == [f"{path}: rows passed over: empty conversation 1"]
    assert load_prompts(path, tokenizer, limit=1, warn=told.append)[0].text == "hi" and len(told) == 1
    assert (
        first.input_ids.tolist()
        == (tokenizer.apply_chat_template(list(first.messages), add_generation_prompt=True)["input_ids"])
    )
    assert (first.text, first.place, second.text, second.place) == ("hi", f"{path}:1", "é?", f"{path}:3")
    assert [message["role"] for message in first.messages] == ["system", "user"]


def test_limit_and_length_are_obeyed(tmp_path: Path, tokenizer: Any) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [say("q" * n, "a") for n in range(1, 101)])
    assert [prompt.text for prompt in load_prompts(path, tokenizer, limit=3)] == ["q", "qq", "qqq"]
    assert len(load_prompts(path, tokenizer, max_prompt_tokens=39)) == 20
    with pytest.raises(DataInvalid, match=r"no usable prompt \(longer than max_length 100\)"):
        load_prompts(path, tokenizer, max_prompt_tokens=5)


def test_template_options_reach_the_rendering(tmp_path: Path, tokenizer: Any) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [say("a", "b", "c", "d")])
    tokenizer.chat_template += "{{ mode }}"
    (prompt,) = load_prompts(path, tokenizer, template_options={"mode": "quick"})
    assert tokenizer.decode(prompt.input_ids).endswith("quick")


def test_an_answer_comes_with_all_that_stands_before_it(tmp_path: Path, tokenizer: Any) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [say("a", "bbbb", "c", "dd"), say("a"), {"prompt": "a"}])
    end = tokenizer.eos_token_id
    prompts = load_prompts(path, tokenizer, answer_tokens=9)
    assert prompts[0].answered is not None and prompts[1].answered is None is prompts[2].answered
    ids, start = prompts[0].answered
    assert ids[:start].tolist() == prompts[0].input_ids.tolist()
    assert ids[start:].tolist() == [*b"bbbb", end]
    (prompt, *_) = load_prompts(path, tokenizer, answer_tokens=3)
    assert prompt.answered is not None and prompt.answered[0][prompt.answered[1] :].tolist() == [*b"bbb"]
    assert all(prompt.answered is None for prompt in load_prompts(path, tokenizer))
    assert prompts[1].input_ids.tolist() == prompts[2].input_ids.tolist(), "a bare prompt is a question"


def test_text_file_has_a_prompt_a_line_whatever_else_is_in_it(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffone\r\n\ntwo\u2028lines\n".encode())
    prompts = load_prompts(path, tokenizer)
    told = [(prompt.text, prompt.place) for prompt in prompts]
    assert told == [("one", f"{path}:1"), ("two\u2028lines", f"{path}:3")]


def test_faults_of_a_text_file_are_those_of_any_file(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(gzip.compress(b"[one]\ncaf\xe9\n{two\n"))
    assert [(prompt.text, prompt.place) for prompt in load_prompts(path, tokenizer)] == [
        ("[one]", f"{path}:1"),
        ("{two", f"{path}:3"),
    ]
    path.write_bytes("one".encode("utf-16"))
    with pytest.raises(DataInvalid, match="UTF-16"):
        load_prompts(path, tokenizer)


def test_parquet_is_told_by_its_leading_bytes_and_its_prompts_are_read(tmp_path: Path, tokenizer: Any) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": "one"}, {"prompt": None}, say("two", "2")]
    for name in ("rows.jsonl", "rows"):
        parquet.write_table(
            arrow.Table.from_pylist([{"prompt": None, "messages": None, **row} for row in rows]), tmp_path / name
        )
        assert [prompt.text for prompt in load_prompts(tmp_path / name, tokenizer)] == ["one", "two"]
    path = write_rows(tmp_path / "rows.parquet", rows)
    assert [prompt.text for prompt in load_prompts(path, tokenizer)] == ["one", "two"]


def test_a_source_reads_bare_prompts_as_every_reader_does(
    tmp_path: Path, tokenizer: Any, open_source: Callable[..., ChatJsonl]
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "hi", "n": 3}, {"prompt": "a", **say("b", "c")}])
    source = open_source(path, task="generate")
    loaded = load_prompts(path, tokenizer)
    assert [source.tokens(n)[0].tolist() for n in (0, 1)] == [prompt.input_ids.tolist() for prompt in loaded]
    assert source.row(0) == {"prompt": "hi", "n": 3, "messages": [{"role": "user", "content": "hi"}]}


def test_answer_of_another_turn_is_never_taken_for_one_that_was_left_out(tmp_path: Path) -> None:
    earlier = "m['role'] == 'assistant' and not loop.last"
    turn = "{{ m['content'] | upper if " + earlier + " else m['content'] }}"
    tokenizer = make_tokenizer("{% for m in messages %}" + HEAD + turn + "{% endfor %}" + PROMPT)
    rows = [say("a", "b", "c", "dd"), say("a", "bb", "c", "dd")]  # one token without an end token teaches nothing
    left_out, kept = load_prompts(write_rows(tmp_path / "rows.jsonl", rows), tokenizer, answer_tokens=20)
    assert left_out.answered is None and kept.answered is not None


def test_an_answer_to_a_later_question_is_not_taken_for_that_to_the_prompt(tmp_path: Path, tokenizer: Any) -> None:
    row = say("a", "somebody's", "c", "own")
    row["messages"][1]["weight"] = 0
    thinking = make_tokenizer(T_EMPTY_THINK)
    path = write_rows(tmp_path / "rows.jsonl", [row, say("a", "bb")])
    for each in (tokenizer, thinking):
        other, own = load_prompts(path, each, answer_tokens=9)
        assert other.answered is None and own.answered is not None
        ids, start = own.answered
        assert ids[: len(own.input_ids)].tolist() == own.input_ids.tolist() and ids[start:].tolist()[:2] == [*b"bb"]
