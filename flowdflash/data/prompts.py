"""Prompts of a file of chat rows, rendered exactly as training renders what stands before an answer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flowdflash.data.encode import ChatEncoder, EncodeOptions
from flowdflash.data.rows import chunks, read_jsonl
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
    """

    input_ids: IntArray
    text: str
    place: str
    messages: tuple[Mapping[str, Any], ...]


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
) -> list[Prompt]:
    """The first ``limit`` usable prompts of a file (0 for all), in its order.

    Rows are read, split and rendered by the code that prepares training data: with the same ``held_out_share`` or
    ``held_out_rows``, ``split="held_out"`` gives prompts that a source with ``split: train`` has never shown. Rows that
    cannot be used and prompts longer than ``max_prompt_tokens`` are passed over.

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
    chosen = Split(split, share=held_out_share, prompts=held_out_rows, rows=partial(read_jsonl, path))
    encoder = ChatEncoder(tokenizer, options, chosen)
    prompts: list[Prompt] = []
    passed: Counter[str] = Counter()
    for chunk in chunks(read_jsonl(path), CHUNK_PROMPTS):
        for row, result in zip(chunk, encoder.encode(chunk), strict=True):
            passed.update(rejection.reason for rejection in result.rejections)
            passed["in the other split"] += not (result.samples or result.rejections)
            for sample in result.samples:
                messages = tuple(json.loads(sample.note)["messages"])
                ids = sample.ids.astype(np.int64)
                prompts.append(Prompt(ids, messages[-1]["content"], f"{path}:{row.line}", messages))
        if limit and len(prompts) >= limit:
            return prompts[:limit]
    if not prompts:
        why = ", ".join(f"{reason} {count}" for reason, count in passed.most_common() if count)
        raise DataInvalid(f"{path}: no usable prompt ({why or 'the file holds no rows'})")
    return prompts
