"""Prompts of a file, rendered exactly as training renders what stands before an answer, and the answers beside them.

A file holds rows as the sources read them, JSONL or Parquet by its leading bytes; or, if its name ends in ``.txt``, a
prompt per line.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from flowdflash.data.arrow import read_rows
from flowdflash.data.encode import ChatEncoder, EncodeOptions, Sample
from flowdflash.data.rows import Row, chunks, read_jsonl
from flowdflash.errors import DataInvalid
from flowdflash.items import IntArray

CHUNK_PROMPTS = 64
EMPTY = re.compile(r"\s*(<think>)?\s*(</think>)?\s*")
"""What a template may write between a prompt and the answer to it."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One prompt.

    Attributes:
        input_ids: ``[n]`` int64, generation prompt included.
        text: what was asked, for showing: the last message of the prompt.
        place: ``file:line`` of its row.
        messages: the messages rendered.
        answered: prompt and answer as training renders them, and the index of the answer's first token; None where
            the row has no answer, or none was asked for.
    """

    input_ids: IntArray
    text: str
    place: str
    messages: tuple[Mapping[str, Any], ...]
    answered: tuple[IntArray, int] | None = None


def load_prompts(
    path: Path,
    tokenizer: Any,
    *,
    limit: int = 0,
    max_prompt_tokens: int = 1024,
    template_options: Mapping[str, Any] | None = None,
    answer_tokens: int = 0,
    warn: Callable[[str], None] = lambda text: None,
) -> list[Prompt]:
    """The first ``limit`` usable prompts of a file (0 for all), in its order: all that stands before a first answer.

    Rows are read and rendered by the code that prepares training data. Rows that cannot be used and prompts longer than
    ``max_prompt_tokens`` are passed over, and ``warn`` is told. With ``answer_tokens`` each prompt comes with so many
    tokens of its answer at most, where its row has one.

    Raises:
        DataInvalid: not one prompt can be used.
        ModelInvalid: the tokenizer has no chat template.
    """
    options = EncodeOptions("generate", max_prompt_tokens, "drop", template_options=dict(template_options or {}))
    answered = replace(options, task="train", over_long="truncate", max_length=max_prompt_tokens + answer_tokens)
    answers = ChatEncoder(tokenizer, answered) if answer_tokens else None
    passed: Counter[str] = Counter()
    found = _prompts(path, ChatEncoder(tokenizer, options), answers, answer_tokens, passed, tokenizer)
    prompts = list(islice(found, limit or None))
    why = ", ".join(f"{reason} {count}" for reason, count in passed.most_common())
    if not prompts:
        raise DataInvalid(f"{path}: no usable prompt ({why or 'the file holds no rows'})")
    if why:
        warn(f"{path}: rows passed over: {why}")
    return prompts


def _prompts(
    path: Path, encoder: ChatEncoder, answers: ChatEncoder | None, most: int, passed: Counter[str], tokenizer: Any
) -> Iterator[Prompt]:
    """The prompts of a file with the start of their answers; counts the reasons for which rows are passed over."""
    for chunk in chunks(_read(path), CHUNK_PROMPTS):
        # With a turn left out there is no telling which answer a sample holds.
        whole = [() if r.rejections else r.samples for r in answers.encode(chunk)] if answers else [()] * len(chunk)
        for row, result, samples in zip(chunk, encoder.encode(chunk), whole, strict=True):
            passed.update(rejection.reason for rejection in result.rejections)
            for sample in result.samples:
                messages = tuple(json.loads(sample.note)["messages"])
                ids = sample.ids.astype(np.int64)
                answer = _first_answer(samples, ids, most, tokenizer)
                yield Prompt(ids, messages[-1]["content"], f"{path}:{row.line}", messages, answer)


def _read(path: Path) -> Iterator[Row]:
    """The rows of a file."""
    if path.suffix != ".txt":
        return read_rows(path)
    return read_jsonl(path, parse=lambda text: {"prompt": text})


def _first_answer(
    samples: Sequence[Sample], prompt: IntArray, most: int, tokenizer: Any
) -> tuple[IntArray, int] | None:
    """The first answer of a row, with all that stands before it; None if it is not one to this prompt."""
    if not samples:
        return None
    start, end = np.flatnonzero(np.diff(samples[0].mask, prepend=False, append=False))[:2].tolist()
    own = start >= len(prompt) and np.array_equal(samples[0].ids[: len(prompt)], prompt)
    if not own or not EMPTY.fullmatch(tokenizer.decode(samples[0].ids[len(prompt) : start])):
        return None
    return samples[0].ids[: min(end, start + most)].astype(np.int64), start
