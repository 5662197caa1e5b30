"""Reads a few tensors of a model folder without loading the model: embedding, head, final norm, single layers.

A needed tensor that is missing is an error here, never a fresh one: a head that came up random trains without an
error and never learns (pitfall W1).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flowdflash.errors import ModelInvalid
from flowdflash.stage import Report
from flowdflash.target.catalogue import config_facts
from flowdflash.target.fetch import resolve_model

if TYPE_CHECKING:
    import torch

EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte)\.weight$")
HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out)\.weight$")
HEAD_BIAS = re.compile(r"(?:^|\.)(?:lm_head|embed_out)\.bias$")
FINAL_NORM = re.compile(r"(?:^|\.)(?:norm|ln_f|final_layernorm)\.weight$")
LAYER = re.compile(r"^(?P<prefix>.*?)\b(?:layers|h)\.(?P<layer>\d+)\.(?P<name>.+)$")
# A wrapper model may hold a second stack of layers, in a tower that reads pictures or sound.
OTHER_TOWERS = re.compile(r"vision|visual|audio|image|mtp|encoder\.")


class EmbeddingAndHead(NamedTuple):
    """The two matrices that a drafter borrows, ``embed [V, D]`` and ``head [V, D]`` in fp32; ``tied``: they are one."""

    embed: torch.Tensor
    head: torch.Tensor
    tied: bool


def load_embedding_and_head(ref: str, cache_dir: Path, report: Report | None = None) -> EmbeddingAndHead:
    """Embedding and output head of a model, read alone from its safetensors files.

    Raises:
        ModelInvalid: a needed tensor is missing, or its shape does not fit the config.
    """
    folder = Path(resolve_model(ref, cache_dir, report))
    files = tensor_files(folder)
    config = text_config(folder)
    hidden = int(config.hidden_size)
    name = _only(folder, "embedding", (n for n in files if EMBEDDING.search(n) and not OTHER_TOWERS.search(n)))
    biases = [n for n in files if HEAD_BIAS.search(n) and not OTHER_TOWERS.search(n)]
    if biases:
        raise ModelInvalid(f"{folder}: its output head has a bias ({biases[0]}), which a draft cannot borrow")
    embed = _read(folder, {name: files[name]})[name].float()
    if embed.ndim != 2 or embed.shape[1] != hidden:
        raise ModelInvalid(f"{folder}: {name} has shape {list(embed.shape)}, expected rows of hidden size {hidden}")
    heads = [n for n in files if HEAD.search(n) and not OTHER_TOWERS.search(n)]
    if heads:
        head_name = _only(folder, "output head", heads)
        head = _read(folder, {head_name: files[head_name]})[head_name].float()
        if head.shape != embed.shape:
            raise ModelInvalid(f"{folder}: {head_name} has shape {list(head.shape)}, the embedding {list(embed.shape)}")
        # Like transformers: equal matrices are one, different ones are kept apart whatever the config says.
        return EmbeddingAndHead(embed, embed, True) if head.equal(embed) else EmbeddingAndHead(embed, head, False)
    if not tied_head(folder):
        raise ModelInvalid(
            f"{folder} has no output head (lm_head.weight), and its config does not tie the head to the embedding "
            "(tie_word_embeddings): the files are incomplete"
        )
    return EmbeddingAndHead(embed, embed, True)


def load_decoder_layers(
    ref: str, cache_dir: Path, layer_ids: Iterable[int], report: Report | None = None
) -> dict[int, dict[str, torch.Tensor]]:
    """Weights of some decoder layers in fp32, by layer id and by name inside the layer (``self_attn.q_proj.weight``).

    Raises:
        ModelInvalid: a layer is not in the model's files.
    """
    folder = Path(resolve_model(ref, cache_dir, report))
    files = tensor_files(folder)
    wanted = set(layer_ids)
    found: dict[str, tuple[int, str]] = {}
    present: set[int] = set()
    for name in files:
        match = LAYER.match(name)
        if match and not OTHER_TOWERS.search(name):
            present.add(int(match["layer"]))
            if int(match["layer"]) in wanted:
                found[name] = (int(match["layer"]), match["name"])
    missing = sorted(wanted - present)
    if missing:
        raise ModelInvalid(
            f"{folder} has no weights of decoder layer {missing[0]}; it has {len(present)} decoder layers"
        )
    layers: dict[int, dict[str, torch.Tensor]] = {layer: {} for layer in sorted(wanted)}
    for name, tensor in _read(folder, {name: files[name] for name in found}).items():
        layer, inner = found[name]
        if inner in layers[layer]:
            raise ModelInvalid(f"{folder}: more than one tensor could be {inner} of decoder layer {layer}")
        layers[layer][inner] = tensor.float()
    return layers


def load_final_norm(ref: str, cache_dir: Path, report: Report | None = None) -> torch.Tensor:
    """Weight ``[D]`` of the norm between the last decoder layer and the output head, in fp32.

    Raises:
        ModelInvalid: there is none, or no telling which it is.
    """
    folder = Path(resolve_model(ref, cache_dir, report))
    files = tensor_files(folder)
    norms = (n for n in files if FINAL_NORM.search(n) and not LAYER.match(n) and not OTHER_TOWERS.search(n))
    name = _only(folder, "final norm", norms)
    return _read(folder, {name: files[name]})[name].float()


def tensor_files(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor of a model folder.

    Raises:
        ModelInvalid: there are no safetensors files, or the index names one that is not there.
    """
    from safetensors import SafetensorError, safe_open

    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if elsewhere := sorted({file for file in named.values() if Path(file).name != file}):
            raise ModelInvalid(f"{index} names {elsewhere[0]!r}, which does not lie beside it (fetch the model again)")
        where = {name: folder / file for name, file in named.items()}
        absent = sorted({file.name for file in where.values() if not file.is_file()})
        if absent:
            raise ModelInvalid(f"{folder} lacks {', '.join(absent)}, named in {index.name} (fetch the model again)")
        return where
    if not single.is_file():
        raise ModelInvalid(
            f"{folder} has no model.safetensors and no {index.name} "
            "(convert the model: load it with transformers and save_pretrained it)"
        )
    try:
        with safe_open(str(single), framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except SafetensorError as error:
        raise ModelInvalid(f"{single} cannot be read: {error} (fetch the model again)") from error


def target_config_facts(ref: str, folder: Path) -> dict[str, Any]:
    """Facts of a model from its folder, with what its file leaves out because its class has it as a default.

    Raises:
        ModelInvalid: something speaks against it as a target.
    """
    facts = config_facts(model_config(folder).to_dict())
    if "unfit" in facts:
        raise ModelInvalid(f"{ref} cannot be a target: {facts['unfit']}")
    return facts


def text_config(folder: Path) -> Any:
    """The transformers config of the model, or of its text tower where it is a wrapper."""
    return model_config(folder).get_text_config(decoder=True)


def tied_head(folder: Path) -> bool:
    """The config says that the output head is the embedding; in a wrapper, either place may say it."""
    config = model_config(folder)
    return bool(
        getattr(config, "tie_word_embeddings", False)
        or getattr(config.get_text_config(decoder=True), "tie_word_embeddings", False)
    )


def model_config(folder: Path) -> Any:
    """The transformers config of the model.

    Raises:
        ModelInvalid: it cannot be read.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ModelInvalid(f"{folder}: its config.json cannot be used: {error}") from error


def _only(folder: Path, what: str, names: Iterable[str]) -> str:
    candidates = sorted(names)
    if len(candidates) != 1:
        found = (
            f"several could be it: {', '.join(candidates)}" if candidates else "no tensor of that name is in its files"
        )
        raise ModelInvalid(f"{folder}: cannot tell which tensor is the {what}: {found}")
    return candidates[0]


def _read(folder: Path, files: Mapping[str, Path]) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, torch.Tensor] = {}
    try:
        for path in sorted(set(files.values())):
            with safe_open(str(path), framework="pt") as file:
                for name in (n for n, p in files.items() if p == path):
                    tensors[name] = file.get_tensor(name)
    except SafetensorError as error:
        raise ModelInvalid(f"{folder}: weights cannot be read: {error} (fetch the model again)") from error
    return tensors
