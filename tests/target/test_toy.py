from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flowdflash.errors import ModelInvalid
from flowdflash.target.load import load_target, load_tokenizer
from flowdflash.target.toy import ToyModel


def test_reference_survives_the_round_trip() -> None:
    toy = ToyModel(family="qwen3", num_layers=6, tied=True, seed=3)
    assert ToyModel.from_ref(toy.ref) == toy
    assert toy.facts()["mask_token_id"] == 260
    assert ToyModel(vocab_size=64).facts()["mask_token_id"] == 63


@pytest.mark.parametrize(
    "ref",
    [
        "toy:{",
        "toy:[]",
        'toy:{"depth":3}',
        'toy:{"heads":3}',
        'toy:{"family":"gpt"}',
        'toy:{"hidden_size":0}',
        'toy:{"mask_token_id":272}',
    ],
)
def test_impossible_toys_are_refused(ref: str) -> None:
    with pytest.raises(ValueError):
        ToyModel.from_ref(ref)


def test_weights_come_from_the_seed(tmp_path: Path) -> None:
    one = load_target("toy:{}", tmp_path / "a", dtype="float32", device="cpu").model.state_dict()
    other = load_target("toy:{}", tmp_path / "b", dtype="float32", device="cpu").model.state_dict()
    changed = load_target('toy:{"seed":1}', tmp_path / "a", dtype="float32", device="cpu").model.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], changed["lm_head.weight"])
    assert not torch.equal(one["lm_head.weight"], one["model.embed_tokens.weight"])


def test_byte_tokenizer_reads_and_writes_any_text(cache: Path) -> None:
    tokenizer = load_tokenizer("toy:{}", cache)
    text = "héllo  世界\n<|im_end|>x"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id) == (256, 258, 260)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], add_generation_prompt=True, tokenize=False)
    assert chat == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"


def test_a_small_vocabulary_has_no_tokenizer(cache: Path) -> None:
    with pytest.raises(ModelInvalid, match="no tokenizer"):
        load_tokenizer('toy:{"vocab_size":64}', cache)
