from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flowdflash.errors import ModelInvalid
from flowdflash.target.load import load_decoder_layers, load_embedding_and_head
from flowdflash.target.weights import tensor_files

from .models import llama_folder


@pytest.mark.parametrize("shard", ["1GB", "60KB"])
@pytest.mark.parametrize("tied", [False, True])
def test_44_head_is_the_targets_own(tmp_path: Path, tied: bool, shard: str) -> None:
    folder = llama_folder(tmp_path / "model", tied=tied, max_shard_size=shard)
    assert len(set(tensor_files(folder).values())) == (1 if shard == "1GB" else len(list(folder.glob("*.safetensors"))))
    assert ("lm_head.weight" in tensor_files(folder)) is not tied
    embed, head, is_tied = load_embedding_and_head(str(folder), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[1, 2, 3]])
    out = model(ids, output_hidden_states=True)
    assert is_tied is tied
    torch.testing.assert_close(out.hidden_states[-1] @ head.T, out.logits, atol=1e-5, rtol=1e-5)
    assert torch.equal(embed, model.get_input_embeddings().weight)
    assert (embed.dtype, head.dtype) == (torch.float32, torch.float32)


def renamed(folder: Path, rename: dict[str, str], drop: tuple[str, ...] = ()) -> Path:
    tensors = load_file(folder / "model.safetensors")
    for name in list(tensors):
        tensor = tensors.pop(name)
        if name in drop:
            continue
        for old, new in rename.items():
            name = name.replace(old, new, 1) if name.startswith(old) else name
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", ""])
def test_44_prefixed_names_are_found(tmp_path: Path, prefix: str) -> None:
    folder = llama_folder(tmp_path / "model")
    before = load_file(folder / "model.safetensors")
    renamed(folder, {"model.": prefix})
    embed, head, tied = load_embedding_and_head(str(folder), tmp_path)
    assert torch.equal(embed, before["model.embed_tokens.weight"])
    assert torch.equal(head, before["lm_head.weight"])
    assert not tied
    layer = load_decoder_layers(str(folder), tmp_path, [3])[3]
    assert torch.equal(layer["self_attn.q_proj.weight"], before["model.layers.3.self_attn.q_proj.weight"])


def test_44_a_missing_head_of_an_untied_model_is_an_error(tmp_path: Path) -> None:
    folder = renamed(llama_folder(tmp_path / "model"), {}, drop=("lm_head.weight",))
    with pytest.raises(ModelInvalid, match="no output head"):
        load_embedding_and_head(str(folder), tmp_path)


def test_44_a_missing_embedding_is_an_error(tmp_path: Path) -> None:
    folder = renamed(llama_folder(tmp_path / "model"), {}, drop=("model.embed_tokens.weight",))
    with pytest.raises(ModelInvalid, match="embedding"):
        load_embedding_and_head(str(folder), tmp_path)


def test_layers_of_another_tower_are_not_taken(tmp_path: Path) -> None:
    folder = renamed(llama_folder(tmp_path / "model"), {"model.": "model.language_model."})
    tensors = load_file(folder / "model.safetensors")
    tensors["model.vision_tower.layers.3.self_attn.q_proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert load_decoder_layers(str(folder), tmp_path, [3])[3]["self_attn.q_proj.weight"].shape == (32, 32)


def test_a_layer_that_is_not_there_names_the_count(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "model")
    assert sorted(load_decoder_layers(str(folder), tmp_path, [2, 0])) == [0, 2]
    with pytest.raises(ModelInvalid, match="layer 4; it has 4 decoder layers"):
        load_decoder_layers(str(folder), tmp_path, [1, 4])


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "model", max_shard_size="60KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    gone = sorted(set(index["weight_map"].values()))[0]
    (folder / gone).unlink()
    with pytest.raises(ModelInvalid, match=gone):
        load_embedding_and_head(str(folder), tmp_path)
    other = llama_folder(tmp_path / "other")
    whole = (other / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelInvalid, match="fetch the model again"):
        load_embedding_and_head(str(other), tmp_path)
    (other / "model.safetensors").unlink()
    with pytest.raises(ModelInvalid, match="save_pretrained"):
        load_embedding_and_head(str(other), tmp_path)
