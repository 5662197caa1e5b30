"""Conversations that are answered turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from flowdflash.errors import DataInvalid
from flowdflash.generation import answer_in_turn, answer_seed, conversation, questions
from flowdflash.items import Answer

SYSTEM = {"role": "system", "content": "s"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_each_answer_is_context_of_the_next_and_rows_of_any_number_of_turns_go_together() -> None:
    rows = [{"messages": [SYSTEM, user("a"), user("b"), user("c")]}, {"messages": [user("x")]}]
    seen: list[tuple[int, tuple[int, ...], list[list[str]]]] = []

    def ask(turn: int, places: Sequence[int], said: Any) -> list[Answer]:
        seen.append((turn, tuple(places), [[message["content"] for message in one] for one in said]))
        return [Answer(f"{one[-1]['content']}!", 2) for one in said]

    answers = answer_in_turn(rows, ask)
    assert [[answer.text for answer in turns] for turns in answers] == [["a!", "b!", "c!"], ["x!"]]
    assert seen == [
        (0, (0, 1), [["s", "a"], ["x"]]),
        (1, (0,), [["s", "a", "a!", "b"]]),
        (2, (0,), [["s", "a", "a!", "b", "b!", "c"]]),
    ]
    assert [m["content"] for m in conversation(rows[0], answers[0])] == ["s", "a", "a!", "b", "b!", "c", "c!"]


@pytest.mark.parametrize("last", [Answer("cut", 9, "length"), Answer(" ", 1), Answer("", 0, rejected="refused")])
def test_an_answer_that_nobody_would_go_on_from_is_the_last_of_its_row(last: Answer) -> None:
    row = {"messages": [user("a"), user("b"), user("c")]}
    told = [Answer("fine", 3), last]
    assert answer_in_turn([row], lambda turn, places, said: [told[turn]]) == (tuple(told),)


def test_an_older_answer_at_the_end_is_left_out_and_earlier_ones_stay() -> None:
    row = {"messages": [user("a"), assistant("old"), user("b"), assistant("old")]}
    assert questions(row) == [[user("a"), assistant("old"), user("b")]]


def test_reasoning_is_kept_apart() -> None:
    said = conversation({"messages": [user("a")]}, [Answer("b", 5, reasoning="hm")])
    assert said[-1] == {"role": "assistant", "content": "b", "reasoning_content": "hm"}


@pytest.mark.parametrize("row", [{}, {"messages": "text"}, {"messages": []}, {"messages": [assistant("x")]}])
def test_a_row_without_a_question_is_an_error(row: dict[str, Any]) -> None:
    with pytest.raises(DataInvalid, match="the row of a prompt"):
        questions(row)


def test_seeds_differ_by_sample_turn_epoch_and_run() -> None:
    seeds = {answer_seed(*place) for place in ((7, 0, 1, 0), (7, 0, 0, 1), (7, 1, 0, 0), (8, 0, 0, 0), (7, 0, 0, 0))}
    assert len(seeds) == 5
