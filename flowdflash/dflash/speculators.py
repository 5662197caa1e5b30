"""The format of vLLM's ``speculators``: the same tensors under a nested config, with layers counted in another way.

A draft's layer ``l`` means "output of decoder layer l"; here it is the state that enters layer ``l + 1``, written as
``l + 1``. Embedding and head are read from the target (``verifier``) when the draft is loaded, as its own exports do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from flowdflash.dflash.config import DraftConfig
from flowdflash.dflash.export import PLAIN_KEYS, config_from_zlab, decoder_config, one_value
from flowdflash.dflash.folder import PROVENANCE, ExportDtype, write_folder
from flowdflash.errors import ModelInvalid

_NESTED = "transformer_layer_config"
_CAPTURE_OFFSET = 1


def speculators_config(
    config: DraftConfig,
    target: str,
    architectures: Sequence[str],
    *,
    dtype: ExportDtype = "bfloat16",
    provenance: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The ``config.json`` of a draft.

    Args:
        config: shape of the draft.
        target: folder or Hugging Face id that the target can be loaded from.
        architectures: as the target's ``config.json`` says.
        dtype: of the stored tensors.
        provenance: where it comes from.
    """
    if type(config) is not DraftConfig:
        raise ModelInvalid(f"this format is for DFlash drafts, not for {config.architecture}: export it as zlab")
    # One drafted token per slot after the anchor.
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target, "architectures": list(architectures)},
        },
        _NESTED: decoder_config(config, dtype),
        "draft_vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [layer + _CAPTURE_OFFSET for layer in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        # Not of the format, which leaves the target's depth to whoever loads the target too.
        "num_target_layers": config.num_target_layers,
        "tie_word_embeddings": False,
        "dtype": dtype,
        **({PROVENANCE: dict(provenance)} if provenance else {}),
    }


def export_speculators(
    folder: str | Path,
    config: DraftConfig,
    tensors: Mapping[str, Tensor],
    *,
    target: str,
    architectures: Sequence[str] = (),
    dtype: ExportDtype = "bfloat16",
    target_facts: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Path:
    """Write a draft for vLLM and ``speculators``; see ``write_folder`` and ``speculators_config``."""
    written = speculators_config(config, target, architectures, dtype=dtype, provenance=provenance)
    return write_folder(folder, written, config, tensors, dtype=dtype, target_facts=target_facts)


def config_from_speculators(
    raw: Mapping[str, Any], *, num_target_layers: int | None = None, where: str = "config.json"
) -> DraftConfig:
    """The shape of a draft from its ``config.json``.

    Args:
        raw: its content.
        num_target_layers: depth of the target, which files of other writers do not say.
        where: the file, for errors.

    Raises:
        ModelInvalid: a key is missing, has two different values, or asks for something this model does not do.
    """
    if raw.get("speculators_model_type") != "dflash":
        raise ModelInvalid(f"{where}: speculators_model_type {raw.get('speculators_model_type')!r} is not dflash")
    nested = raw.get(_NESTED)
    if not isinstance(nested, Mapping):
        raise ModelInvalid(f"{where}: {_NESTED} is missing or not a mapping")
    ids = raw.get("aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or any(type(layer) is not int for layer in ids):
        raise ModelInvalid(f"{where}: aux_hidden_state_layer_ids should be a list of layers, got {ids!r}")
    for key in (*PLAIN_KEYS, "rope_theta"):
        if raw.get(key) is not None:
            one_value({f"{_NESTED}.{key}": nested.get(key), key: raw[key]}, where)
    only = {"draft_vocab_size": nested.get("vocab_size"), "target_hidden_size": nested.get("hidden_size")}
    for key, value in {**only, "sample_from_anchor": False}.items():
        if raw.get(key) not in (None, value):
            raise ModelInvalid(f"{where}: {key} = {raw[key]!r} is not supported by this model, only {value!r}")
    depths = {"num_target_layers": raw.get("num_target_layers"), "that of the target": num_target_layers}
    if not any(depths.values()):
        raise ModelInvalid(f"{where} does not say how many layers the target has: name the target")
    inner = {
        **{key: one_value({key: raw.get(key)}, where) for key in ("mask_token_id", "block_size")},
        "target_layer_ids": [layer - _CAPTURE_OFFSET for layer in ids],
        "num_target_layers": one_value(depths, where),
    }
    return config_from_zlab({**nested, "architectures": ["DFlashDraftModel"], "dflash_config": inner}, where=where)
