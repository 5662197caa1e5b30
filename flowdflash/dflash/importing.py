"""Reads a draft of any known format, strictly, whoever trained it: to go on training it, or to write it in another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from flowdflash.dflash.config import DraftConfig
from flowdflash.dflash.export import config_from_zlab
from flowdflash.dflash.folder import CONFIG, PROVENANCE, WEIGHTS, check_tensors, read_json, read_tensors
from flowdflash.dflash.speculators import config_from_speculators
from flowdflash.errors import ModelInvalid

Format = Literal["zlab", "speculators", "torchspec"]
_TORCHSPEC_NAMES = {"context_proj": "fc", "context_norm": "hidden_norm", "final_norm": "norm"}
_BORROWED = ("embed_tokens.weight", "lm_head.weight")
# What may differ when training goes on: no tensor depends on it, and serving takes the new value.
_FREE = {"block_size", "max_position_embeddings", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id"}


@dataclass(frozen=True, slots=True, eq=False)
class ImportedDraft:
    """A draft as it was read.

    Attributes:
        folder: that its config is in.
        format: of that folder.
        config: its shape, in this package's terms.
        tensors: its own tensors, under the names of ``tensor_shapes``; of a checkpoint in full precision.
        borrowed: embedding and head, where its writer stored them too; they must be the target's.
        provenance: what the writer says of its origin; ``target`` is the model that it drafts for.
    """

    folder: Path
    format: Format
    config: DraftConfig
    tensors: Mapping[str, Tensor]
    borrowed: Mapping[str, Tensor]
    provenance: Mapping[str, Any]


def find_draft(path: str | Path) -> Path:
    """The folder with a draft's config: of an export, of a checkpoint, or of a run's newest checkpoint.

    Raises:
        ModelInvalid: there is none.
    """
    folder = Path(path)
    latest = folder / "checkpoints" / "latest"
    if latest.is_file():
        name = latest.read_text(encoding="utf-8").strip()
        if Path(name).name != name or not name.strip("."):
            raise ModelInvalid(f"{latest} names {name!r}, which is no folder beside it")
        folder = latest.parent / name
    for place in (folder, folder / "draft"):
        if (place / CONFIG).is_file():
            return place
    raise ModelInvalid(f"{path} is neither an exported draft nor a checkpoint nor a run with one (no {CONFIG})")


def read_provenance(folder: Path) -> dict[str, Any]:
    """Where a draft comes from, as far as its config says."""
    raw = read_json(folder / CONFIG)
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    named = {"target": verifier["name_or_path"]} if verifier.get("name_or_path") else {}
    return {**named, **(raw.get(PROVENANCE) or {})}


def load_draft(path: str | Path, *, num_target_layers: int | None = None) -> ImportedDraft:
    """Read a draft.

    Args:
        path: folder of a run, of a checkpoint or of an export.
        num_target_layers: depth of the target, which some formats do not say.

    Raises:
        ModelInvalid: a file, key or tensor is missing or too many, values conflict, or an option is not supported.
    """
    folder = find_draft(path)
    style, config = read_config(folder, num_target_layers)
    weights, tensors = _read(folder)
    borrowed = {}
    if style != "zlab":
        borrowed = {name: tensors.pop(name) for name in _BORROWED if name in tensors}
    if style == "torchspec":
        tensors = {_renamed(name): tensor for name, tensor in tensors.items()}
    check_tensors(config, tensors, str(weights))
    return ImportedDraft(folder, style, config, tensors, borrowed, read_provenance(folder))


def read_config(folder: Path, num_target_layers: int | None) -> tuple[Format, DraftConfig]:
    """Format and shape of the draft in this folder; see ``load_draft``."""
    where = str(folder / CONFIG)
    raw = read_json(folder / CONFIG)
    style: Format
    if "speculators_model_type" in raw:
        style, config = "speculators", config_from_speculators(raw, num_target_layers=num_target_layers, where=where)
    elif raw.get("model_type") == "dflash":
        style, config = "torchspec", _config_from_torchspec(raw, where)
    else:
        style, config = "zlab", config_from_zlab(raw, where=where)
    if num_target_layers not in (None, config.num_target_layers):
        raise ModelInvalid(
            f"{where}: num_target_layers is {config.num_target_layers}, the target has {num_target_layers}"
        )
    return style, config


def _read(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """The tensors of a draft; beside a checkpoint's export lie the same in full precision."""
    state = folder.with_name("state.pt")
    if folder.name != "draft" or not state.is_file():
        return folder / WEIGHTS, read_tensors(folder / WEIGHTS)
    try:
        return state, dict(torch.load(state, map_location="cpu", mmap=True, weights_only=True)["tensors"])
    except Exception as error:
        raise ModelInvalid(f"{state} cannot be read: {type(error).__name__}: {error}") from error


def _config_from_torchspec(raw: Mapping[str, Any], where: str) -> DraftConfig:
    """TorchSpec writes flat keys, and the number of tapped layers as ``num_target_layers``."""
    width = raw.get("target_hidden_size")
    if width not in (None, raw.get("hidden_size")):
        raise ModelInvalid(f"{where}: target_hidden_size = {width!r} is not the draft's hidden_size")
    ours = {"num_target_layers": raw.get("target_num_hidden_layers"), "target_hidden_size": None, "architectures": None}
    return config_from_zlab({**raw, **ours}, where=where)


def _renamed(name: str) -> str:
    first, dot, rest = name.partition(".")
    return _TORCHSPEC_NAMES.get(first, first) + dot + rest


def check_borrowed(draft: ImportedDraft, embed: Tensor, head: Tensor) -> None:
    """Refuse a draft that brought another embedding or head than the target's: without them it drafts something else.

    Raises:
        ModelInvalid: one is not what the target's becomes in the dtype of the file.
    """
    targets = dict(zip(_BORROWED, (embed, head), strict=True))
    for name, own in draft.borrowed.items():
        if not torch.equal(own, targets[name].to(own.dtype)):
            raise ModelInvalid(f"{draft.folder / WEIGHTS}: {name} is not the target's; the draft cannot do without it")


def check_same_draft(draft: ImportedDraft, config: DraftConfig) -> None:
    """Refuse to go on with a draft that is another than the one to be trained.

    Raises:
        ModelInvalid: names every value that differs.
    """
    theirs, ours = draft.config.as_dict(), config.as_dict()
    wrong = [name for name in ours if name not in _FREE and theirs.get(name) != ours[name]]
    other = [f"{name} is {theirs.get(name)} there and {ours[name]} here" for name in wrong]
    if other:
        raise ModelInvalid(f"{draft.folder} holds another draft than this pipeline trains: {'; '.join(other)}")
