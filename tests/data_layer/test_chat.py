from __future__ import annotations

import json
from typing import Any

import pytest

from flowdflash.data.chat import read_conversation
from flowdflash.data.learnt import is_cut_off, unlearnt
from flowdflash.data.rejects import Rejected
from flowdflash.data.turn_order import check_turns

from .fixtures import say


def reason(row: Any, *, answered: bool = True) -> str:
    with pytest.raises(Rejected) as caught:
        check_turns(read_conversation(row), answered=answered)
    return caught.value.rejection.reason


def roles(*names: str) -> dict[str, Any]:
    return {"messages": [{"role": name, "content": "text"} for name in names]}


def test_three_dialects_give_one_conversation() -> None:
    turns = [
        ("user", "human", "hi"),
        ("assistant", "gpt", "hello"),
        ("user", "human", "bye"),
        ("assistant", "gpt", "ok"),
    ]
    dialects = [
        {"messages": [{"role": role, "content": text} for role, _, text in turns]},
        {"conversations": [{"role": role, "content": text} for role, _, text in turns]},
        {"conversations": [{"from": other, "value": text} for _, other, text in turns]},
    ]
    first, *others = (read_conversation(row) for row in dialects)
    assert all(other == first for other in others)
    assert first.answers == (1, 3)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (roles("user", "user", "assistant"), "two user turns in a row"),
        (roles("assistant", "user", "assistant"), "opens with an assistant turn"),
        (roles("system", "assistant"), "opens with an assistant turn"),
        (roles("user", "assistant", "assistant"), "two assistant turns in a row"),
        (roles("user", "assistant", "user"), "ends without an answer"),
        (roles("user", "assistant", "system", "user", "assistant"), "system prompt in the middle"),
        (roles("user", "tool", "assistant"), "tool result without a call"),
        (roles("user", "human_1"), "unknown role"),
        ({"messages": []}, "empty conversation"),
        (roles("system"), "system prompt only"),
        (roles("system", "user"), "no assistant turn"),
        (say("hi", ""), "empty assistant message"),
        (say("", "ok"), "empty user message"),
        (say("hi", "   "), "blank assistant message"),
        ({"messages": None}, "`messages` is null"),
        ({"text": "x"}, "no `messages` or `conversations`"),
        ({"messages": "x"}, "conversation is not a list"),
        ({"messages": ["x"]}, "message is not an object"),
        ({**say("a", "b"), "conversations": []}, "both `messages` and `conversations`"),
        ({**say("a", "b", system="s"), "system": "t"}, "two system prompts"),
        ([1], "row is not an object"),
        ({"messages": [{"role": "user", "content": 3}]}, "content is not text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content part is not text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
            "content part is not text",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "content part is not text"),
        (roles("User", "Assistant"), "unknown role"),
        ({**say("a", "b"), "system": 3}, "`system` is not text"),
        ({"prompt": ["a"]}, "no `messages` or `conversations`"),
        ({"prompt": "a", "answer": "b"}, "no assistant turn"),
        ({"prompt": "a", "messages": []}, "empty conversation"),
    ],
)
def test_every_odd_row_has_a_reason_of_its_own(row: Any, expected: str) -> None:
    assert reason(row) == expected


def test_system_then_alternating_turns_are_good_and_a_prompt_needs_no_answer() -> None:
    check_turns(read_conversation(roles("system", "user", "assistant")), answered=True)
    check_turns(read_conversation(roles("user")), answered=False)
    assert reason(roles("system"), answered=False) == "system prompt only"


def test_system_key_of_the_row_becomes_the_first_message() -> None:
    assert read_conversation({**say("a", "b"), "system": "s"}) == read_conversation(say("a", "b", system="s"))


def answer(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **more}]}


def test_reasoning_has_one_name_and_what_a_message_says_of_itself_is_never_dropped_in_silence() -> None:
    named = read_conversation(answer(reasoning_content="hm"))
    assert (
        named
        == read_conversation(answer(reasoning="hm"))
        == read_conversation(answer(reasoning="hm", reasoning_content="hm", thinking=None, name=""))
    )
    assert named.messages[1]["reasoning_content"] == "hm"
    assert read_conversation(answer(thinking="hm")).messages[1]["thinking"] == "hm"
    assert reason(answer(reasoning="hm", reasoning_content="no")) == "both `reasoning_content` and `reasoning`"
    assert reason(answer(thinking=["hm"])) == "`thinking` is not text"
    assert reason(answer(tool_call_id=3)) == "`tool_call_id` is not text"


def weighted(*weights: Any) -> dict[str, Any]:
    """A conversation whose answers have weights."""
    row = say(*("a", "b") * len(weights))
    for message, weight in zip(row["messages"][1::2], weights, strict=True):
        message["weight"] = weight
    row["messages"][0]["weight"] = 0  # no answer
    return row


def test_answers_of_weight_zero_are_not_learnt_and_others_are() -> None:
    assert unlearnt(say("a", "b")) == unlearnt(weighted(1.0, None, True)) == frozenset()
    assert unlearnt(weighted(0, 1, 0.0, False)) == {0, 2, 3}
    for weights, why in (
        ((0.5, 1), "says neither yes nor no"),
        (("0",), "says neither yes nor no"),
        (([],), "says neither yes nor no"),
        ((0, 0), "no answer"),
    ):
        with pytest.raises(Rejected, match=why):
            unlearnt(weighted(*weights))


def test_other_tools_words_for_an_answer_that_is_not_to_be_learnt_are_obeyed() -> None:
    for key, no in (("train", False), ("training", False), ("loss", False), ("masked", True)):
        row = say("a", "b", "c", "d")
        row["messages"][1][key], row["messages"][3][key] = no, not no
        assert unlearnt(row) == {0}
        for odd in ("no", 0.5):
            row["messages"][1][key] = odd
            if key == "loss":  # somebody's measurement
                assert unlearnt({"messages": row["messages"][:2]}) == frozenset()
                continue
            with pytest.raises(Rejected, match=f"`{key}` of an answer says neither yes nor no"):
                unlearnt(row)
    assert unlearnt({**say("a", "b"), "weight": 0.5}) == frozenset()
    with pytest.raises(Rejected, match="no answer is to be learnt"):
        unlearnt({**say("a", "b"), "weight": 0})


@pytest.mark.parametrize("told", [{"finish_reason": "length"}, {"stop_reason": "max_tokens"}])
def test_a_row_says_that_its_last_answer_was_cut_off(told: dict[str, str]) -> None:
    assert is_cut_off({**say("a", "b"), **told}) and not is_cut_off({**say("a", "b"), **dict.fromkeys(told, "stop")})


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({**say("a", "b"), "system_prompt": "be kind"}, "system_prompt"),
        ({**say("a", "b"), "functions": [{}]}, "functions"),
        ({**say("a", "b"), "images": ["1.png"]}, "images"),
        (answer(reasoning_details=[{"text": "hm"}]), "reasoning_details"),
        (answer(images=["1.png"]), "images"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "image": "1.png"}]}]}, "image"),
    ],
)
def test_what_would_change_the_sample_and_is_not_read_rejects_the_row(row: Any, key: str) -> None:
    assert reason(row) == f"`{key}` is not read"


@pytest.mark.parametrize(
    "row",
    [
        {**say("a", "b", system="be kind"), "system_prompt": "be kind"},
        {**say("a", "b"), "documents": "doc-7"},
        answer(reasoning="hm", reasoning_details=[{"text": "hm"}]),
        answer(thinking="hm", thinking_blocks=[{"thinking": "hm"}]),
        answer(thought="b"),
        answer(reasoning_content=" "),
        answer(tool_calls=[{"name": None, "function": {"name": "f", "arguments": {}, "strict": False}}]),
        answer(tool_calls=[{"function": {"name": "f", "description": "x", "arguments": "{}"}, "args": {}}]),
    ],
)
def test_what_is_read_under_another_name_as_well_costs_no_row(row: Any) -> None:
    assert len(read_conversation(row).answers) == 1


def test_keys_that_are_not_read_do_no_harm_while_they_are_empty() -> None:
    row = {**say("a", "b"), "images": [], "documents": None, "system_prompt": "", "score": 3}
    assert read_conversation(row) == read_conversation(say("a", "b"))


def test_a_prompt_alone_is_a_question() -> None:
    for row in ({"prompt": "a"}, {"prompt": "a", "messages": None}):
        assert read_conversation(row) == read_conversation(say("a"))
    assert read_conversation({"prompt": "x", **say("a", "b")}) == read_conversation(say("a", "b"))


def call(arguments: Any, **message: Any) -> dict[str, Any]:
    calls = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}]
    return {
        "messages": [
            {"role": "user", "content": "1+2?"},
            {"role": "assistant", "tool_calls": calls, **message},
            {"role": "tool", "content": "3", "tool_call_id": "c1"},
            {"role": "assistant", "content": "three"},
        ]
    }


def test_null_absent_and_empty_content_and_both_argument_forms_are_the_same() -> None:
    arguments = {"b": 1, "a": {"c": "é"}}
    rows = [call(arguments, content=None), call(arguments), call(arguments, content="")]
    rows += [call(json.dumps(arguments), content=None), call(arguments, content=[])]
    first, *others = (read_conversation(row) for row in rows)
    assert all(other == first for other in others)
    check_turns(first, answered=True)
    assert first.messages[1]["content"] == ""
    nothing = [read_conversation(call(arguments)) for arguments in ({}, "{}", "", None)]
    assert all(other == nothing[0] for other in nothing)


def test_a_text_part_equals_plain_text() -> None:
    parts = say("hi", "yes")
    parts["messages"][0]["content"] = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert read_conversation(parts) == read_conversation(say("hi", "yes"))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (call("{not json"), "tool call arguments are not JSON"),
        (call("[1]"), "tool call arguments are not an object"),
        (call("null"), "tool call arguments are not an object"),
        (call([]), "tool call arguments are not an object"),
        (call(0), "tool call arguments are not an object"),
        (answer(tool_calls=[{"name": "f", "args": {"a": 1}}]), "tool call with keys that are not read"),
        (
            answer(tool_calls=[{"function": {"name": "f", "parameters": {"a": 1}}}]),
            "tool call with keys that are not read",
        ),
        (answer(tool_calls=[{"name": "f", "input": "x"}]), "tool call with keys that are not read"),
        (
            answer(tool_calls=[{"arguments": {"a": 1}, "function": {"name": "f"}}]),
            "tool call with keys that are not read",
        ),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "tool call outside an assistant turn"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool call without a name"),
        ({"messages": [{"role": "assistant", "function_call": {}}]}, "`function_call` is not supported"),
        ({**say("a", "b"), "tools": "{"}, "`tools` is not JSON"),
        ({**say("a", "b"), "tools": [1]}, "`tools` is not a list of objects"),
    ],
)
def test_tool_calls_that_cannot_be_read_are_named(row: Any, expected: str) -> None:
    assert reason(row) == expected


def test_a_conversation_may_end_with_a_tool_call() -> None:
    check_turns(read_conversation({"messages": call({})["messages"][:2]}), answered=True)


def test_a_tool_call_must_get_its_result_and_the_result_an_answer() -> None:
    user, asks, result, _ = call({})["messages"]
    assert reason({"messages": [user, asks, {"role": "assistant", "content": "x"}]}) == "two assistant turns in a row"
    assert reason({"messages": [user, asks, user, asks]}) == "tool call without a result"
    assert reason({"messages": [user, asks, result, user, asks]}) == "tool result without an answer"


def test_half_a_surrogate_pair_is_mended_and_flagged_even_inside_arguments() -> None:
    pair = read_conversation(json.loads(r'{"messages": [{"role": "user", "content": "ok \ud83d\udc4d"}]}'))
    assert (pair.messages[0]["content"], pair.surrogates) == ("ok 👍", False)
    half = read_conversation(json.loads(r'{"messages": [{"role": "user", "content": "bad \ud83d end"}]}'))
    assert (half.messages[0]["content"], half.surrogates) == ("bad \ufffd end", True)
    inner = read_conversation(call(r'{"x": "\ud83d"}'))
    assert inner.surrogates
    assert inner.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": "\ufffd"}
