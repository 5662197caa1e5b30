"""Templates that render a finished answer otherwise than the prompt that is served: the sample is what is served."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from flowdflash.data.encode import ChatEncoder, EncodeOptions, RowResult, Sample
from flowdflash.data.rows import Row
from flowdflash.errors import DataInvalid

from .fixtures import ANSWER, HEAD, PROMPT, T_GEN, T_PLAIN, make_tokenizer, say
from .test_encode import encode, only, reasons, taught

LOOP, END = "{% for m in messages %}", "{% endfor %}"
ASSISTANT = "m['role'] == 'assistant'"
# The system prompt stands in the last question, as long as that is the last message; no header for answers.
T_MOVES = (
    LOOP
    + "{% if m['role'] == 'user' %}<|im_start|>{% if loop.last and messages[0]['role'] == 'system' %}"
    + "{{ messages[0]['content'] + '\n\n' }}{% endif %}{{ m['content'] + '<|pad|>' }}"
    + "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + '<|im_end|>' }}{% endif %}"
    + END
)
# A call's thought goes as soon as a final answer follows; every message names its channel.
T_CHANNELS = (
    LOOP
    + "{% set final = messages[-1]['role'] == 'assistant' and not messages[-1]['tool_calls'] %}"
    + "{% if m['role'] == 'assistant' %}"
    + "{% if m['thinking'] and (loop.last or not final) %}"
    + "{{ '<|im_start|>assistant<|pad|>analysis\n' + m['thinking'] + '<|endoftext|>' }}{% endif %}"
    + "{% for c in m['tool_calls'] or [] %}"
    + "{{ '<|im_start|>assistant<|pad|>call\n' + c['function']['name'] + '<|im_end|>' }}{% endfor %}"
    + "{% if m['content'] %}{{ '<|im_start|>assistant<|pad|>final\n' + m['content'] + '<|im_end|>' }}{% endif %}"
    + "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|endoftext|>' }}{% endif %}"
    + END
    + "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
# The prompt begins a thought; a finished answer is written as it is, or without its thought.
T_OPENS = T_PLAIN.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
T_OPENS_AND_CUTS = T_OPENS.replace("{{ m['content'] +", "{{ m['content'].split('</think>')[-1].strip() +")
# The prompt says that there is no thought, the finished answer says nothing of it.
T_CLOSES_CHANNEL = T_PLAIN.replace("assistant\n' }}{% endif", "assistant\n<|pad|>thought\n<|mask|>' }}{% endif")
T_CLOSES = T_PLAIN.replace("assistant\n' }}{% endif", "assistant\n<thought>\n</thought>' }}{% endif")
POSTAMBLE = "<|im_start|>system\nAnswer with a list of actions, or, if there is nothing to do, with words.<|im_end|>\n"
# Something follows the last message, whoever wrote it; a call has no end-of-turn token.
T_POSTAMBLE = (
    LOOP
    + HEAD
    + "{{ m['content'] }}"
    + "{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] }}{% else %}<|im_end|>{% endfor %}"
    + "{{ '\n' }}"
    + END
    + POSTAMBLE
    + PROMPT
)
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {"n": 1}}}]}


def writing(expression: str) -> str:
    return LOOP + HEAD + "{{ " + expression + " + '<|im_end|>\n' }}" + END + PROMPT


def answers(*turns: str, **more: Any) -> dict[str, Any]:
    row = say(*turns)
    row["messages"][-1].update(more)
    return row


def called(thought: str = "first", **final: Any) -> dict[str, Any]:
    """A question, a call with a thought, its result, and an answer."""
    call = {**CALL, "thinking": thought} if thought else CALL
    result = {"role": "tool", "content": "seen"}
    final = {"role": "assistant", "content": "so", **final}
    return {"messages": [{"role": "user", "content": "q"}, call, result, final]}


def served(row: dict[str, Any], template: str, end: int) -> list[int]:
    """The tokens that serving hands to the target before the message at ``end``."""
    tokenizer = make_tokenizer(template)
    ids = tokenizer.apply_chat_template(row["messages"][:end], add_generation_prompt=True)["input_ids"]
    return list(ids)


def check_samples(result: RowResult, row: dict[str, Any], template: str, taught_texts: list[str]) -> None:
    """One sample per answer: the prompt as it is served, nothing of it supervised, and then what the target writes."""
    ends = [n for n, message in enumerate(row["messages"]) if message["role"] == "assistant"]
    assert [taught(sample) for sample in result.samples] == taught_texts
    for sample in result.samples:
        prompt = served(row, template, ends[max(sample.turn, 0)])
        assert sample.ids[: len(prompt)].tolist() == prompt
        assert not sample.mask[: len(prompt)].any() and sample.mask[len(prompt)]


def test_a_system_prompt_that_the_template_moves_stands_where_it_is_served() -> None:
    row = say("hi", "hello", "bye", "ciao", system="be kind")
    (result,) = encode([row], T_MOVES)
    check_samples(result, row, T_MOVES, [" hello<|im_end|>", " ciao<|im_end|>"])
    assert only(encode([say("hi", "hello", "bye", "ciao")], T_MOVES)[0]).turn == -1


def test_a_thought_that_goes_when_a_final_answer_follows_is_in_the_prompt_as_it_is_served() -> None:
    row = called(thinking="then")
    (result,) = encode([row], T_CHANNELS)
    first = "<|pad|>analysis\nfirst<|endoftext|><|im_start|>assistant<|pad|>call\nlook<|im_end|>"
    second = "<|pad|>analysis\nthen<|endoftext|><|im_start|>assistant<|pad|>final\nso<|im_end|>"
    check_samples(result, row, T_CHANNELS, [first, second])
    (result,) = encode([called()], T_CHANNELS)
    check_samples(result, called(), T_CHANNELS, [first, "<|pad|>final\nso<|im_end|>"])


def test_a_header_is_not_taken_for_an_earlier_one() -> None:
    headless = T_PLAIN.replace(HEAD, "{% if m['content'] != 'so' %}" + HEAD + "{% endif %}")
    for row in (say("q", "a", "r", "so"), say("q", "so")):
        (result,) = encode([row], headless)
        last = result.rejections[-1]
        assert (last.reason, last.turn) == (
            "generation prompt is no prefix of the answer",
            len(row["messages"]) // 2 - 1,
        )
        assert [taught(sample) for sample in result.samples] == ["a<|im_end|>"] * (len(row["messages"]) // 2 - 1)


@pytest.mark.parametrize("template", [T_OPENS, T_OPENS_AND_CUTS])
@pytest.mark.parametrize("opening", ["", "<think>\n", "<think>"])
def test_an_answer_goes_on_with_the_thought_that_its_prompt_begins(template: str, opening: str) -> None:
    row = say("hi", f"{opening}hm\n</think>\n\nhello", "bye", f"{opening}er</think>ciao ")
    texts = ["hm\n</think>\n\nhello<|im_end|>", f"er</think>ciao{' ' * (template == T_OPENS)}<|im_end|>"]
    (result,) = encode([row], template)
    if template == T_OPENS and opening.endswith("\n"):  # then prompt and answer are one text
        assert taught(only(result)) == " ".join(texts)
    else:
        check_samples(result, row, template, texts)


@pytest.mark.parametrize("template", [T_OPENS, T_OPENS_AND_CUTS])
def test_an_answer_that_was_cut_off_in_its_thought_ends_there(template: str) -> None:
    row = {**say("hi", "so let me"), "finish_reason": "length"}
    (result,) = encode([row], template)
    check_samples(result, row, template, ["so let me"])


T_THINKS = writing(
    f"('<think>\n\n</think>\n\n' if {ASSISTANT} and '</think>' not in m['content'] else '') + m['content']"
)
T_THINKS_AND_OPENS = T_THINKS.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")


@pytest.mark.parametrize("template", [T_THINKS, T_THINKS_AND_OPENS, T_OPENS, T_OPENS_AND_CUTS, T_CLOSES])
@pytest.mark.parametrize("content", ["<think>\nOkay, so the", "<think>\nOkay.\n</think>\n\nBecause of"])
def test_a_thought_that_was_cut_off_is_as_it_was_generated(template: str, content: str) -> None:
    row = {**say("hi", content), "finish_reason": "length"}
    prompt = make_tokenizer().decode(served(row, template, 1))
    if "</think>" not in content:
        assert reasons(encode([say("hi", content)], template)[0]) == ["thought without an end"]
    check_samples(
        encode([row], template)[0], row, template, [content.removeprefix("<think>\n" * prompt.endswith("<think>\n"))]
    )


@pytest.mark.parametrize("content", ["hello", "</think>", "hm</think>  "])
def test_an_answer_without_the_thought_that_its_prompt_begins_is_rejected(content: str) -> None:
    assert reasons(encode([say("hi", content)], T_OPENS)[0]) == ["generation prompt is no prefix of the answer"]


def test_an_answer_inside_the_thought_that_template_and_prompt_begin_is_rejected() -> None:
    inside = T_OPENS.replace("{{ m['content'] +", "{{ ('<think>\n' if " + ASSISTANT + " else '') + m['content'] +")
    bare, twice = encode([say("hi", "hello"), say("hi", "<think>\nhm</think>hello")], inside)
    assert reasons(bare) == ["no thought where the generation prompt begins one"]
    assert taught(only(twice)) == "hm</think>hello<|im_end|>", "the template and the message both begin it"


def test_an_empty_thought_of_the_template_before_the_own_one_is_not_supervised() -> None:
    both = T_PLAIN.replace("{{ m['content'] +", "{{ ('<think></think>' if " + ASSISTANT + " else '') + m['content'] +")
    own, none = encode([say("hi", "<think>hm</think>hello"), say("hi", "hello")], both)
    assert taught(only(own)) == "<think>hm</think>hello<|im_end|>"
    assert taught(only(none)) == "hello<|im_end|>"


def test_an_answer_that_begins_with_blanks_keeps_them_behind_an_empty_thought() -> None:
    empty = T_PLAIN.replace(
        "{{ m['content'] +", "{{ ('<think>\n\n</think>\n\n' if " + ASSISTANT + " else '') + m['content'] +"
    )
    for content, expected in (("    x = 1", "    x = 1"), (" \n  y", "  y"), ("\nz", "z"), ("\t", "")):
        result = encode([say("hi", content)], empty)[0]
        assert [taught(sample) for sample in result.samples] == ([f"{expected}<|im_end|>"] if expected else [])


@pytest.mark.parametrize("template", [T_CLOSES, T_CLOSES_CHANNEL])
def test_a_prompt_that_says_that_there_is_no_thought_is_served_so(template: str) -> None:
    row = say("hi", "hello", "bye", "ciao")
    result, thinking = encode([row, say("hi", "<think>hm</think>hello")], template)
    check_samples(result, row, template, ["hello<|im_end|>", "ciao<|im_end|>"])
    assert reasons(thinking) == ["generation prompt is no prefix of the answer"]


def test_a_short_answer_is_not_looked_for_in_the_name_of_a_special_token() -> None:
    spaced = T_OPENS_AND_CUTS.replace("<think>\n' }}{% endif", "<think>\n\n' }}{% endif")
    row = say("hi", "<think>\nhm</think>d")
    check_samples(encode([row], spaced)[0], row, spaced, ["hm</think>d<|im_end|>"])


def test_an_answer_that_brings_the_mark_along_that_the_template_writes_behind_it_is_rejected() -> None:
    twice = T_PLAIN.replace("<|im_end|>", "<|END|><|im_end|>")
    good, bad = encode([say("hi", "<|END|> hello"), say("hi", "hello<|END|>\n")], twice)
    assert taught(only(good)) == "<|END|> hello<|END|><|im_end|>"
    assert reasons(bad) == ["markup in content"]


def test_what_follows_every_last_message_is_never_supervised() -> None:
    row = {"messages": [{"role": "user", "content": "q"}, CALL]}
    plain, call = encode([say("hi", "hello"), row], T_POSTAMBLE)
    check_samples(plain, say("hi", "hello"), T_POSTAMBLE, ["hello<|im_end|>"])
    assert reasons(call) == ["generation prompt is no prefix of the answer"]


def test_one_answer_that_cannot_be_used_leaves_the_others() -> None:
    row = say("hi", "hello", "bye", "<think>hm</think>ciao", "so", "long")
    (result,) = encode([row], T_OPENS)
    assert [(sample.turn, taught(sample)) for sample in result.samples] == [(1, "hm</think>ciao<|im_end|>")]
    assert [(rejection.turn, rejection.reason) for rejection in result.rejections] == [
        (0, "generation prompt is no prefix of the answer"),
        (2, "generation prompt is no prefix of the answer"),
    ]


def test_text_behind_the_last_end_of_turn_token_does_not_cut_a_row_up() -> None:
    closing = T_PLAIN.replace(END, END + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}")
    sample = only(encode([say("hi", "hello", "bye", "ciao")], closing)[0])
    assert (sample.turn, taught(sample)) == (-1, "hello<|im_end|> ciao<|im_end|>")


@pytest.mark.parametrize("given", ["thinking", "reasoning_content", "reasoning"])
@pytest.mark.parametrize("read", ["m.thinking", "m['reasoning_content']"])
def test_a_thought_reaches_the_template_under_the_name_that_it_reads(given: str, read: str) -> None:
    template = writing(f"({read} + ' ' if {read} else '') + m['content']")
    assert taught(only(encode([answers("q", "a", **{given: "hm"})], template)[0])) == "hm a<|im_end|>"


@pytest.mark.parametrize("arguments", [{"b": "é"}, '{"b":"\\u00e9"}'])
@pytest.mark.parametrize("form", ["c['arguments']", "c['arguments'] | string", "c['arguments'] | tojson"])
def test_arguments_of_calls_are_written_as_json_by_every_template(arguments: Any, form: str) -> None:
    calls = (
        "{% for m in messages %}"
        + HEAD
        + "{{ m['content'] }}{% for t in m['tool_calls'] or [] %}{% set c = t['function'] %}"
    )
    template = calls + "{{ c['name'] + ' ' + (" + form + ") }}{% endfor %}{{ '<|im_end|>\n' }}" + END + PROMPT
    call = {"function": {"name": "f", "arguments": arguments}}
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    written = taught(only(encode([row], template)[0])).removesuffix("<|im_end|>")
    assert json.loads(written.removeprefix("f ")) == {"b": "é"}


def stopping(template: str, *stops: str) -> Sample:
    tokenizer = make_tokenizer(template)
    tokenizer.generation_stops = stops
    (result,) = ChatEncoder(tokenizer, EncodeOptions()).encode([Row(1, say("hi", "hello"))])
    return only(result)


def test_an_answer_ends_with_the_token_that_the_model_stops_at() -> None:
    two = T_PLAIN.replace("'<|im_end|>\n'", "'<|mask|><|endoftext|>\n'")
    assert taught(stopping(two)) == "hello<|mask|>"
    assert taught(stopping(two, "<|endoftext|>")) == "hello<|mask|><|endoftext|>"
    assert taught(stopping(two, "<|pad|>")) == "hello<|mask|>"
    fingerprints = set()
    for stops in ((), ("<|endoftext|>",)):
        tokenizer = make_tokenizer(two)
        tokenizer.generation_stops = stops
        fingerprints.add(ChatEncoder(tokenizer, EncodeOptions()).fingerprint)
    assert len(fingerprints) == 2


def test_nothing_behind_the_end_of_text_token_is_supervised() -> None:
    calling = "{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] + '<|im_end|>next:' }}{% endfor %}"
    template = (
        LOOP + HEAD + "{{ m['content'] }}" + calling + "{% if m['content'] %}<|im_end|>{% endif %}" + END + PROMPT
    )
    row = {"messages": [{"role": "user", "content": "q"}, CALL]}
    sample = only(encode([row], template)[0])
    assert (taught(sample), sample.open_turns) == ("look<|im_end|>", 0)


def marked(before: str, behind: str) -> str:
    """A template whose marks take in what stands there."""
    inner = "{{ '<|im_start|>assistant\n' }}"
    header = (
        "{% if m['role'] == 'assistant' %}BEFORE{% else %}" + HEAD + "{{ m['content'] + '<|im_end|>\n' }}{% endif %}"
    )
    body = {
        "nothing": inner + "{% generation %}" + ANSWER,
        "header": "{% generation %}" + inner + ANSWER,
        "thought": inner + "{% generation %}{{ '<think>\n\n</think>\n\n' }}" + ANSWER,
        "half": inner + "{{ m['content'][0] }}{% generation %}{{ m['content'][1:] + '<|im_end|>' }}",
        "question": "{% generation %}",
    }[before]
    if before == "question":
        return LOOP + "{% generation %}" + HEAD + ANSWER + "{% endgeneration %}{{ '\n' }}" + END + PROMPT
    end = {
        "nothing": "{% endgeneration %}{{ '\n' }}",
        "newline": "{{ '\n' }}{% endgeneration %}",
        "more": "x{% endgeneration %}",
    }
    return LOOP + header.replace("BEFORE", body + end[behind]) + END + PROMPT


@pytest.mark.parametrize("before", ["nothing", "header", "thought"])
@pytest.mark.parametrize("behind", ["nothing", "newline"])
def test_marks_may_take_in_what_the_template_supplies_of_an_answer(before: str, behind: str) -> None:
    for row in (say("hi", "hello"), say("hi", "hello", "bye", "ciao")):
        spaced = " ".join(f"{message['content']}<|im_end|>" for message in row["messages"][1::2])
        assert taught(only(encode([row], marked(before, behind))[0])) == spaced


@pytest.mark.parametrize(("before", "behind"), [("nothing", "more"), ("half", "nothing"), ("question", "nothing")])
def test_marks_that_take_in_more_or_less_are_an_error(before: str, behind: str) -> None:
    with pytest.raises(DataInvalid, match="generation marks"):
        encode([say("hi", "hello")], marked(before, behind))


def test_marks_of_answers_whose_prompt_is_served_otherwise_are_compared_too() -> None:
    moved = T_MOVES.replace(
        "{{ ' ' + m['content'] + '<|im_end|>' }}", "{{ ' ' }}{% generation %}" + ANSWER + "{% endgeneration %}"
    )
    row = say("hi", "hello", system="be kind")
    with pytest.raises(DataInvalid, match="outside the generation marks"):
        encode([row], moved)
    right = T_MOVES.replace(
        "{{ ' ' + m['content'] + '<|im_end|>' }}", "{% generation %}{{ ' ' }}" + ANSWER + "{% endgeneration %}"
    )
    check_samples(encode([row], right)[0], row, T_MOVES, [" hello<|im_end|>"])
    assert taught(only(encode([say("hi", "hello")], T_GEN)[0])) == "hello<|im_end|>"


@pytest.mark.parametrize("content", ["<think>", "<think>\n"])
def test_an_answer_that_was_cut_off_before_its_first_token_is_rejected(content: str) -> None:
    assert reasons(encode([{**say("hi", content), "finish_reason": "length"}], T_OPENS)[0]) == [
        "cut off before the first token"
    ]


@pytest.mark.parametrize("question", ["hi", "what is <think>?"])
def test_an_answer_that_was_cut_off_keeps_what_the_target_wrote_before_its_text(question: str) -> None:
    row = {**say(question, "a b"), "finish_reason": "length"}
    check_samples(encode([row], T_CHANNELS)[0], row, T_CHANNELS, ["<|pad|>final\na b"])
    moved = {**say(question, "a b", system="be kind"), "finish_reason": "length"}
    check_samples(encode([moved], T_MOVES)[0], moved, T_MOVES, [" a b"])


@pytest.mark.parametrize("before", ["nothing", "header"])
def test_marks_of_an_answer_that_was_cut_off_may_take_in_the_ending_that_it_has_not(before: str) -> None:
    row = {**say("hi", "hello", "bye", "ciao"), "finish_reason": "length"}
    assert taught(only(encode([row], marked(before, "newline"))[0])) == "hello<|im_end|> ciao"


def test_an_answer_that_was_cut_off_has_nothing_of_the_ending_of_the_template() -> None:
    ended = T_PLAIN.replace("'<|im_end|>\n'", "'\n<|mask|>end<|im_end|>\n'")
    row = {**say("hi", "hello"), "finish_reason": "length"}
    assert taught(only(encode([row], ended)[0])) == "hello"


@pytest.mark.parametrize("result", ["", " ", "seen", "a\nb"])
def test_a_call_and_its_result_are_never_part_of_the_answer_that_follows(result: str) -> None:
    merged = (
        LOOP
        + "{% if m['role'] == 'tool' %}{{ '<r>' + m['content'].replace('\n', '|') + '</r>' }}{% else %}"
        + "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}"
        + HEAD
        + "{% endif %}{{ m['content'] }}{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] }}{% endfor %}"
        + "{% if not m['tool_calls'] %}<|im_end|>{% endif %}{% endif %}"
        + END
        + PROMPT
    )
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    messages = [{"role": "user", "content": "q"}, call, {"role": "tool", "content": result}]
    (done,) = encode([{"messages": [*messages, {"role": "assistant", "content": "so it"}]}], merged)
    assert (1, "generation prompt is no prefix of the answer") in [(r.turn, r.reason) for r in done.rejections]
    assert [taught(sample) for sample in done.samples if sample.turn] == []


def test_a_header_that_a_user_typed_is_not_that_of_the_answer() -> None:
    headless = LOOP + "{{ m['content'] + '<|pad|>' }}" + END + "{% if add_generation_prompt %}</think>{% endif %}"
    (result,) = encode([say("why </think> now", "because so")], headless)
    assert "now" not in " ".join(taught(sample) for sample in result.samples)


def test_every_answer_that_is_lost_has_a_rejection() -> None:
    result = encode([say("hi", "hello", "bye", "ciao")], T_OPENS)[0]
    assert [rejection.turn for rejection in result.rejections] == [0, 1]
    row = say("hi", "hello", "bye", "ciao")
    row["messages"][1]["weight"] = 0
    assert [rejection.turn for rejection in encode([row], T_OPENS)[0].rejections] == [1]


def test_arguments_that_a_template_leaves_out_are_missed() -> None:
    named = LOOP + HEAD + "{{ m['content'] }}{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] }}"
    bare = named + "{% endfor %}<|im_end|>" + END + PROMPT
    full = named + "{{ c['function']['arguments'] | tojson }}{% endfor %}<|im_end|>" + END + PROMPT
    call = {"function": {"name": "look", "arguments": {"at": {"city": 'Bonn\n"x"', "n": 3}}}}
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]}
    assert encode([row], bare)[0].rejections[0].detail == "its arguments of a tool call"
    assert only(encode([row], full)[0])
    ended = {"messages": [row["messages"][0], {**row["messages"][1], "tool_calls": [{"function": {"name": "end"}}]}]}
    ended["messages"][1]["content"] = "I look."
    assert encode([ended], T_PLAIN)[0].rejections[0].detail == "its tool call", "im_end does not name it"


def test_marks_of_an_answer_whose_prompt_is_served_otherwise_may_take_its_header_in() -> None:
    marked = T_CHANNELS
    for piece in re.findall(r"\{\{ '<\|im_start\|>assistant[^}]*\}\}", T_CHANNELS):
        marked = marked.replace(piece, "{% generation %}" + piece + "{% endgeneration %}")
    (plain,), (checked,) = encode([called()], T_CHANNELS), encode([called()], marked)
    assert marked.count("{% generation %}") == 3 and len(checked.samples) == 2
    assert [taught(sample) for sample in checked.samples] == [taught(sample) for sample in plain.samples]
