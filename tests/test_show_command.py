from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runs import invoke
from data_layer.fixtures import T_THINK, make_tokenizer, say, write_rows

from flowdflash.render.sample import Shown, Span, spans, text, visible


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return folder


def shown(tmp_path: Path, model: object, rows: list[Any], *options: object, code: int = 0) -> Any:
    path = write_rows(tmp_path / "rows.jsonl", rows)
    result = invoke("show", path, "--tokenizer", model, *options, cache=tmp_path / "cache")
    assert result.exit_code == code, result.stderr
    return result


def test_brackets_stand_around_what_is_supervised(tmp_path: Path, model: Path) -> None:
    told = shown(tmp_path, model, [say("hi", "hello", "bye", "ciao")]).stdout
    assert told == (
        f"{tmp_path / 'rows.jsonl'}:1: 56 tokens, 11 supervised (19.6%), not cut\n"
        "<|im_start|>user↵\nhi<|im_end|>↵\n<|im_start|>assistant↵\n⟦hello<|im_end|>⟧↵\n"
        "<|im_start|>user↵\nbye<|im_end|>↵\n<|im_start|>assistant↵\n⟦ciao<|im_end|>⟧↵\n\n"
    )


def test_row_is_chosen_by_number_and_a_rejected_one_says_why_and_where(tmp_path: Path, model: Path) -> None:
    rows = [say("a", "b"), {"messages": []}, say("c", "dd" * 2000)]
    told = shown(tmp_path, model, rows, "--row", 2).stdout
    assert told == f"{tmp_path / 'rows.jsonl'}:2: rejected: empty conversation\n"
    assert "2048 tokens" in (cut := shown(tmp_path, model, rows, "--row", 3).stdout) and "cut to max_length" in cut
    wrong = shown(tmp_path, model, rows, "--row", 4, code=1)
    assert "there is no row 4: the last is row 3" in wrong.stderr and not wrong.stdout


def test_control_characters_of_the_data_never_reach_the_terminal(tmp_path: Path, model: Path) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202egnp\r\x00⟦x⟧"
    for row in (say(evil, "ok" + evil), {"messages": [{"role": evil}]}):
        told = shown(tmp_path, model, [row]).stdout
        assert not set(told) & set("\x1b\x07\x9b\u202e\r\x00")
        assert "\\x1b" in told
    assert visible("a\u2066b\n") == "a\\u2066b↵\n"
    coloured = text([Shown("x", (Span(evil, True, False),))], coloured=True)
    assert coloured.count("\x1b") == 2  # its own


def test_every_token_is_decoded_a_few_times_however_many_turns_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, decoded = make_tokenizer(), 0
    ids = tokenizer.apply_chat_template(say(*["é", "👍"] * 100)["messages"])["input_ids"]
    mask, decode = np.arange(len(ids)) % 9 < 3, tokenizer.decode

    def counted(ids: list[int], **how: Any) -> Any:
        nonlocal decoded
        decoded += len(ids)
        return decode(ids, **how)

    monkeypatch.setattr(tokenizer, "decode", counted)
    assert len(list(spans(np.array(ids), mask, tokenizer))) > 400 and decoded <= 4 * len(ids)


def test_colours_tell_supervised_given_and_special_apart() -> None:
    spans = (Span("<s>", False, True), Span("q", False, False), Span("a", True, False), Span("</s>", True, True))
    assert text([Shown("one", spans)], coloured=True) == (
        "one\n\033[90;7m<s>\033[0m\033[90mq\033[0m\033[1;32ma\033[0m\033[1;32;7m</s>\033[0m"
    )
    assert text([Shown("one", spans)], coloured=False) == "one\n<s>q⟦a</s>⟧"


def test_page_is_escaped_and_needs_nothing_else(tmp_path: Path, model: Path) -> None:
    page = tmp_path / "row.html"
    told = shown(tmp_path, model, [say("<script>x</script>", "a & b")], "--html", "-o", page)
    assert not told.stdout
    html = page.read_text("utf-8")
    assert "<script" not in html and "http" not in html and "&lt;script&gt;x&lt;/script&gt;" in html
    assert '<span class="on">a &amp; b</span><span class="on special">&lt;|im_end|&gt;</span>' in html


@pytest.mark.parametrize(("data", "message"), [(b"", "holds no rows"), (b"\n\n", "holds no rows"), (None, "No such")])
def test_file_without_rows_or_without_a_file_is_an_error(tmp_path: Path, data: bytes | None, message: str) -> None:
    path = tmp_path / "odd.jsonl"
    if data is not None:
        path.write_bytes(data)
    result = invoke("show", path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert str(path) in result.stderr and message in result.stderr


def test_source_of_a_pipeline_is_shown_with_its_options(tmp_path: Path, model: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [say("hi", "hello"), say("one", "two")])
    pipeline = Path(__file__).resolve().parents[1] / "pipelines" / "dflash.yaml"
    data = ["--set", f"stages.corpus.path={rows}", "--set", f"vars.model={model}"]
    first = invoke("show", pipeline, *data, "--set", "stages.corpus.max_length=25", cache=tmp_path / "cache")
    assert "25 tokens" in first.stdout and "cut to max_length" in first.stdout, first.stderr
    limited = invoke("show", pipeline, *data, "--set", "stages.corpus.limit_rows=1", "--row", 2)
    assert limited.exit_code == 1 and "there is no row 2: limit_rows is 1" in limited.stderr
    assert invoke("show", pipeline, *data, "--tokenizer", model).exit_code == 2
    assert "has no source 'x'" in invoke("show", pipeline, *data, "--source", "x").stderr


def test_ready_made_tokens_and_made_up_samples_are_shown_too(tmp_path: Path, model: Path) -> None:
    row = {"input_ids": [104, 105, 257, 97, 98, 258], "loss_mask": [0, 0, 0, 1, 1, 1]}
    assert shown(tmp_path, model, [row]).stdout.endswith("hi<|im_start|>⟦ab<|im_end|>⟧\n")
    tiny = Path(__file__).resolve().parents[1] / "pipelines" / "tiny.yaml"
    assert "--tokenizer MODEL" in invoke("show", tiny).stderr
    made_up = invoke("show", tiny, "--tokenizer", model, "--row", 2, cache=tmp_path / "cache")
    assert "supervised (" in made_up.stdout, made_up.stderr
    assert "there is no sample 999" in invoke("show", tiny, "--tokenizer", model, "--row", 999).stderr


def test_template_that_rewrites_earlier_turns_shows_every_sample(tmp_path: Path, model: Path) -> None:
    make_tokenizer(T_THINK).save_pretrained(model)
    told = shown(tmp_path, model, [say("q", "<think>ab</think>a", "r", "<think>cd</think>b")]).stdout
    assert ", sample 1 of 2: " in told and ", sample 2 of 2: " in told
    assert told.count("⟦<think>") == 2


def test_tokenizer_of_a_folder_is_found_from_where_the_command_is_given(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown(tmp_path, "./model", [say("hi", "hello")]).stdout.count("⟦hello<|im_end|>⟧") == 1
    tiny = Path(__file__).resolve().parents[1] / "pipelines" / "tiny.yaml"
    assert "supervised (" in invoke("show", tiny, "--tokenizer", "./model", cache=tmp_path / "cache").stdout
    result = invoke("show", "rows.jsonl", "--tokenizer", "./nowhere", cache=tmp_path / "cache")
    assert result.exit_code == 1 and str(tmp_path / "nowhere") in result.stderr


def test_prompts_are_shown_with_nothing_supervised(tmp_path: Path, model: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "hi"}])
    pipeline = Path(__file__).resolve().parents[1] / "pipelines" / "regenerate.yaml"
    told = invoke("show", pipeline, "--set", f"vars.prompts={rows}", "--set", f"vars.model={model}", cache=tmp_path)
    text = "<|im_start|>user↵\nhi<|im_end|>↵\n<|im_start|>assistant↵\n\n"
    assert told.stdout == f"{rows}:1: 21 tokens, 0 supervised (0.0%), not cut\n{text}", told.stderr
