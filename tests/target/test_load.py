from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig

from flowdflash.errors import ModelInvalid
from flowdflash.target.hidden import check_hooks
from flowdflash.target.load import choose_device, choose_dtype, find_decoder, load_target, replica_device

from .models import TOY_REF, family_folder, llama_folder


@pytest.mark.parametrize("ref", [TOY_REF, 'toy:{"family":"qwen3","tied":true}'])
def test_56_a_target_is_frozen_and_in_eval_mode(cache: Path, ref: str) -> None:
    target = load_target(ref, cache, dtype="float32", device="cpu")
    assert not any(p.requires_grad for p in target.model.parameters())
    assert not any(module.training for module in target.model.modules())
    assert (target.num_layers, len(target.layers), target.hidden_size, target.vocab_size) == (4, 4, 32, 272)
    assert (target.dtype, target.max_positions) == (torch.float32, 4096)


def test_39_layers_of_a_text_tower_are_found_not_those_of_the_pictures(tmp_path: Path) -> None:
    folder = family_folder("llava", tmp_path / "model")
    target = load_target(str(folder), tmp_path, dtype="float32", device="cpu")
    assert target.num_layers == 4
    assert {type(layer).__name__ for layer in target.layers} == {"LlamaDecoderLayer"}
    check_hooks(target, (0, 2))
    from flowdflash.target.load import load_embedding_and_head

    embed, head, tied = load_embedding_and_head(str(folder), tmp_path)
    assert torch.equal(embed, target.model.get_input_embeddings().weight)
    assert torch.equal(head, target.model.get_output_embeddings().weight)
    assert not tied


def test_other_families_work_by_their_layers(tmp_path: Path) -> None:
    target = load_target(str(family_folder("gpt2", tmp_path / "model")), tmp_path, dtype="float32", device="cpu")
    assert target.num_layers == 4
    check_hooks(target, (0, 2))


def test_a_model_without_a_stack_of_layers_is_refused() -> None:
    class Odd(nn.Module):
        config = LlamaConfig(num_hidden_layers=2)

        def get_decoder(self) -> nn.Module:
            return nn.Linear(1, 1)

    with pytest.raises(ModelInvalid, match="no stack of 2 decoder layers"):
        find_decoder(Odd())


def test_44_missing_weights_are_an_error_not_random(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelInvalid, match=r"1 tensors are missing.*lm_head\.weight"):
        load_target(str(folder), tmp_path, dtype="float32", device="cpu")


def test_loading_while_others_compute_leaves_the_default_dtype_alone(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[torch.dtype] = []
    set_default = torch.set_default_dtype
    monkeypatch.setattr(torch, "set_default_dtype", lambda dtype: (changes.append(dtype), set_default(dtype)))
    early = load_target(TOY_REF, cache, dtype="bfloat16", device="cpu")
    assert torch.bfloat16 in changes
    changes.clear()
    late = load_target(TOY_REF, cache, dtype="bfloat16", device="cpu", while_running=True)
    assert torch.bfloat16 not in changes
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(early.model(ids).logits, late.model(ids).logits)


def test_replicas_leave_the_first_gpu_to_the_drafter_while_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for gpus, wanted in ((1, [0]), (2, [1, 0]), (4, [1, 2, 3, 0])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        for device in ("auto", "cuda"):
            assert [replica_device(device, i) for i in range(gpus)] == [torch.device(f"cuda:{n}") for n in wanted]
            with pytest.raises(ModelInvalid, match=f"{gpus} GPUs"):
                replica_device(device, gpus)
    assert [replica_device("cuda:3,cuda:1", i).index for i in range(2)] == [3, 1]
    assert replica_device("cuda:2", 0).index == 2
    assert replica_device("cpu", 5) == torch.device("cpu")


def test_devices_and_dtypes_are_chosen_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == replica_device("auto", 3) == torch.device("cpu")
    for choose in (choose_device, lambda device: replica_device(device, 0)):
        with pytest.raises(ModelInvalid, match="0 GPUs"):
            choose("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda:0")
    assert choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ModelInvalid, match="2 GPUs"):
        choose_device("cuda:2")
    with pytest.raises(ModelInvalid, match="unknown device"):
        choose_device("gpu")
    cpu = torch.device("cpu")
    assert choose_dtype("float32", cpu) == torch.float32
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    assert choose_dtype("auto", cpu) == torch.bfloat16
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    assert choose_dtype("auto", cpu) == torch.float32
