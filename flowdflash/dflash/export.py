"""The published on-disk form of a DFlash draft, as servers read it.

Nothing is guessed: a choice made in training that is absent from the file, or written twice with different values, is
an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from flowdflash.dflash.config import DraftConfig
from flowdflash.dflash.folder import (
    CONFIG,
    DTYPES,
    PROVENANCE,
    WEIGHTS,
    ExportDtype,
    check_tensors,
    read_json,
    read_tensors,
    write_folder,
)
from flowdflash.dflash.model import DFlashDraft
from flowdflash.errors import ModelInvalid

PLAIN_KEYS = (
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
    ("input_embedding_scale", (1, 1.0)),
    ("draft_vocab_size", ()),
    ("target_hidden_size", ()),
    ("is_neox_style", (True,)),
    ("partial_rotary_factor", (1, 1.0)),
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
    nested = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
    }
    if config.final_logit_softcapping is not None:
        nested["final_logit_softcapping"] = config.final_logit_softcapping
    return {
        "architectures": [config.architecture],
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        **config.own_keys(),
        "dflash_config": nested,
        **decoder_config(config, dtype),
        **({PROVENANCE: dict(provenance)} if provenance else {}),
    }


def decoder_config(config: DraftConfig, dtype: ExportDtype) -> dict[str, Any]:
    """What a draft's config says of its layers: those of Qwen3, whatever the target is."""
    if dtype not in DTYPES:
        raise ModelInvalid(f"export dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    eos = config.eos_token_id
    return {
        "model_type": "qwen3",
        **{key: getattr(config, key) for key in PLAIN_KEYS},
        "initializer_range": config.initializer_range,
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


def export_zlab(
    folder: str | Path,
    config: DraftConfig,
    tensors: Mapping[str, Tensor],
    *,
    dtype: ExportDtype = "bfloat16",
    target_facts: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Path:
    """Write a draft for servers to load; see ``write_folder`` and ``zlab_config``."""
    written = zlab_config(config, dtype=dtype, provenance=provenance)
    return write_folder(folder, written, config, tensors, dtype=dtype, target_facts=target_facts)


def load_zlab(folder: str | Path) -> tuple[DraftConfig, DFlashDraft]:
    """Read a draft, strictly.

    Raises:
        ModelInvalid: a file or key is missing, values conflict, an option is not supported, or tensors do not fit.
    """
    path = Path(folder)
    config = config_from_zlab(read_json(path / CONFIG), where=str(path / CONFIG))
    tensors = read_tensors(path / WEIGHTS)
    check_tensors(config, tensors, str(path / WEIGHTS))
    draft = config.new_draft(seed=None)
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
    kind = _kind(raw.get("architectures") or [DraftConfig.architecture], where)
    ropes = {f"{key}.rope_theta": (raw.get(key) or {}).get("rope_theta") for key in ("rope_parameters", "rope_scaling")}
    theta = one_value({"rope_theta": raw.get("rope_theta"), **ropes}, where)
    values = {key: one_value({key: raw.get(key)}, where) for key in (*PLAIN_KEYS, *kind.own_fields())}
    for key in ("mask_token_id", "target_layer_ids", "block_size", "num_target_layers"):
        values[key] = one_value({f"dflash_config.{key}": nested.get(key), key: raw.get(key)}, where)
    cap = "final_logit_softcapping"
    caps = {f"dflash_config.{cap}": nested.get(cap), cap: raw.get(cap)}
    eos = raw.get("eos_token_id")
    try:
        return kind(
            **{**values, "target_layer_ids": tuple(values["target_layer_ids"])},
            rope_theta=theta,
            initializer_range=raw.get("initializer_range", 0.02),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
            pad_token_id=raw.get("pad_token_id"),
            final_logit_softcapping=one_value(caps, where) if any(caps.values()) else None,
        )
    except (TypeError, ModelInvalid) as error:
        raise ModelInvalid(f"{where}: {error}") from error


def _kind(architectures: Sequence[str], where: str) -> type[DraftConfig]:
    """Which kind of draft it is: a DFlash draft, or one of those that plugins add."""
    kinds: list[type[DraftConfig]] = [DraftConfig, *DraftConfig.__subclasses__()]
    for kind in kinds:
        if kind.architecture in architectures:
            return kind
    raise ModelInvalid(f"{where}: architectures {architectures!r} is not a DFlash draft, nor one of a plugin here")


def one_value(places: Mapping[str, Any], where: str) -> Any:
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
    odd = [kind for kind in raw.get("layer_types") or () if kind != "full_attention"]
    if odd:
        raise ModelInvalid(f"{where}: layer_types holds {odd[0]!r}; only full_attention is supported")
    plain = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1}
    for key in ("rope_scaling", "rope_parameters"):
        for name, value in (raw.get(key) or {}).items():
            if name != "rope_theta" and value is not None and value != plain.get(name):
                raise ModelInvalid(f"{where}: {key}.{name} = {value!r}; only plain rotary positions are supported")
