"""A conversation as text: what a template makes of it, and where in it stands what the target writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

Marks = tuple[tuple[int, int], ...] | None
"""Spans in generation marks; None where nobody looks at them."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One supervised assistant turn, in characters of its rendering.

    Attributes:
        prompt_end: where the generation prompt ends; the target writes from here.
        start: where supervision starts: later than ``prompt_end`` if the template puts in an empty think block, or ends
            one that its generation prompt has begun.
        end: where it ends: after the end-of-turn token.
        closed: a special token is the end-of-turn token; without one, ``end`` is the end of the answer.
    """

    prompt_end: int
    start: int
    end: int
    closed: bool


@dataclass(frozen=True, slots=True)
class Rendering:
    """The text of one sample.

    Attributes:
        text: rendered conversation.
        turns: supervised turns, in order.
        turn: the assistant turn that this sample stands for, from 0; -1 for all turns of the row.
        marks: spans in the template's generation marks; None where it has none.
    """

    text: str
    turns: tuple[Turn, ...]
    turn: int = -1
    marks: Marks = None


def fitted(marks: Marks, text: str, turns: Sequence[Turn], header: str) -> Marks:
    """Marks, less what for good reasons is not in the mask: the header of an answer, an empty thought in front of it,
    white space behind its end-of-turn token."""
    if marks is None:
        return None
    found = list(marks)
    for n, (start, end) in enumerate(found):
        for turn in turns:
            supplied = start >= turn.prompt_end or header.endswith(text[start : turn.prompt_end])
            if turn.prompt_end - len(header) <= start <= turn.start < end and supplied:
                behind = end <= turn.end or text[turn.end : end].isspace()
                found[n] = turn.start, min(end, turn.end) if behind else end
    return tuple(found)


@lru_cache(maxsize=64)
def first_special(ending: str, names: frozenset[str], stops: tuple[str, ...]) -> tuple[int, bool]:
    """Where the first token in an ending that the target stops at ends, or the first special token if none is known to
    be there; of those that start alike the longest. 0 without one."""
    found = [(ending.find(name), -len(name)) for name in stops if name in ending]
    found = found or [(ending.find(name), -len(name)) for name in names if name in ending]
    if not found:
        return 0, False
    place, length = min(found)
    return place - length, True


def special_names(tokenizer: Any) -> frozenset[str]:
    """Texts of the special tokens of a tokenizer, its end-of-text token among them."""
    added = tokenizer.added_tokens_decoder.values()
    named = {tokenizer.eos_token} if tokenizer.eos_token else set()
    return frozenset(token.content for token in added if token.special) | named
