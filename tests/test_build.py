"""A draft for a given target: what it copies, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from flowdflash.dflash.head import Head
from flowdflash.dflash.model import DFlashDraft
from flowdflash.errors import ModelInvalid
from flowdflash.stage import SilentReport, Vocabulary
from flowdflash.target.load import load_decoder_layers, load_final_norm, load_target
from flowdflash.training.build import (
    DraftOptions,
    choose_mask_token,
    draft_config,
    start_from_target,
    target_facts,
    training_head,
)

TOY = 'toy:{"hidden_size":32,"num_layers":6,"heads":4,"kv_heads":2,"head_dim":8,"vocab_size":64}'


def make(tmp_path: Path, layers: int = 1, taps: tuple[int, ...] = (1, 3)) -> DFlashDraft:
    facts = target_facts(TOY, tmp_path, SilentReport())
    options = DraftOptions(block_size=4, num_hidden_layers=layers)
    return DFlashDraft(draft_config(options, TOY, facts, taps, (64, 32), 63))


def test_a_draft_copies_the_geometry_of_its_target_and_only_that_is_asked_for(tmp_path: Path) -> None:
    config = make(tmp_path).config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)
    assert (config.hidden_size, config.intermediate_size, config.num_target_layers) == (32, 64, 6)
    with pytest.raises(ModelInvalid, match="rope_theta"):
        facts = {k: v for k, v in target_facts(TOY, tmp_path, SilentReport()).items() if k != "rope_theta"}
        draft_config(DraftOptions(4, 1), TOY, facts, (1, 3), (64, 32), 63)
    with pytest.raises(ModelInvalid, match="set head_dim"):
        facts = {k: v for k, v in target_facts(TOY, tmp_path, SilentReport()).items() if k != "head_dim"}
        draft_config(DraftOptions(4, 1), TOY, facts, (1, 3), (64, 32), 63)


@pytest.mark.parametrize(("layers", "copied"), [(1, [4]), (2, [4, 5]), (3, [3, 4, 5])])
def test_a_draft_that_starts_from_the_target_has_the_layers_after_the_deepest_tap(
    tmp_path: Path, layers: int, copied: list[int]
) -> None:
    draft = make(tmp_path, layers)
    start_from_target(draft, TOY, {}, tmp_path)
    states = load_decoder_layers(TOY, tmp_path, copied)
    for mine, theirs in zip(draft.layers, copied, strict=True):
        assert torch.equal(mine.self_attn.k_proj.weight, states[theirs]["self_attn.k_proj.weight"])
        assert torch.equal(mine.mlp.down_proj.weight, states[theirs]["mlp.down_proj.weight"])
    final = load_target(TOY, tmp_path, dtype="float32", device="cpu").base.norm.weight
    assert torch.equal(draft.norm.weight, final) and torch.equal(final, load_final_norm(TOY, tmp_path))
    assert torch.equal(draft.hidden_norm.weight, states[copied[0]]["input_layernorm.weight"])


def test_the_mask_token_is_never_one_that_means_something_else(tmp_path: Path) -> None:
    facts = {"eos_token_id": 2, "pad_token_id": 3, "mask_token_id": 60}
    assert choose_mask_token(None, TOY, facts, 64, tmp_path, None) == 60
    assert choose_mask_token(61, TOY, facts, 64, tmp_path, None) == 61
    for wrong, text in ((2, "bos, eos or pad"), (3, "bos, eos or pad"), (64, "not a row")):
        with pytest.raises(ModelInvalid, match=text):
            choose_mask_token(wrong, TOY, facts, 64, tmp_path, None)
    with pytest.raises(ModelInvalid, match="occurs in the training data"):
        choose_mask_token(None, TOY, facts, 64, tmp_path, Vocabulary(np.array([5, 60]), np.array([5])))


def test_the_training_softmax_covers_the_supervised_tokens_and_the_mask_token() -> None:
    head = Head(torch.randn(64, 32))
    seen = training_head(head, "seen", Vocabulary(np.arange(50), np.array([4, 9, 11])), 63)
    assert seen.ids is not None and seen.ids.tolist() == [4, 9, 11, 63]
    assert training_head(head, "full", None, 63) is head
