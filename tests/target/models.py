"""Tiny models and batches for the tests of the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

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


_SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 272,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_WINDOW = {"sliding_window": 8, "query_pre_attn_scalar": 8}
_FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256, "vocab_size": 272, "initializer_range": 0.2}
_DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _SHAPE),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _SHAPE),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_SHAPE, "tie_word_embeddings": True}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", _SHAPE),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_SHAPE, **_WINDOW, "final_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**_SHAPE, **_WINDOW}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", _SHAPE),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**_SHAPE, "num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**_SHAPE, **_FEW_EXPERTS}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {**_GPT2, **_DROPOUT}),
    # What cannot be a target.
    "granite": ("GraniteConfig", "GraniteForCausalLM", {**_SHAPE, "logits_scaling": 4.0}),
    "phi": ("PhiConfig", "PhiForCausalLM", _SHAPE),
    "mamba": ("MambaConfig", "MambaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 272}),
    "t5": ("T5Config", "T5ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "d_ff": 48, "vocab_size": 272}),
}


def family_folder(family: str, folder: Path) -> Path:
    """A random model of a family. ``llava`` is a text tower in a wrapper, ``padded`` has more rows than tokens."""
    torch.manual_seed(0)
    if family == "llava":
        vision = transformers.CLIPVisionConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
        )
        text = transformers.LlamaConfig(**_SHAPE)
        config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=271)
        model = transformers.LlavaForConditionalGeneration(config)
    else:
        config_cls, model_cls, options = _FAMILIES["llama" if family == "padded" else family]
        model = getattr(transformers, model_cls)(getattr(transformers, config_cls)(**options))
        if family == "padded":
            model.resize_token_embeddings(320, mean_resizing=False)
    model.save_pretrained(folder)
    return folder


def parameter_sums(model: torch.nn.Module) -> dict[str, float]:
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: float((tensor.double() * torch.arange(1, tensor.numel() + 1).view(tensor.shape)).sum())
        for name, tensor in state.items()
    }
