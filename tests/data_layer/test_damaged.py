"""Every file of ``tests/data/damaged`` ends in samples with complete accounts, or in one clear error."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flowdflash.errors import DataInvalid
from flowdflash.stage import Check, OpenContext
from flowdflash.stages.chat_jsonl import ChatJsonl
from flowdflash.stages.chat_parquet import ChatParquet
from flowdflash.stages.tokens import Tokens

from .fixtures import T_TOOLS, make_tokenizer

FOLDER = Path(__file__).parents[1] / "data" / "damaged"
Reasons = dict[str, int]

# Rows kept, and rows rejected by reason.
SAMPLES: dict[str, tuple[int, Reasons]] = {
    "blank_lines_and_crlf.jsonl": (6, {}),
    "byte_order_marks.jsonl": (3, {}),
    "cut.jsonl.gz": (19, {"truncated last line": 1}),
    "cut.jsonl.zst": (3, {"truncated last line": 1}),
    "cut_before_the_checksum.jsonl.gz": (3, {"truncated last line": 1}),
    "cut_in_a_character.jsonl": (3, {"truncated last line": 1}),
    "cut_in_a_string.jsonl": (3, {"truncated last line": 1}),
    "deep_nesting.jsonl": (1, {"JSON nested too deeply": 2, "empty conversation": 1}),
    "duplicate_keys.jsonl": (1, {"key twice in an object": 2}),
    "empty_conversations.jsonl": (
        1,
        {
            "empty conversation": 1,
            "system prompt only": 1,
            "no assistant turn": 1,
            "empty assistant message": 1,
            "empty user message": 1,
            "blank assistant message": 1,
            "`messages` is null": 1,
            "no `messages` or `conversations`": 1,
            "conversation is not a list": 1,
        },
    ),
    "huge_lines.jsonl.gz": (1, {"no supervised token after truncation": 1, "not JSON": 1}),
    "image_parts.jsonl": (1, {"content part is not text": 2, "content is not text": 2}),
    "latin1.jsonl": (2, {"not UTF-8": 1}),
    "latin1.parquet": (2, {"not UTF-8": 1}),
    "mixed_dialects.jsonl": (
        4,
        {
            "both `messages` and `conversations`": 1,
            "both `role` and `from`": 1,
            "both `content` and `value`": 1,
            "unknown role": 1,
            "conversation is not a list": 1,
            "message is not an object": 1,
        },
    ),
    "mixed_rows.parquet": (
        3,
        {
            "`conversations` is null": 1,
            "empty conversation": 1,
            "empty assistant message": 1,
            "both `role` and `from`": 1,
            "opens with an assistant turn": 1,
        },
    ),
    "no_final_newline.jsonl": (1, {}),
    "no_gzip.jsonl.gz": (3, {}),
    "no_objects.jsonl": (1, {"row is not an object": 5, "conversation is not a list": 1}),
    "not_a_number.jsonl": (1, {"not JSON": 3}),
    "nul_bytes.jsonl": (3, {"not JSON": 2}),
    "null_content.jsonl": (3, {"empty user message": 2, "empty assistant message": 1}),
    "role_disorder.jsonl": (
        3,
        {
            "two user turns in a row": 1,
            "opens with an assistant turn": 1,
            "ends without an answer": 1,
            "two assistant turns in a row": 1,
            "system prompt in the middle": 1,
            "tool result without a call": 1,
            "two system prompts": 1,
        },
    ),
    "surrogates.jsonl": (2, {"half a surrogate pair": 2}),
    "tokens.jsonl": (
        3,
        {
            "`input_ids` and `loss_mask` differ in length": 1,
            "no tokens": 1,
            "`loss_mask` holds more than 0 and 1": 1,
            "`loss_mask` is not a list of whole numbers": 1,
            "token id outside the vocabulary": 3,
            "`input_ids` is not a list of whole numbers": 4,
            "no `loss_mask`": 1,
            "no `input_ids`": 1,
            "row is not an object": 1,
            "no supervised token": 1,
            "fewer than two supervised tokens in a row": 1,
        },
    ),
    "tokens_cut.jsonl.gz": (244, {"truncated last line": 1}),
    "too_long.jsonl": (2, {"no supervised token after truncation": 2}),
    "tool_calls.jsonl": (
        2,
        {
            "tool call arguments are not JSON": 2,
            "tool call arguments are not an object": 1,
            "tool call without a name": 1,
            "tool calls are not a list": 1,
            "tool call without a result": 1,
            "`tools` is not JSON": 1,
            "`tools` is not a list of objects": 1,
            "`function_call` is not supported": 1,
            "tool call outside an assistant turn": 1,
        },
    ),
    "two_members.jsonl.gz": (5, {}),
    "two_values_on_a_line.jsonl": (1, {"not JSON": 1}),
    "typed_markup.jsonl": (1, {"markup in content": 2}),
    "weights_and_traces.jsonl": (
        2,
        {
            "no answer is to be learnt": 1,
            "`weight` of an answer says neither yes nor no": 1,
            "template leaves part of the answer out": 1,
            "`thinking` is not text": 1,
            "both `reasoning_content` and `reasoning`": 1,
            "`tool_call_id` is not text": 1,
            "`system` is not text": 1,
            "no assistant turn": 1,
        },
    ),
}

# What the error says behind the name of the file.
ERRORS = {
    "array.json": "this is a JSON array; write one object a line",
    "array_on_a_line.json": "this is a JSON array; write one object a line",
    "bytes.parquet": "no usable row among 3 (unknown role 3)",
    "carriage_returns.jsonl": "no usable row among 1 (not JSON 1); the first: .*save the file with LF",
    "cut_footer.parquet": "cannot be read as Parquet: ",
    "damaged_pages.parquet": "cannot be read as Parquet: ",
    "flipped_bits.jsonl.gz": "damaged compressed data: ",
    "garbage_at_the_end.jsonl.gz": "damaged compressed data: ",
    "jsonl.parquet": "this is no Parquet file; the source chat_jsonl reads JSONL",
    "no_answer_to_learn.jsonl": "no usable row among 2 (no assistant turn 2)",
    "no_conversations.parquet": "no usable row among 1 (no assistant turn 1); .*answers are read from `messages`",
    "no_rows.parquet": "the file holds no rows",
    "nothing.jsonl": "the file holds no rows",
    "only_newlines.jsonl": "the file holds no rows",
    "only_too_long.jsonl": "no usable row among 3 (no supervised token after truncation 3)",
    "other_dialects_only.jsonl": "no usable row among 3 (no `messages` or `conversations` 2, no assistant turn 1)",
    "pointer.jsonl": "this is a pointer to a file in Git LFS; fetch the file itself: git lfs pull",
    "parquet.jsonl": "this is a Parquet file and not JSONL; the source chat_parquet reads it",
    "several_lines.json": "a JSON object over several lines; write one object a line",
    "text.parquet": "no usable row among 2 (conversation is not a list 2)",
    "tokens_all_supervised.jsonl": "every token is supervised",
    "tokens_of_chat.jsonl": "no usable row among 3 (no `input_ids` 3)",
    "utf16.jsonl": "this is UTF-16 text; save it as UTF-8",
    "utf16_without_mark.jsonl": "this is UTF-16 text; save it as UTF-8",
    "wrong_checksum.jsonl.zst": "damaged compressed data: ",
    "xz.jsonl": "this is an xz file; unpack it, or pack it with gzip or zstd",
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, and the cache of all files: as one user has one cache."""
    folder = tmp_path_factory.mktemp("damaged")
    make_tokenizer(T_TOOLS).save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    return folder


def opened(shared: Path, run_dir: Path, name: str, **options: Any) -> ChatJsonl | ChatParquet | Tokens:
    source = ChatParquet if name.endswith(".parquet") else Tokens if name.startswith("tokens") else ChatJsonl
    if source is ChatParquet:
        pytest.importorskip("pyarrow")
    config = source.Config(path=FOLDER / name, tokenizer=str(shared / "model"), max_length=256, **options)
    stage: ChatJsonl | ChatParquet | Tokens = source(config)
    check = Check("corpus")
    stage.check(check)
    assert not check.problems
    stage.open(OpenContext("corpus", run_dir, shared / "cache"))
    return stage


def rejects(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "corpus" / "rejects.jsonl").read_text("ascii").splitlines()]


def test_every_file_has_an_outcome_stated_here() -> None:
    assert len(SAMPLES | ERRORS) == len(SAMPLES) + len(ERRORS) >= 30
    assert {path.name for path in FOLDER.iterdir()} == set(SAMPLES | ERRORS)


@pytest.mark.parametrize("name", SAMPLES)
def test_damaged_file_gives_its_good_rows_and_complete_accounts(shared: Path, tmp_path: Path, name: str) -> None:
    kept, reasons = SAMPLES[name]
    source = opened(shared, tmp_path, name)
    summary = source.summary()
    assert (summary["rows_kept"], summary["rejected"]) == (kept, reasons)
    assert summary["rows_read"] == kept + sum(reasons.values()) == kept + summary["rows_rejected"]
    entries = rejects(tmp_path)
    assert Counter(entry["reason"] for entry in entries) == reasons
    assert all(entry["file"] == str(FOLDER / name) and entry["line"] > 0 and "row" in entry for entry in entries)
    (table,) = source.epochs()
    assert len(table) == summary["samples"] == kept
    places = {source.describe(n) for n in table.ids.tolist()} | {f"{e['file']}:{e['line']}" for e in entries}
    assert len(places) == summary["rows_read"]  # no line both kept and rejected, none twice
    for n in table.ids.tolist():
        ids, mask = source.tokens(n)
        assert len(ids) == len(mask) == table.lengths[n] and mask.sum() == table.supervised[n] >= 2


@pytest.mark.parametrize("name", [name for name, (_, reasons) in SAMPLES.items() if reasons])
def test_with_on_bad_row_error_the_first_bad_row_is_named(shared: Path, tmp_path: Path, name: str) -> None:
    if name == "too_long.jsonl":
        assert opened(shared, tmp_path, name, on_bad_row="error").summary()["rows_kept"] == 2  # long is not bad
        return
    with pytest.raises(DataInvalid) as caught:
        opened(shared, tmp_path, name, on_bad_row="error")
    first = next(entry for entry in rejects(tmp_path) if "truncation" not in entry["reason"])
    assert str(caught.value).startswith(f"{FOLDER / name}:{first['line']}: {first['reason']}")


@pytest.mark.parametrize("name", ERRORS)
def test_file_that_gives_nothing_is_one_clear_error(shared: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(DataInvalid) as caught:
        opened(shared, tmp_path, name)
    pattern = ".*".join(map(re.escape, ERRORS[name].split(".*")))
    assert re.match(re.escape(f"{FOLDER / name}: ") + pattern, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)
    if found := re.search(r"no usable row among (\d+)", str(caught.value)):
        assert len(rejects(tmp_path)) == int(found[1])
