"""Prompts of a file, rendered exactly as training renders what stands before an answer, and the answers beside them.

A file holds rows as the sources read them, JSONL or Parquet by its leading bytes; or, if its name ends in ``.txt``, a
prompt per line.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flowdflash.data.arrow import read_rows
from flowdflash.data.encode import ChatEncoder, EncodeOptions, Sample
from flowdflash.data.rows import Row, chunks, read_jsonl
from flowdflash.data.split import Part, Split
from flowdflash.errors import DataInvalid
from flowdflash.items import IntArray

CHUNK_PROMPTS = 64


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
    split: Part = "all",
    held_out_share: float = 0.0,
    held_out_rows: int = 0,
    max_prompt_tokens: int = 1024,
    prompt_until: Literal["first_answer", "last_answer"] = "first_answer",
    surrogates: Literal["reject", "replace"] = "reject",
    template_options: Mapping[str, Any] | None = None,
    answer_tokens: int = 0,
    warn: Callable[[str], None] = lambda text: None,
) -> list[Prompt]:
    """The first ``limit`` usable prompts of a file (0 for all), in its order.

    Rows are read, split and rendered by the code that prepares training data: with the same ``held_out_share`` or
    ``held_out_rows``, ``split="held_out"`` gives prompts that a source with ``split: train`` has never shown. Rows that
    cannot be used and prompts longer than ``max_prompt_tokens`` are passed over, and ``warn`` is told. With
    ``answer_tokens`` each prompt comes with so many tokens of its answer at most, where its row has one.

    Raises:
        DataInvalid: not one prompt can be used.
        ModelInvalid: the tokenizer has no chat template.
    """
    options = EncodeOptions(
        task="generate",
        max_length=max_prompt_tokens,
        over_long="drop",
        prompt_until=prompt_until,
        surrogates=surrogates,
        template_options=dict(template_options or {}),
    )
    rows = partial(_read, path)
    chosen = Split(split, share=held_out_share, prompts=held_out_rows, rows=rows)
    encoder = ChatEncoder(tokenizer, options, chosen)
    answered = replace(options, task="train", over_long="truncate", max_length=max_prompt_tokens + answer_tokens)
    answers = ChatEncoder(tokenizer, answered) if answer_tokens else None
    prompts: list[Prompt] = []
    passed: Counter[str] = Counter()
    for chunk in chunks(rows(), CHUNK_PROMPTS):
        # With a turn left out there is no telling which answer a sample holds.
        whole = [() if r.rejections else r.samples for r in answers.encode(chunk)] if answers else [()] * len(chunk)
        for row, result, samples in zip(chunk, encoder.encode(chunk), whole, strict=True):
            if limit and len(prompts) == limit:
                break
            passed.update(rejection.reason for rejection in result.rejections)
            passed["in the other split"] += not (result.samples or result.rejections)
            for sample in result.samples:
                messages = tuple(json.loads(sample.note)["messages"])
                ids = sample.ids.astype(np.int64)
                answer = _answer(samples, 0 if prompt_until == "first_answer" else -1, answer_tokens)
                prompts.append(Prompt(ids, messages[-1]["content"], f"{path}:{row.line}", messages, answer))
        if limit and len(prompts) == limit:
            break
    why = ", ".join(f"{reason} {count}" for reason, count in passed.most_common() if count)
    if not prompts:
        raise DataInvalid(f"{path}: no usable prompt ({why or 'the file holds no rows'})")
    if why:
        warn(f"{path}: rows passed over: {why}")
    return prompts


def _read(path: Path) -> Iterator[Row]:
    """The rows of a file."""
    if path.suffix != ".txt":
        return read_rows(path)
    return read_jsonl(path, parse=lambda text: {"prompt": text})


def _answer(samples: Sequence[Sample], which: Literal[0, -1], most: int) -> tuple[IntArray, int] | None:
    """The first or the last answer of a row, with all that stands before it."""
    if not samples:
        return None
    sample = samples[which]
    edges = np.flatnonzero(np.diff(sample.mask, prepend=False, append=False)).reshape(-1, 2)
    start, end = map(int, edges[which])
    return sample.ids[: min(end, start + most)].astype(np.int64), start
