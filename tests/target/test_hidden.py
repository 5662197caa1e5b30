from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from flowdflash.errors import ModelInvalid
from flowdflash.target.hidden import batch_features, check_hooks, hidden_states, probe_head
from flowdflash.target.load import LoadedTarget, load_embedding_and_head, load_target

from .models import TOY_REF, batch_of, family_folder, parameter_sums, random_rows


def test_39_l5_features_are_the_outputs_of_the_tapped_blocks(toy: LoadedTarget) -> None:
    ids = torch.tensor(random_rows([17]))
    got = hidden_states(toy, (0, 2), ids)
    with torch.no_grad():
        states = toy.base(ids, output_hidden_states=True).hidden_states
    assert torch.equal(got, torch.cat([states[1], states[3]], dim=-1))
    for neighbour in (0, 2):
        assert not torch.allclose(got[..., :32], states[neighbour], atol=1e-3)
    check_hooks(toy, (0, 1, 2))


def test_l5_a_shifted_layer_is_noticed(toy: LoadedTarget) -> None:
    shifted = replace(toy, layers=[toy.layers[i] for i in (1, 0, 2, 3)])
    with pytest.raises(ModelInvalid, match="layer 0 is not"):
        check_hooks(shifted, (0, 2))


def test_l6_the_last_state_of_transformers_is_not_the_last_layers_output(toy: LoadedTarget) -> None:
    with pytest.raises(ModelInvalid, match="layer 3 is not"):
        check_hooks(toy, (3,))


def test_the_forward_ends_at_the_deepest_tapped_layer(toy: LoadedTarget) -> None:
    calls: list[int] = []
    hooks = [len(layer._forward_hooks) for layer in toy.layers]
    handles = [
        layer.register_forward_pre_hook(lambda module, args, number=number: calls.append(number))
        for number, layer in enumerate(toy.layers)
    ]
    head = toy.model.lm_head.register_forward_pre_hook(lambda module, args: calls.append(99))
    try:
        hidden_states(toy, (0, 2), torch.tensor([[1, 2]]))
    finally:
        for handle in [*handles, head]:
            handle.remove()
    assert calls == [0, 1, 2]
    assert [len(layer._forward_hooks) for layer in toy.layers] == hooks, "a hook was left behind"


def test_41_batch_mates_padding_and_repeats_change_nothing(toy: LoadedTarget) -> None:
    rows = random_rows([23, 61, 40])
    alone = [batch_features(toy, (0, 2), batch_of([row]))[0] for row in rows]
    for _ in range(2):
        for order in ((0, 1, 2), (2, 0, 1)):
            together = batch_features(toy, (0, 2), batch_of([rows[i] for i in order], pad=7))
            for place, i in enumerate(order):
                torch.testing.assert_close(together[place, : len(rows[i])], alone[i], atol=1e-5, rtol=0)
                assert not together[place, len(rows[i]) :].any(), "padding is zero"
    again = [batch_features(toy, (0, 2), batch_of([row]))[0] for row in rows]
    assert all(torch.equal(a, b) for a, b in zip(alone, again, strict=True))


def test_43_w2_a_target_with_dropout_is_steady_and_unchanged(tmp_path: Path) -> None:
    target = load_target(str(family_folder("gpt2", tmp_path / "model")), tmp_path, dtype="float32", device="cpu")
    before = parameter_sums(target.model)
    batch = batch_of(random_rows([30, 12]))
    first = batch_features(target, (0, 2), batch)
    assert torch.equal(first, batch_features(target, (0, 2), batch))
    assert not first.requires_grad
    assert parameter_sums(target.model) == before
    target.model.train()
    with pytest.raises(ModelInvalid, match="train mode"):
        batch_features(target, (0, 2), batch)


def test_features_can_be_used_under_autograd(toy: LoadedTarget) -> None:
    features = batch_features(toy, (0, 2), batch_of(random_rows([9, 5])))
    weight = torch.ones(64, 2, requires_grad=True)
    (features @ weight).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("ref", [TOY_REF, 'toy:{"tied":true,"family":"qwen3"}'])
def test_w1_probe_is_the_borrowed_head_applied_to_the_final_states(cache: Path, ref: str) -> None:
    target = load_target(ref, cache, dtype="float32", device="cpu")
    probe = probe_head(target, batch_of(random_rows([23, 5])))
    assert probe.hidden.shape == (8, 32)
    assert probe.logits.shape == (8, 272)
    head = load_embedding_and_head(ref, cache).head
    torch.testing.assert_close(probe.hidden @ head.T, probe.logits, atol=1e-4, rtol=1e-4)
    assert probe_head(target, batch_of([[1, 2, 3]])).hidden.shape == (3, 32)


def test_ids_of_another_vocabulary_and_rows_too_long_are_named(toy: LoadedTarget) -> None:
    with pytest.raises(ModelInvalid, match=r"token id 272 .* tokenised for another model"):
        batch_features(toy, (0, 2), batch_of([[1, 272]]))
    with pytest.raises(ModelInvalid, match="sample of 5000 tokens"):
        batch_features(toy, (0, 2), batch_of([np.ones(5000, int).tolist()]))
