"""Loads a frozen target, its tokenizer, or a part of its weights, from one string that names the model.

Every function takes the same references: a folder, a name of the catalogue, a Hugging Face id, or ``toy:{...}`` (a
tiny random model built from its seed, see ``toy.py``). While transformers builds a model it switches torch's default
dtype for the whole process, so load while no other thread creates tensors; the runtime opens stages one at a time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flowdflash.errors import ModelInvalid
from flowdflash.stage import Report
from flowdflash.target.fetch import resolve_model
from flowdflash.target.quiet import quiet
from flowdflash.target.weights import (
    EmbeddingAndHead,
    load_decoder_layers,
    load_embedding_and_head,
    load_final_norm,
)

__all__ = [
    "EmbeddingAndHead",
    "LoadedTarget",
    "choose_device",
    "choose_dtype",
    "find_tokenizer",
    "load_decoder_layers",
    "load_embedding_and_head",
    "load_final_norm",
    "load_target",
    "load_tokenizer",
    "replica_device",
    "resolve_model",
    "use_device",
]


@dataclass(frozen=True, slots=True, eq=False)
class LoadedTarget:
    """A target on its device: in eval mode, no parameter requires a gradient.

    Attributes:
        ref: how the pipeline names it.
        folder: where its files are.
        model: the whole model, with output head.
        base: the decoder that maps ids to hidden states, without head.
        layers: its decoder layers, in order.
        hidden_size, num_layers, vocab_size: shapes; ``vocab_size`` counts rows of the embedding.
        max_positions: longest sequence it was made for, 0 if unknown.
        dtype, device: of the weights.
    """

    ref: str
    folder: Path
    model: Any
    base: Any
    layers: Sequence[nn.Module]
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_positions: int
    dtype: torch.dtype
    device: torch.device


def choose_device(device: str = "auto") -> torch.device:
    """``auto``: the first GPU if there is one, else the CPU. ``cuda``: the first GPU.

    Raises:
        ModelInvalid: the device is not there.
    """
    count = gpu_count()
    if device == "auto":
        device = "cuda" if count else "cpu"
    try:
        chosen = torch.device("cuda:0" if device == "cuda" else device)
    except RuntimeError:
        raise ModelInvalid(f"unknown device {device!r} (auto, cpu, cuda or cuda:N)") from None
    if chosen.type == "cuda" and (chosen.index or 0) >= count:
        raise ModelInvalid(f"device {chosen} is not there: this machine has {count} GPUs (set device: cpu, or auto)")
    return chosen


def replica_device(device: str, replica: int) -> torch.device:
    """The device of one of several copies of a target.

    ``auto`` and ``cuda`` give copy i GPU i + 1, and GPU 0, where a drafter trains by default, to the last one that
    there is a GPU for. A list such as ``cuda:1,cuda:2`` gives copy i its i-th entry.

    Raises:
        ModelInvalid: the device is not there.
    """
    count = gpu_count()
    if device in ("auto", "cuda") and count:
        if replica >= count:
            raise ModelInvalid(f"replica {replica} has no GPU: this machine has {count} GPUs (lower replicas)")
        return choose_device(f"cuda:{(replica + 1) % count}")
    named = device.split(",")
    return choose_device(named[replica if len(named) > 1 else 0])


def gpu_count() -> int:
    """GPUs of this machine that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def use_device(device: torch.device) -> torch.device:
    """Make a GPU the current one of the calling thread: kernels and streams that name no device are on it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """``auto``: bfloat16 where the device computes it fast, else float32."""
    if dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    if device.type != "cpu":
        return torch.bfloat16
    able = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return torch.bfloat16 if able.get("avx512_bf16") or able.get("amx_bf16") or able.get("sve_bf16") else torch.float32


def load_tokenizer(ref: str, cache_dir: Path, report: Report | None = None) -> Any:
    """The tokenizer of a model.

    Raises:
        ModelInvalid: the model has none, or it cannot be read.
    """
    tokenizer = find_tokenizer(ref, cache_dir, report)
    if tokenizer is None:
        raise ModelInvalid(f"{ref} has no tokenizer: its folder holds neither tokenizer.json nor tokenizer_config.json")
    return tokenizer


def find_tokenizer(ref: str, cache_dir: Path, report: Report | None = None) -> Any | None:
    """The tokenizer of a model, None if it comes without one.

    Raises:
        ModelInvalid: it cannot be read.
    """
    from transformers import AutoTokenizer

    folder = Path(resolve_model(ref, cache_dir, report))
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not any((folder / name).is_file() for name in files):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ModelInvalid(f"the tokenizer of {ref} cannot be read: {error}") from error
    tokenizer.generation_stops = _generation_stops(folder, tokenizer)
    return tokenizer


def _generation_stops(folder: Path, tokenizer: Any) -> tuple[str, ...]:
    """Texts of the special tokens that the model stops at, as its own files say."""
    told: Any = None
    for name in ("generation_config.json", "config.json"):  # transformers takes the other where the one is missing
        with suppress(OSError, ValueError, AttributeError):
            told = told or json.loads((folder / name).read_text("utf-8")).get("eos_token_id")
    special = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = told if isinstance(told, list) else [told]
    return tuple(special[number] for number in ids if isinstance(number, int) and number in special)


def load_target(
    ref: str,
    cache_dir: Path,
    *,
    dtype: str = "auto",
    device: str | torch.device = "auto",
    report: Report | None = None,
    while_running: bool = False,
) -> LoadedTarget:
    """Load a model and freeze it.

    Args:
        ref: the model.
        cache_dir: the user's cache.
        dtype: ``float32``, ``bfloat16`` or ``auto``.
        device: as ``choose_device`` takes it, or chosen already. The calling thread is the one that will use it.
        report: told about a download.
        while_running: other threads create tensors meanwhile: leaves the global default dtype alone, at the price of
            holding the weights in float32 for a moment.

    Raises:
        ModelInvalid: it cannot be had, cannot be read, or has no stack of decoder layers.
    """
    where = use_device(choose_device(device) if isinstance(device, str) else device)
    kind = choose_dtype(dtype, where)
    folder = Path(resolve_model(ref, cache_dir, report))
    model = _read_model(ref, folder, torch.float32 if while_running else kind)
    model.eval().requires_grad_(False)
    if while_running:
        # Parameters only: buffers such as the rotary frequencies stay as precise as transformers keeps them.
        for weight in model.parameters():
            weight.data = weight.data.to(kind)
    model = model.to(where)
    base, layers = find_decoder(model)
    embedding = model.get_input_embeddings()
    text = model.config.get_text_config(decoder=True)
    return LoadedTarget(
        ref=ref,
        folder=folder,
        model=model,
        base=base,
        layers=layers,
        hidden_size=int(embedding.weight.shape[1]),
        num_layers=len(layers),
        vocab_size=int(embedding.weight.shape[0]),
        max_positions=int(getattr(text, "max_position_embeddings", None) or 0),
        dtype=kind,
        device=where,
    )


def find_decoder(model: Any) -> tuple[Any, Sequence[nn.Module]]:
    """The decoder inside a causal language model, and its layers; finds the text tower of a wrapper.

    Raises:
        ModelInvalid: there is no stack of as many decoder layers as the config says.
    """
    base = model.get_decoder()
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    layers = next(
        (getattr(base, name) for name in ("layers", "h") if isinstance(getattr(base, name, None), nn.ModuleList)), None
    )
    if base is model or layers is None or len(layers) != count:
        raise ModelInvalid(
            f"{type(model).__name__}: found no stack of {count} decoder layers to tap in {type(base).__name__} "
            "(supported: decoder-only models of transformers such as Llama, Qwen2 and Qwen3, "
            "and wrappers with such a text tower)"
        )
    return base, list(layers)


def _read_model(ref: str, folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        config = AutoConfig.from_pretrained(folder)
        known = type(config) in AutoModelForCausalLM._model_mapping
        loader = AutoModelForCausalLM if known else AutoModelForImageTextToText
        with quiet():
            model, info = loader.from_pretrained(folder, config=config, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelInvalid(f"{ref} cannot be loaded: {error}") from error
    if info["missing_keys"] or info["mismatched_keys"]:
        wrong = sorted(map(str, {*info["missing_keys"], *info["mismatched_keys"]}))
        raise ModelInvalid(
            f"{ref}: {len(wrong)} tensors are missing from its files or have another shape, for instance {wrong[0]}; "
            "they would be random (fetch the model again)"
        )
    return model
