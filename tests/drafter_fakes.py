"""Small drafts, a small drafter on a toy target, and batches for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowdflash.dflash.config import DraftConfig
from flowdflash.dflash.model import DFlashDraft
from flowdflash.items import BatchInfo, FeatureBatch, StepRecord, TokenBatch
from flowdflash.stage import OpenContext, PlanSummary
from flowdflash.stages.dflash_drafter import DFlashDrafter

TOY = 'toy:{"hidden_size":32,"num_layers":6,"heads":4,"kv_heads":2,"head_dim":8,"vocab_size":64}'
LAYERS = (1, 3)
MASK = 63
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 272,
    "block_size": 4,
    "mask_token_id": 260,
    "target_layer_ids": (0, 2),
    "num_target_layers": 4,
    "rope_theta": 10000.0,
}
"""Of a small draft for a toy target of four layers and 272 tokens."""


def draft_config(**changes: Any) -> DraftConfig:
    return DraftConfig(**{**SHAPE, **changes})


def lively(config: DraftConfig, seed: int = 0) -> DFlashDraft:
    """A random draft whose weights are large enough for its tokens to differ from place to place."""
    draft = config.new_draft(seed=seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    return draft.eval()


def batch(
    seq: int, lengths: tuple[int, ...] = (12, 9), *, supervised: int = 6, bucket: int = 0, last: bool = False
) -> FeatureBatch:
    """Random tokens whose last ``supervised`` ones carry a loss, with random features."""
    rng = np.random.default_rng(seq)
    b, S = len(lengths), max(lengths)
    ids, mask = np.zeros((b, S), np.int64), np.zeros((b, S), np.bool_)
    for row, n in enumerate(lengths):
        ids[row, :n] = rng.integers(1, 60, n)
        mask[row, n - supervised : n] = supervised > 0
    info = BatchInfo(
        seq=seq,
        epoch=0,
        index=seq,
        bucket=bucket,
        sample_ids=tuple(range(seq * 10, seq * 10 + b)),
        lengths=lengths,
        supervised=(supervised,) * b,
        tokens=sum(lengths),
        padded_tokens=b * S,
        cost=1.0,
        last_of_epoch=last,
    )
    features, last = (
        torch.from_numpy(rng.standard_normal((b, S, width)).astype(np.float32)) for width in (len(LAYERS) * 32, 32)
    )
    return FeatureBatch(TokenBatch(info, ids, mask, np.array(lengths)), features, LAYERS, None, last)


FACTS = {"model": TOY, "layers": LAYERS, "num_features": 2}


def opened(
    tmp_path: Path,
    *,
    cls: Any = DFlashDrafter,
    due: Any = lambda step, reason: False,
    steps: int = 8,
    vocabulary: Any = None,
    facts: Any = FACTS,
    **options: Any,
) -> Any:
    """A small drafter on the CPU, in fp32."""
    config = {
        "block_size": 4,
        "num_hidden_layers": 1,
        "num_anchors": 4,
        "precision": "float32",
        "device": "cpu",
        **options,
    }
    drafter = cls(cls.Config(**config))
    plan = PlanSummary(1, steps, steps, vocabulary=vocabulary)
    # One cache for all tests of a process: the toy target is built once.
    cache = tmp_path.parent / "cache"
    drafter.open(OpenContext("drafter", tmp_path, cache, seed=3, facts=facts, checkpoint_due=due, plan=plan))
    return drafter


def records(items: Any) -> list[StepRecord]:
    return [item for item in items if isinstance(item, StepRecord)]
