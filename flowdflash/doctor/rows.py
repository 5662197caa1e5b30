"""Rows to look at a draft with: samples of a pipeline, prompts of a file, and what the target answers to them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowdflash.dflash.anchors import valid_anchors
from flowdflash.errors import DataInvalid
from flowdflash.graph import Graph
from flowdflash.items import BatchInfo, IntArray, TokenBatch
from flowdflash.stage import OpenContext, Report, Vocabulary

ANSWER_TOKENS = 128
"""Of a sample so many tokens are looked at from its first supervised one on."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """Tokens ``[n]`` of one sample, and which of them carry a loss."""

    ids: IntArray
    mask: NDArray[np.bool_]

    @property
    def start(self) -> int:
        """Where the first answer starts."""
        return int(np.argmax(self.mask))

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """``input_ids [1, n]``, ``loss_mask [1, n]`` and ``lengths [1]``."""
        ids, mask = (torch.from_numpy(column).to(device)[None] for column in (self.ids, self.mask))
        return ids, mask, torch.tensor([len(self.ids)], device=device)

    @classmethod
    def answered(cls, prompt: Sequence[int], answer: Sequence[int]) -> Row:
        """A prompt and its answer."""
        ids = np.array([*prompt, *answer], dtype=np.int64)
        return cls(ids, np.arange(len(ids)) >= len(prompt))


def batch_of(row: Row, *, epoch: int = 0) -> TokenBatch:
    """A batch of this row alone; another epoch draws other anchors."""
    n, supervised = len(row.ids), int(row.mask.sum())
    info = BatchInfo(epoch, epoch, 0, -1, (0,), (n,), (supervised,), n, n, float(n))
    return TokenBatch(info, row.ids[None], row.mask[None], np.array([n], dtype=np.int64))


def samples(
    graph: Graph, count: int, cache_dir: Path, report: Report, seed: int
) -> tuple[list[Row], Vocabulary | None]:
    """Up to ``count`` samples of a pipeline's first epoch, evenly spaced, and its vocabulary.

    Raises:
        FlowdflashError: its source cannot be opened, or gives no sample that a draft could learn from.
    """
    (node, *_) = graph.of_kind("source")
    source: Any = node.cls(node.config)
    with tempfile.TemporaryDirectory() as folder:
        try:
            source.open(OpenContext(node.name, Path(folder), cache_dir, seed=seed, facts=node.facts, report=report))
            table = next(iter(source.epochs()), None)
            ids = [] if table is None else table.ids[table.supervised > 1].tolist()
            chosen = [ids[i] for i in np.unique(np.linspace(0, len(ids) - 1, min(count, len(ids))).astype(int))]
            rows = [_cut(*source.tokens(sample)) for sample in chosen]
            vocabulary: Vocabulary | None = source.vocabulary()
        finally:
            source.close()
    rows = [row for row in rows if row.start and len(valid_anchors(row.mask, len(row.ids)))]
    if not rows:
        raise DataInvalid(f"{node.name} has no sample with a prompt and two supervised tokens in a row")
    return rows, vocabulary


def _cut(ids: Any, mask: Any) -> Row:
    whole = Row(np.array(ids, dtype=np.int64), np.array(mask, dtype=np.bool_))
    end = whole.start + ANSWER_TOKENS
    return Row(whole.ids[:end], whole.mask[:end])


def prompts_of(
    path: Path, tokenizer: Any, count: int, template_options: Mapping[str, Any] | None
) -> list[Sequence[int]]:
    """The first prompts of a file.

    Raises:
        DataInvalid: it holds none.
    """
    from flowdflash.data.prompts import load_prompts

    found = load_prompts(path, tokenizer, limit=count, template_options=template_options)
    return [prompt.input_ids.tolist() for prompt in found[:count]]
