"""Tiny models and batches for the tests of the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from flowdflash.items import BatchInfo, TokenBatch
from flowdflash.stage import Check, OpenContext, PlanSummary
from flowdflash.target.toy import ToyModel

TOY = ToyModel()
TOY_REF = TOY.ref


def batch_of(
    rows: Sequence[Sequence[int]],
    *,
    seq: int = 0,
    epoch: int = 0,
    pad: int = 0,
    kept: Sequence[Mapping[str, Any]] = (),
    first_id: int = 0,
) -> TokenBatch:
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    ids = np.full((len(rows), int(lengths.max())), pad, dtype=np.int64)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = row
    mask = np.arange(ids.shape[1])[None] < lengths[:, None]
    info = BatchInfo(
        seq=seq,
        epoch=epoch,
        index=seq,
        bucket=0,
        sample_ids=tuple(range(first_id, first_id + len(rows))),
        lengths=tuple(lengths.tolist()),
        supervised=tuple(lengths.tolist()),
        tokens=int(lengths.sum()),
        padded_tokens=ids.size,
        cost=1.0,
    )
    return TokenBatch(info, ids, mask, lengths, tuple(kept))


def random_rows(lengths: Sequence[int], seed: int = 0, high: int = 256) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, high, length).tolist() for length in lengths]


def context(
    tmp_path: Path, cache: Path, *, replica: int = 0, samples: int = 0, batches: int = 0, **facts: Any
) -> OpenContext:
    plan = PlanSummary(1, batches, batches, samples_per_epoch=samples) if samples or batches else None
    return OpenContext("target", tmp_path / "run", cache, seed=7, facts=facts, plan=plan, replica=replica)


def problems(stage: Any, **facts: Any) -> tuple[list[tuple[str, str]], Mapping[str, Any]]:
    check = Check("target", facts)
    given = stage.check(check)
    return [(p.path, p.message) for p in check.problems], given


def llama_folder(folder: Path, *, tied: bool = False, max_shard_size: str = "1GB", seed: int = 0) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        vocab_size=272,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def gpt2_folder(folder: Path) -> Path:
    """Learned absolute positions and dropout."""
    torch.manual_seed(0)
    drop = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    config = GPT2Config(n_embd=32, n_layer=4, n_head=4, n_positions=256, vocab_size=272, initializer_range=0.2, **drop)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def parameter_sums(model: torch.nn.Module) -> dict[str, float]:
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: float((tensor.double() * torch.arange(1, tensor.numel() + 1).view(tensor.shape)).sum())
        for name, tensor in state.items()
    }
