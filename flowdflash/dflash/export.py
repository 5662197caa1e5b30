"""The published on-disk form of a DFlash draft: ``config.json`` and ``model.safetensors``, as servers read it.

Servers ignore unknown tensors and do not report missing ones, so the writer compares names and shapes itself, and the
reader is strict. Neither guesses: a choice made in training that is absent from the file, or written twice with
different values, is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowdflash.dflash.config import DraftConfig, tensor_shapes
from flowdflash.dflash.model import DFlashDraft
from flowdflash.errors import ModelInvalid

ExportDtype = Literal["bfloat16", "float16", "float32"]
_DTYPES: dict[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_PLAIN_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
# Options that other trainers write and this model does not have: (key, values that mean "absent").
_UNSUPPORTED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("hidden_act", ("silu",)),
    ("attention_bias", (False,)),
    ("attention_dropout", (0, 0.0)),
    ("use_sliding_window", (False,)),
    ("is_causal", (False,)),
    ("causal", (False,)),
    ("use_swa", (False,)),
    ("attention_sink_bias", (False,)),
    ("attention_value_scale", (1, 1.0)),
    ("projector_type", ()),
    ("conv_kernel_size", ()),
    ("selector_rank", ()),
    ("output_multiplier", (1, 1.0)),
    ("final_logit_softcapping", ()),
    ("input_embedding_scale", (1, 1.0)),
    ("draft_vocab_size", ()),
    ("target_hidden_size", ()),
    ("is_neox_style", (True,)),
    ("logit_scale", (1, 1.0)),
)


def zlab_config(
    config: DraftConfig, *, dtype: ExportDtype = "bfloat16", provenance: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The ``config.json`` of a draft.

    Args:
        config: shape of the draft.
        dtype: of the stored tensors.
        provenance: where it comes from (target's name and revision, data, ...), kept under the key ``flowdflash``.
    """
    if dtype not in _DTYPES:
        raise ModelInvalid(f"export dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
    eos = config.eos_token_id
    written: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **{key: getattr(config, key) for key in _PLAIN_KEYS},
        "initializer_range": config.initializer_range,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            "block_size": config.block_size,
            "num_target_layers": config.num_target_layers,
        },
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": config.num_hidden_layers,
        # Both spellings: some servers read one, some the other, and an absent base is silently taken as 1e6.
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": False,
        "dtype": dtype,
        "torch_dtype": dtype,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "pad_token_id": config.pad_token_id,
    }
    if provenance:
        written["flowdflash"] = dict(provenance)
    return written


def check_tensors(config: DraftConfig, tensors: Mapping[str, Tensor], what: str) -> None:
    """Refuse tensors whose names or shapes are not exactly those of a draft of this shape."""
    wanted = tensor_shapes(config)
    problems = [f"{name} is missing" for name in wanted if name not in tensors]
    problems += [f"{name} does not belong to a draft" for name in tensors if name not in wanted]
    problems += [
        f"{name} has shape {list(tensors[name].shape)} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    problems += [f"{n} holds values that are not finite" for n in wanted if n in tensors and not _finite(tensors[n])]
    if problems:
        shown = "; ".join(problems[:6]) + (f"; and {len(problems) - 6} more" if len(problems) > 6 else "")
        raise ModelInvalid(f"{what}: {shown}")


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def export_zlab(
    folder: str | Path,
    config: DraftConfig,
    tensors: Mapping[str, Tensor],
    *,
    dtype: ExportDtype = "bfloat16",
    target_vocab_size: int | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Path:
    """Write a draft for servers to load. The config is written last: a folder without one is not complete.

    Args:
        folder: made if absent.
        config: shape of the draft.
        tensors: exactly the draft's own tensors; nothing of the target.
        dtype: of the file.
        target_vocab_size: rows of the target's embedding table; must be the draft's, where given.
        provenance: see ``zlab_config``.

    Returns:
        The folder.

    Raises:
        ModelInvalid: names, shapes, values or vocabulary are wrong; nothing is written then.
    """
    written = zlab_config(config, dtype=dtype, provenance=provenance)
    if target_vocab_size is not None and target_vocab_size != config.vocab_size:
        raise ModelInvalid(
            f"export: vocab_size {config.vocab_size} is not the target's {target_vocab_size} embedding rows (padding "
            "rows count); a server that shares the target's head would reject every draft"
        )
    check_tensors(config, tensors, "export")
    # Copies: tensors that share memory cannot be saved, and the live model may be training on.
    stored = {name: t.detach().to("cpu", _DTYPES[dtype], copy=True).contiguous() for name, t in tensors.items()}
    check_tensors(config, stored, f"export in {dtype}")
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").unlink(missing_ok=True)
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return out


def load_zlab(folder: str | Path) -> tuple[DraftConfig, DFlashDraft]:
    """Read a draft, strictly.

    Raises:
        ModelInvalid: a file or key is missing, values conflict, an option is not supported, or tensors do not fit.
    """
    path = Path(folder)
    try:
        raw = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelInvalid(f"{path / 'config.json'} cannot be read: {error}") from error
    config = config_from_zlab(raw, where=str(path / "config.json"))
    try:
        tensors = load_file(path / "model.safetensors")
    except Exception as error:
        raise ModelInvalid(f"{path / 'model.safetensors'} cannot be read: {error}") from error
    check_tensors(config, tensors, str(path / "model.safetensors"))
    draft = DFlashDraft(config, seed=None)
    draft.load_state_dict(tensors, strict=True, assign=True)
    return config, draft


def config_from_zlab(raw: Mapping[str, Any], *, where: str = "config.json") -> DraftConfig:
    """The shape of a draft from its ``config.json``.

    Raises:
        ModelInvalid: a key is missing, has two different values, or asks for something this model does not do.
    """
    nested = raw.get("dflash_config") or {}
    if not isinstance(nested, Mapping):
        raise ModelInvalid(f"{where}: dflash_config should be a mapping")
    _refuse_unsupported(raw, nested, where)
    rope = raw.get("rope_parameters") or {}
    theta = _one_value(
        {"rope_theta": raw.get("rope_theta"), "rope_parameters.rope_theta": rope.get("rope_theta")}, where
    )
    values = {key: _one_value({key: raw.get(key)}, where) for key in _PLAIN_KEYS}
    for key in ("mask_token_id", "target_layer_ids", "block_size", "num_target_layers"):
        values[key] = _one_value({f"dflash_config.{key}": nested.get(key), key: raw.get(key)}, where)
    eos = raw.get("eos_token_id")
    try:
        return DraftConfig(
            **{**values, "target_layer_ids": tuple(values["target_layer_ids"])},
            rope_theta=theta,
            initializer_range=raw.get("initializer_range", 0.02),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
            pad_token_id=raw.get("pad_token_id"),
        )
    except (TypeError, ModelInvalid) as error:
        raise ModelInvalid(f"{where}: {error}") from error


def _one_value(places: Mapping[str, Any], where: str) -> Any:
    """The one value that the given places agree on."""
    found = {place: value for place, value in places.items() if value is not None}
    if not found:
        raise ModelInvalid(
            f"{where}: {next(iter(places))} is missing; it must be the value of training, there is no default"
        )
    values = list(found.values())
    if any(value != values[0] for value in values[1:]):
        conflict = " but ".join(f"{place} is {value!r}" for place, value in found.items())
        raise ModelInvalid(f"{where}: {conflict}; they must be equal")
    return values[0]


def _refuse_unsupported(raw: Mapping[str, Any], nested: Mapping[str, Any], where: str) -> None:
    """Refuse configs of drafts that this model would run wrongly."""
    for place, table in (("", raw), ("dflash_config.", nested)):
        for key, harmless in _UNSUPPORTED:
            value = table.get(key)
            if value is not None and value not in harmless:
                raise ModelInvalid(f"{where}: {place}{key} = {value!r} is not supported by this model")
    if "DFlashDraftModel" not in (raw.get("architectures") or ["DFlashDraftModel"]):
        raise ModelInvalid(f"{where}: architectures {raw['architectures']!r} is not a DFlash draft")
    odd = [kind for kind in raw.get("layer_types") or () if kind != "full_attention"]
    if odd:
        raise ModelInvalid(f"{where}: layer_types holds {odd[0]!r}; only full_attention is supported")
    for key in ("rope_scaling", "rope_parameters"):
        kind = (raw.get(key) or {}).get("rope_type", "default")
        if kind != "default":
            raise ModelInvalid(f"{where}: {key} has rope_type {kind!r}; only plain rotary positions are supported")
