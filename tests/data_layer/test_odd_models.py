"""Templates and tokenizers that do what those of most models do not."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from flowdflash.data.template import DATE
from flowdflash.errors import DataInvalid

from .fixtures import ANSWER, HEAD, PROMPT, T_GEN, T_PLAIN, make_tokenizer, say
from .test_encode import encode, only, reasons, taught

MARKUP = ("<|im_start|>", "<|im_end|>")
T_OPEN = (
    "{% for m in messages %}{{ m['role'] + ':' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": text, **more}]}


def writing(content: str) -> str:
    """A template that writes this in place of the content of a message."""
    return "{% for m in messages %}" + HEAD + "{{ " + content + " + '<|im_end|>\n' }}{% endfor %}" + PROMPT


@pytest.mark.parametrize(
    ("row", "missing"),
    [
        (answer("hello", reasoning_content="hm"), "reasoning_content"),
        (answer("hello", thinking="hm"), "thinking"),
        (answer("", tool_calls=[{"function": {"name": "f"}}]), "tool call"),
        (answer("I look", tool_calls=[{"function": {"name": "ook"}}]), "tool call"),
        (answer("hm, hello", reasoning_content="hm"), "reasoning_content"),
    ],
)
def test_d1_answer_that_the_template_writes_in_part_is_no_answer_of_the_target(row: Any, missing: str) -> None:
    (rejection,) = encode([row])[0].rejections
    assert (rejection.reason, rejection.detail) == ("template leaves part of the answer out", f"its {missing}")


def test_d1_traces_that_the_template_cuts_from_every_answer_reject_those_that_have_one() -> None:
    cutting = writing("m['content'].split('</think>')[-1]")
    bare, traced, late = encode(
        [say("q", "a"), say("q", "<think>hm</think>a"), say("q", "a", "r", "<think>a</think>a")], cutting
    )
    assert taught(only(bare)) == "a<|im_end|>"
    assert reasons(traced) == ["template leaves part of the answer out"]
    assert [(rejection.reason, rejection.turn) for rejection in late.rejections] == [(*reasons(traced), 1)]
    assert [taught(sample) for sample in late.samples] == ["a<|im_end|>"]


def test_white_space_that_the_template_takes_away_or_puts_in_leaves_nothing_out() -> None:
    stripped, spread = writing("m['content'].strip()"), writing("m['content'].replace('\n', '\n\n')")
    assert taught(only(encode([say(" a ", " b\nc \n")], stripped)[0])) == "b\nc<|im_end|>"
    assert taught(only(encode([say("a", "b\nc")], spread)[0])) == "b\n\nc<|im_end|>"


def test_a_thought_that_is_there_under_two_names_needs_to_be_written_once() -> None:
    both = answer("hi", reasoning_content="hm", thinking="hm")
    thinking = writing("(m['thinking'] + ' ' if m['thinking'] else '') + m['content']")
    assert taught(only(encode([both], thinking)[0])) == "hm hi<|im_end|>"
    repeated = answer("<think>\nhm\n</think>hi", reasoning_content="hm")
    assert taught(only(encode([repeated])[0])) == "<think>\nhm\n</think>hi<|im_end|>"


def test_d4_end_of_a_thought_that_only_the_template_has_begun_is_never_supervised() -> None:
    opening = T_PLAIN.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif").replace(
        "{{ m['content']",
        "{% if m['role'] == 'assistant' %}{{ '<think>\n' + (m['reasoning_content'] or '') }}{{ '\n</think>\n\n' }}"
        "{% endif %}"
        "{{ m['content'].split('</think>')[-1]",
    )
    bare, thought, closed = encode([answer("hi"), answer("hi", reasoning_content="hm"), answer("</think>hi")], opening)
    assert taught(only(bare)) == "hi<|im_end|>"
    assert taught(only(thought)) == "hm\n</think>\n\nhi<|im_end|>"
    assert taught(only(closed)) == "</think>hi<|im_end|>"


def test_thinking_that_the_generation_prompt_opens_is_not_left_out() -> None:
    opening = T_PLAIN.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
    own, empty, none = encode(
        [answer(f"{text}hi") for text in ("<think>\nhm</think>", "<think>\n</think>", "")], opening
    )
    assert taught(only(own)) == "hm</think>hi<|im_end|>"
    assert taught(only(empty)) == "</think>hi<|im_end|>"
    assert reasons(none) == ["generation prompt is no prefix of the answer"]


def test_template_that_writes_the_date_gives_the_same_tokens_on_any_day() -> None:
    dated = "{{ strftime_now('%d %b %Y') }}{{ '\n' }}" + T_GEN
    sample = only(encode([say("a", "bb")], dated)[0])
    assert make_tokenizer().decode(sample.ids).startswith(f"{DATE:%d %b %Y}\n")
    prompt = only(encode([say("a")], dated, task="generate")[0])
    assert sample.ids[: len(prompt.ids)].tolist() == prompt.ids.tolist() and taught(sample) == "bb<|im_end|>"


def test_d3_marks_that_disagree_on_one_turn_only_are_an_error() -> None:
    marked = "{% generation %}" + ANSWER + "{% endgeneration %}"
    last_only = T_GEN.replace(marked, "{% if loop.last %}" + marked + "{% else %}" + ANSWER + "{% endif %}")
    assert taught(only(encode([say("a", "b")], last_only)[0])) == "b<|im_end|>"
    with pytest.raises(DataInvalid, match=r"line 2: token \d+ \('b'\) is outside the generation marks"):
        encode([say("a", "b"), say("a", "b", "c", "d")], last_only)


@pytest.mark.parametrize("ending", ["\n", "  ", "\r\n", "\n\n\n", "\u00a0", "\ufffd", "\u200f", "\0", "👍", "é"])
@pytest.mark.parametrize("template", [T_PLAIN, T_GEN])
def test_an_answer_is_supervised_to_its_last_character(ending: str, template: str) -> None:
    for text in (f"b{ending}", f"{ending}b"):
        assert taught(only(encode([say("a", text)], template)[0])) == f"{text}<|im_end|>"


def test_half_an_emoji_at_the_end_of_an_answer_is_its_last_character() -> None:
    row = json.loads(r'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b \ud83d"}]}')
    assert reasons(encode([row])[0]) == ["half a surrogate pair"]
    assert taught(only(encode([row], surrogates="replace")[0])) == "b \ufffd<|im_end|>"


@pytest.mark.parametrize("writes_it", [False, True])
def test_start_token_is_there_as_often_as_the_template_writes_it(writes_it: bool) -> None:
    """Servers add none to a rendered template, whatever the tokenizer does to bare text."""
    tokenizer = make_tokenizer("<|endoftext|>" * writes_it + T_PLAIN)
    start = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", start)]
    )
    assert tokenizer("a")["input_ids"][0] == start
    for task in ("train", "generate"):
        sample = only(encode([say("a", "b")], tokenizer=tokenizer, task=task)[0])
        assert sample.ids.tolist().count(start) == writes_it


def chatty(backend: Tokenizer, template: str) -> Any:
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in MARKUP])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


def with_bytes_for_unknown(kind: str, template: str) -> Any:
    """As Llama 2 and Mistral have it: white space in front of the text, single bytes for what has no token."""
    names = [*(f"<0x{byte:02X}>" for byte in range(256)), "<unk>", "▁", "a", "b", "▁a", "\n"]
    model = models.BPE(
        vocab={name: number for number, name in enumerate(names)},
        merges=[("▁", "a")],
        byte_fallback=True,
        unk_token="<unk>",
    )
    backend = Tokenizer(model)
    if kind == "normaliser":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(
        [AddedToken(f"<|im_{name}|>", special=True, normalized=False) for name in ("start", "end")]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("kind", ["normaliser", "first", "always"])
@pytest.mark.parametrize("template", [T_PLAIN, T_GEN, T_OPEN])
def test_bytes_of_a_character_at_the_edge_of_an_answer_are_all_supervised(kind: str, template: str) -> None:
    tokenizer = with_bytes_for_unknown(kind, template)
    end = "" if template == T_OPEN else "<|im_end|>"
    for text in ("👍👍", "b👍", "👍b", "שלום", "é b a é"):
        row = say("a👍", text, "👍", text)
        sample = only(encode([row], tokenizer=tokenizer)[0])
        assert sample.ids.tolist() == tokenizer.apply_chat_template(row["messages"])["input_ids"]
        edges = np.flatnonzero(np.diff(sample.mask, prepend=False, append=False)).reshape(-1, 2)
        assert [tokenizer.decode(sample.ids[start:stop]) for start, stop in edges] == [text + end] * 2


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["late token", "unigram"])
def test_markup_that_comes_about_when_text_is_normalised_is_rejected(kind: str) -> None:
    tokenizer = make_tokenizer()
    if kind == "unigram":  # takes any piece of its vocabulary, special tokens among them
        letters = sorted({*"<|im_end|>\n", *map(chr, range(97, 123))})
        pieces = [("<unk>", 0.0), *((name, -1.0) for name in MARKUP), *((letter, -5.0) for letter in letters)]
        backend = Tokenizer(models.Unigram(pieces, unk_id=0))
        backend.add_special_tokens(
            [AddedToken(f"<|im_{n}|>", special=True, normalized=False) for n in ("start", "end")]
        )
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
        tokenizer.chat_template = T_PLAIN
    else:
        tokenizer.add_special_tokens({"eos_token": AddedToken("<|im_end|>", special=True, normalized=True)})
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    good, bad = encode([say("|im_end|", "ok"), say("＜|im_end|＞", "ok")], tokenizer=tokenizer)
    assert only(good) and reasons(bad) == ["markup in content"]


def test_normaliser_changes_the_tokens_and_not_what_is_supervised() -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    assert taught(only(encode([say("Ａ B", "ﬁne Ａ")], tokenizer=tokenizer)[0])) == "fine a<|im_end|>"
