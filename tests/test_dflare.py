"""DFlare drafts: the mixes of layers, their tensors, and all that a kind of draft must do."""

from __future__ import annotations

from pathlib import Path

import flowdflash_dflare
import pytest
import torch
from draft_kinds import SHAPE, decodes_losslessly, learns, resumes_exactly, trains_and_exports
from drafter_fakes import opened
from flowdflash_dflare import DFlareConfig, DFlareDrafter
from pydantic import ValidationError

from flowdflash.dflash.config import tensor_shapes
from flowdflash.dflash.layers import Rotary
from flowdflash.dflash.optim import MuonAdamW

CONFIG = DFlareConfig(**SHAPE)


def test_its_tensors_are_those_of_dflash_without_fc_and_with_its_own() -> None:
    shapes = tensor_shapes(CONFIG)
    assert {name: tuple(t.shape) for name, t in CONFIG.new_draft().state_dict().items()} == shapes
    assert len(shapes) == 13 * 2 + 3 and "fc.weight" not in shapes
    assert shapes["layer_fusion_weights"] == (2, 2)
    assert shapes["layers.1.self_attn.v_proj_target.weight"] == (16, 32)


def test_each_layer_starts_with_its_eye_on_the_tap_of_its_own_depth() -> None:
    nine = {**SHAPE, "num_hidden_layers": 7, "target_layer_ids": tuple(range(1, 34, 4)), "num_target_layers": 36}
    weights = DFlareConfig(**nine).new_draft().state_dict()["layer_fusion_weights"]
    assert weights.argmax(dim=1).tolist() == [0, 1, 2, 3, 5, 6, 7]
    assert weights.sum(dim=1).tolist() == weights.amax(dim=1).tolist() == [2.0] * 7


def test_a_layers_context_is_its_own_mix_of_the_taps_normed() -> None:
    draft = CONFIG.new_draft()
    with torch.no_grad():
        draft.get_parameter("layer_fusion_weights").copy_(torch.tensor([[3.0, 1.0], [1.0, 1.0]]).log())
        draft.hidden_norm.weight.fill_(2.0)
    features = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0))
    for context, (first, second) in zip(draft.contexts(features), ((0.75, 0.25), (0.5, 0.5)), strict=True):
        mixed = first * features[..., :32] + second * features[..., 32:]
        expected = 2 * mixed / (mixed.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()
        torch.testing.assert_close(context, expected)


def test_context_and_block_have_projections_apart_and_one_norm_of_keys() -> None:
    (attention, _), x = (layer.self_attn for layer in CONFIG.new_draft()._layers()), torch.randn(1, 3, 32)
    rotary = Rotary.at(torch.arange(3)[None], CONFIG, torch.float32)
    before = attention.context_keys_values(x, rotary), attention.keys_values(x, rotary)
    with torch.no_grad():
        attention.k_proj.weight.copy_(attention.k_proj_target.weight)
        attention.v_proj.weight.copy_(attention.v_proj_target.weight)
    after = attention.keys_values(x, rotary)
    for context, own, copied in zip(*before, after, strict=True):
        assert torch.equal(context, copied) and not torch.allclose(context, own)


def test_muon_leaves_the_mix_to_adamw(tmp_path: Path) -> None:
    trainer = opened(tmp_path, cls=DFlareDrafter, optimizer="muon").trainer
    assert isinstance(trainer.optimizer, MuonAdamW)
    matrices = {id(p) for p in trainer.optimizer.param_groups[0]["params"]}
    left = [name for name, p in trainer.draft.named_parameters() if p.ndim == 2 and id(p) not in matrices]
    assert left == ["layer_fusion_weights"] and matrices


def test_it_cannot_start_from_the_target() -> None:
    with pytest.raises(ValidationError, match="init"):
        DFlareDrafter.Config(init="target")


def test_every_entry_of_the_mix_is_trained() -> None:
    draft, features = CONFIG.new_draft(), torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(0))
    torch.stack(list(draft.contexts(features)))[..., 0].sum().backward()
    grad = draft.get_parameter("layer_fusion_weights").grad
    assert grad is not None and bool((grad != 0).all())


def test_i1_decoding_is_lossless_and_accepts_what_teacher_forcing_says(tmp_path: Path) -> None:
    decodes_losslessly(CONFIG, tmp_path)


def test_it_learns_a_batch_by_heart(tmp_path: Path) -> None:
    learns(DFlareDrafter, tmp_path)


def test_n10_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    resumes_exactly(DFlareDrafter, tmp_path)


def test_it_trains_is_measured_and_is_exported_under_its_own_name(tmp_path: Path) -> None:
    raw = trains_and_exports(flowdflash_dflare, tmp_path, {"num_features": 3}, type="dflare")
    assert raw["architectures"] == ["QwenDFlareDraftModel"] and raw["block_size"] == 4
    assert raw["dflash_config"]["target_layer_ids"] == [1, 2, 3]
