from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowdflash.data.chat import read_conversation
from flowdflash.data.rows import Row
from flowdflash.data.split import Part, Split, _lowest

from .fixtures import say

ROWS = [Row(n, say(f"question {n % 150}", f"answer {n}")) for n in range(300)]
READ: Callable[[], Iterable[Row]] = lambda: [*ROWS, Row(9, "x", "not JSON"), Row(9, 3)]  # noqa: E731


def chosen(part: Part, share: float = 0.0, prompts: int = 0) -> set[int]:
    split = Split(part, share=share, prompts=prompts, rows=READ)
    return {row.line for row in ROWS if split.wants(read_conversation(row.value))}


@pytest.mark.parametrize("how", [{"share": 0.2}, {"prompts": 30}])
def test_parts_are_complements_and_share_no_prompt(how: dict[str, float]) -> None:
    train, held_out = chosen("train", **how), chosen("held_out", **how)  # type: ignore[arg-type]
    assert train | held_out == chosen("all") == set(range(300))
    assert not train & held_out
    assert not {n % 150 for n in train} & {n % 150 for n in held_out}
    assert 0.1 < len(held_out) / 300 < 0.3


def test_so_many_distinct_prompts_are_held_out() -> None:
    assert len({n % 150 for n in chosen("held_out", prompts=30)}) == 30
    assert len(chosen("held_out", prompts=1000)) == 300


def test_part_of_a_row_depends_on_its_first_question_alone() -> None:
    split = Split("held_out", share=0.5)
    short = read_conversation(say("q", "a", system="s"))
    long = read_conversation(say("q", "other", "more", "b", system="s"))
    assert split.wants(short) == split.wants(long)
    parts = {split.wants(read_conversation(say("q", "a", system=f"s{n}"))) for n in range(20)}
    assert parts == {True, False}


def test_border_is_worked_out_once_and_not_before_it_is_needed() -> None:
    reads = []

    def rows() -> Iterable[Row]:
        reads.append(1)
        return ROWS

    split = Split("train", prompts=5, rows=rows)
    assert not reads
    for row in ROWS[:10]:
        split.wants(read_conversation(row.value))
    assert len(reads) == 1


@given(st.lists(st.integers(0, 50)), st.integers(1, 20))
def test_lowest_are_the_first_of_the_sorted_distinct(numbers: list[int], count: int) -> None:
    assert _lowest(numbers, count) == set(sorted(set(numbers))[:count])
