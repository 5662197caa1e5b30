"""What generators share, and the sink of their answers: options, seeds, conversations answered turn by turn."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from flowdflash.errors import DataInvalid
from flowdflash.items import Answer
from flowdflash.stage import Check, StageConfig

Message = Mapping[str, Any]
Ask = Callable[[int, Sequence[int], Sequence[Sequence[Message]]], Sequence[Answer]]
"""``ask(turn, places, conversations)``: answers to the conversations of the rows at ``places``, in their order."""


class SamplingOptions(StageConfig):
    """Options of every generator."""

    max_new_tokens: int = Field(512, ge=1, description="Most tokens of a response; one that reaches it is cut.")
    temperature: float = Field(0.0, ge=0, le=10, description="0 takes the likeliest token, above 0 samples.")
    top_p: float = Field(1.0, gt=0, le=1, description="Samples from the likeliest tokens of this total probability.")
    top_k: int = Field(0, ge=0, description="Samples from so many likeliest tokens; 0 for all.")
    seed: Literal["pipeline"] | int = Field("pipeline", description="Seed of sampling; pipeline takes the pipeline's.")


def check_generator(check: Check, config: SamplingOptions) -> None:
    """Refuse training rows, and options of sampling where nothing is sampled."""
    if check.facts.get("task", "generate") != "generate":
        check.refuse("", "the source gives whole conversations, not prompts", "set task: generate in the source")
    if config.temperature == 0:
        for option in sorted({"top_p", "top_k", "seed"} & config.model_fields_set):
            check.refuse(option, f"{option} has no effect at temperature 0", "raise temperature, or remove it")


def answer_seed(seed: int, epoch: int, sample_id: int, turn: int) -> int:
    """Unrelated seeds for the answers of a run, whatever batch a prompt is in; seeds one apart must not share draws."""
    return int.from_bytes(hashlib.sha256(f"{seed} {epoch} {sample_id} {turn}".encode()).digest()[:7], "big")


def questions(row: Mapping[str, Any]) -> list[list[Message]]:
    """The messages of a prompt up to each place where an answer belongs: after a user's turn that another one follows,
    and at the end. Older answers at the end are left out.

    Raises:
        DataInvalid: there is nothing to answer.
    """
    messages = row.get("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise DataInvalid("the row of a prompt has no list of messages")
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    while roles and roles[-1] == "assistant":
        roles.pop()
    if not roles:
        raise DataInvalid("the row of a prompt has no message to answer")
    ends = [n for n in range(1, len(roles)) if roles[n - 1] == roles[n] == "user"] + [len(roles)]
    return [list(messages[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def conversation(row: Mapping[str, Any], answers: Sequence[Answer]) -> list[Message]:
    """The messages of a prompt with the answers so far at their places, up to the next question if there is one."""
    said: list[Message] = []
    asked = questions(row)
    for turn, question in enumerate(asked[: len(answers) + 1]):
        said += question
        if turn < len(answers):
            answer = answers[turn]
            thought = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
            said.append({"role": "assistant", "content": answer.text, **thought})
    return said


def answer_in_turn(rows: Sequence[Mapping[str, Any]], ask: Ask) -> tuple[tuple[Answer, ...], ...]:
    """The answers of each row, turn by turn: each goes into the context of the next.

    A row's answer that is cut, empty or refused is its last: a person would not have gone on from there.
    """
    answers: list[list[Answer]] = [[] for _ in rows]
    asked = [len(questions(row)) for row in rows]
    waiting, turn = list(range(len(rows))), 0
    while waiting:
        said = [conversation(rows[place], answers[place]) for place in waiting]
        for place, answer in zip(waiting, ask(turn, waiting, said), strict=True):
            answers[place].append(answer)
        turn += 1
        waiting = [place for place in waiting if answers[place][-1].complete and turn < asked[place]]
    return tuple(map(tuple, answers))


def checked_rows(rows: Sequence[Mapping[str, Any]], samples: int) -> Sequence[Mapping[str, Any]]:
    """The rows of a batch.

    Raises:
        DataInvalid: the source gives none.
    """
    if len(rows) != samples:
        raise DataInvalid(
            "the source does not give the rows of its prompts, so responses cannot be written next to them "
            "(use a source that does, such as chat_jsonl with task: generate)"
        )
    return rows
