"""Facts of well-known models, so that a pipeline can be checked without weights. No torch.

A model reference is one string: a local folder (starts with ``.``, ``/`` or ``~``), a name from this catalogue that
flowdflash can fetch, a Hugging Face id (contains a ``/``), or a toy (``toy:{...}``).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowdflash.target.toy import PREFIX, ToyModel

_SMOLLM2_135M: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_layers": 30,
    "num_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-5,
    "tied": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    # <empty_output>: a reserved token that no chat contains.
    "mask_token_id": 16,
}


def _qwen3(hidden: int, layers: int, heads: int, intermediate: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": 8,
        "head_dim": 128,
        "intermediate_size": intermediate,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tied": tied,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "pad_token_id": 151643,
        # The first row after the tokenizer's last id: what published drafters of this family use.
        "mask_token_id": 151669,
    }


FETCHED = ("SmolLM2-135M-Instruct",)
"""Names without an owner that flowdflash fetches itself."""

KNOWN: Mapping[str, Mapping[str, Any]] = {
    "SmolLM2-135M-Instruct": _SMOLLM2_135M,
    "HuggingFaceTB/SmolLM2-135M-Instruct": _SMOLLM2_135M,
    "Qwen/Qwen3-8B": _qwen3(4096, 36, 32, 12288, tied=False),
    "Qwen/Qwen3-4B": _qwen3(2560, 36, 32, 9728, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 28, 16, 6144, tied=True),
    "Qwen/Qwen3-0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
}
"""Facts by model reference."""


def is_folder(ref: str) -> bool:
    """The reference names a local folder."""
    return ref.startswith((".", "/", "~"))


def facts_of(ref: str) -> Mapping[str, Any] | None:
    """Facts of a model: from the catalogue, from a toy's name, or from a local folder's ``config.json``; else None."""
    if ref in KNOWN:
        return dict(KNOWN[ref])
    if ref.startswith(PREFIX):
        try:
            return ToyModel.from_ref(ref).facts()
        except ValueError:
            return None
    if is_folder(ref):
        return _folder_facts(Path(ref).expanduser())
    return None


def ref_problem(ref: str) -> tuple[str, str]:
    """What is wrong with a model reference and what to do about it; two empty strings if nothing is."""
    if ref.startswith(PREFIX):
        try:
            ToyModel.from_ref(ref)
        except ValueError as error:
            return str(error), ""
        return "", ""
    if is_folder(ref):
        folder = Path(ref).expanduser()
        if not folder.is_dir():
            return f"there is no folder {folder}", "a model folder is what save_pretrained writes"
        if not (folder / "config.json").is_file():
            return f"{folder} holds no model: it has no config.json", "a model folder is what save_pretrained writes"
        return "", ""
    if "/" in ref or ref in FETCHED:
        return "", ""
    close = difflib.get_close_matches(ref, KNOWN, 1, 0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    return (
        f"unknown model {ref!r}",
        f"{hint}name a folder (./model), a Hugging Face id (owner/name) or {', '.join(FETCHED)}",
    )


def same_model(one: str, other: str) -> bool:
    """Two references surely mean the same model, so also the same tokenizer."""
    if one.startswith(PREFIX) and other.startswith(PREFIX):
        try:
            return ToyModel.from_ref(one) == ToyModel.from_ref(other)
        except ValueError:
            return False
    return one == other or (one in KNOWN and KNOWN[one] is KNOWN.get(other))


_NAMES: Mapping[str, tuple[str, ...]] = {
    "model_type": ("model_type",),
    "hidden_size": ("hidden_size", "n_embd"),
    "num_layers": ("num_hidden_layers", "n_layer"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "n_inner"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "hidden_act": ("hidden_act", "hidden_activation", "activation_function"),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
    "rope_theta": ("rope_theta",),
    "rms_norm_eps": ("rms_norm_eps",),
    "tied": ("tie_word_embeddings",),
    "bos_token_id": ("bos_token_id",),
    "eos_token_id": ("eos_token_id",),
    "pad_token_id": ("pad_token_id",),
}
"""Names of the facts in the configs of transformers."""
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_LOGIT_SCALES = ("logits_scaling", "logit_scale", "output_multiplier", "lm_head_multiplier")


def config_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Facts from the content of a ``config.json``; those of the text tower where the model is a wrapper.

    ``unfit`` says why a model cannot be a target, where something speaks against it.
    """
    inner = config["text_config"] if isinstance(config.get("text_config"), Mapping) else {}
    text = {**config, **{name: value for name, value in inner.items() if value is not None}}
    known = {ours: [text[name] for name in theirs if text.get(name) is not None] for ours, theirs in _NAMES.items()}
    facts = {ours: values[0] for ours, values in known.items() if values}
    rope = text.get("rope_parameters") or {}
    # Where layers of a window turn otherwise, the draft, which has none, turns as those that see all.
    rope = rope.get("full_attention", rope)
    if rope.get("rope_theta") is not None:
        facts["rope_theta"] = rope["rope_theta"]
    if "head_dim" not in facts and {"hidden_size", "num_heads"} <= set(facts):
        facts["head_dim"] = facts["hidden_size"] // facts["num_heads"]
    if "num_kv_heads" not in facts and "num_heads" in facts:
        facts["num_kv_heads"] = facts["num_heads"]
    if unfit := _unfit(text):
        facts["unfit"] = unfit
    return facts


def _unfit(text: Mapping[str, Any]) -> str:
    if text.get("is_encoder_decoder"):
        return "it has an encoder; a draft reads the states of a decoder alone"
    odd = sorted(set(text.get("layer_types") or ()) - _LAYER_TYPES)
    if odd:
        return f"its {odd[0]} layers keep a state that cannot be rolled back after a rejected draft"
    scales = [name for name in _LOGIT_SCALES if text.get(name) not in (None, 1)]
    return f"it multiplies its logits ({scales[0]} {text[scales[0]]}), which no draft would be told" if scales else ""


def _folder_facts(folder: Path) -> dict[str, Any] | None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config_facts(config) if isinstance(config, dict) else None
