"""The published on-disk form: exact keys, strict reading, and the reference class where it is installed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from flowdflash.dflash.acceptance import summarise
from flowdflash.dflash.anchors import draw_anchors
from flowdflash.dflash.config import DraftConfig, tensor_shapes
from flowdflash.dflash.decode import greedy, speculative_decode
from flowdflash.dflash.export import config_from_zlab, export_zlab, load_zlab, zlab_config
from flowdflash.dflash.head import Head
from flowdflash.dflash.model import DFlashDraft
from flowdflash.dflash.optim import build_optimizer
from flowdflash.dflash.training import training_loss
from flowdflash.errors import ModelInvalid

Make = Callable[..., Any]


def test_w6_the_config_holds_every_key_that_a_server_reads(config: DraftConfig) -> None:
    full = replace(config, eos_token_id=(2, 7), bos_token_id=1, pad_token_id=0)
    assert zlab_config(full, provenance={"target": "tiny", "target_revision": "abc"}) == {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 272,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "initializer_range": 0.02,
        "num_target_layers": 4,
        "block_size": 4,
        "dflash_config": {"mask_token_id": 260, "target_layer_ids": [0, 2], "block_size": 4, "num_target_layers": 4},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": ["full_attention", "full_attention"],
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 2,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": [2, 7],
        "pad_token_id": 0,
        "flowdflash": {"target": "tiny", "target_revision": "abc"},
    }
    assert config_from_zlab(json.loads(json.dumps(zlab_config(full)))) == full


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_w6_the_file_holds_exactly_the_drafts_tensors(make_draft: Make, tmp_path: Path, dtype: Any) -> None:
    draft = make_draft()
    export_zlab(
        tmp_path / "out",
        draft.config,
        draft.state_dict(),
        dtype=dtype,
        target_facts={"vocab_size": 272, "num_layers": 4},
    )
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {name: tuple(t.shape) for name, t in stored.items()} == tensor_shapes(draft.config)
    assert {t.dtype for t in stored.values()} == {getattr(torch, dtype)}
    config, loaded = load_zlab(tmp_path / "out")
    assert config == draft.config
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, draft.state_dict()[name].to(tensor.dtype))


def test_shared_and_live_tensors_are_copied(make_draft: Make, tmp_path: Path) -> None:
    draft = make_draft()
    draft.layers[1].input_layernorm.weight = draft.layers[0].input_layernorm.weight
    export_zlab(tmp_path, draft.config, draft.state_dict(), dtype="float32")
    _, loaded = load_zlab(tmp_path)
    assert torch.equal(loaded.layers[1].input_layernorm.weight, draft.layers[0].input_layernorm.weight)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("norm.weight"), "norm.weight is missing"),
        (lambda t: t.update({"embed_tokens.weight": torch.zeros(272, 32)}), "embed_tokens.weight does not belong"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(272, 32)}), "lm_head.weight does not belong"),
        (
            lambda t: t.update({"fc.weight": torch.zeros(32, 96)}),
            r"fc.weight has shape \[32, 96\] instead of \[32, 64\]",
        ),
        (lambda t: t.update({"norm.weight": torch.full((32,), torch.nan)}), "norm.weight holds values"),
    ],
)
def test_w7_wrong_tensors_are_refused_and_nothing_is_written(
    make_draft: Make, tmp_path: Path, change: Callable[[dict[str, Any]], Any], named: str
) -> None:
    draft = make_draft()
    tensors = dict(draft.state_dict())
    change(tensors)
    with pytest.raises(ModelInvalid, match=named):
        export_zlab(tmp_path / "out", draft.config, tensors)
    assert not (tmp_path / "out").exists()


def test_values_that_overflow_the_file_format_are_refused(make_draft: Make, tmp_path: Path) -> None:
    draft = make_draft()
    tensors = {**draft.state_dict(), "norm.weight": torch.full((32,), 1e30)}
    export_zlab(tmp_path / "wide", draft.config, tensors)
    with pytest.raises(ModelInvalid, match="float16"):
        export_zlab(tmp_path / "narrow", draft.config, tensors, dtype="float16")


def test_w4_another_vocabulary_than_the_targets_is_refused(make_draft: Make, tmp_path: Path) -> None:
    draft = make_draft()
    with pytest.raises(ModelInvalid, match="272 is not the target's 280"):
        export_zlab(tmp_path, draft.config, draft.state_dict(), target_facts={"vocab_size": 280})


@pytest.mark.parametrize("key", ["target_layer_ids", "mask_token_id", "block_size", "num_target_layers"])
def test_w3_a_missing_choice_of_training_is_an_error_naming_the_key(config: DraftConfig, key: str) -> None:
    raw = zlab_config(config)
    del raw["dflash_config"][key]
    raw.pop(key, None)
    with pytest.raises(ModelInvalid, match=f"{key} is missing"):
        config_from_zlab(raw)


@pytest.mark.parametrize("key", ["hidden_size", "rms_norm_eps", "head_dim", "vocab_size"])
def test_a_missing_size_is_an_error_naming_the_key(config: DraftConfig, key: str) -> None:
    raw = zlab_config(config)
    del raw[key]
    with pytest.raises(ModelInvalid, match=f"{key} is missing"):
        config_from_zlab(raw)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"block_size": 8}, "block_size is 4 but block_size is 8"),
        ({"mask_token_id": 259}, "mask_token_id"),
        ({"target_layer_ids": [0, 1]}, "target_layer_ids"),
        ({"num_target_layers": 5}, "num_target_layers"),
        ({"rope_theta": 5e5}, "rope_theta"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 10000.0}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta"),
        ({"attention_bias": True}, "attention_bias"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        ({"draft_vocab_size": 100}, "draft_vocab_size"),
        ({"target_layer_ids": None, "num_hidden_layers": 0}, "num_hidden_layers"),
    ],
)
def test_w10_conflicts_and_foreign_options_are_refused(
    config: DraftConfig, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelInvalid, match=named):
        config_from_zlab({**zlab_config(config), **changes})


def test_older_files_with_one_place_per_key_are_read(config: DraftConfig) -> None:
    raw = zlab_config(config)
    del raw["dflash_config"]["block_size"], raw["dflash_config"]["num_target_layers"], raw["rope_parameters"]
    assert config_from_zlab(raw) == config


def test_an_unreadable_folder_is_an_error_naming_the_file(make_draft: Make, tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match=r"config\.json"):
        load_zlab(tmp_path)
    draft = make_draft()
    export_zlab(tmp_path, draft.config, draft.state_dict())
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ModelInvalid, match=r"model\.safetensors"):
        load_zlab(tmp_path)


@pytest.mark.timeout(60)
def test_i6_an_overfit_draft_is_accepted_to_the_full_block_after_reload(
    make_target: Make, make_draft: Make, tmp_path: Path
) -> None:
    """Train on one greedy row until every slot is right, export, load, decode: every block but the last is full."""
    target = make_target(4, vocab_size=64).float()
    prompt = [3, 14, 15, 9, 2, 6]
    (answer,) = greedy(target, [prompt], max_new_tokens=40)
    assert len(set(answer)) > 8, "the answer repeats itself: the test shows nothing"
    ids = torch.tensor([prompt + list(answer)])
    with torch.no_grad():
        states = target.model(ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[1], states[3]], dim=-1)
    mask = (torch.arange(ids.shape[1]) >= len(prompt) - 1)[None]
    draft = make_draft(scale=1.0, vocab_size=64, mask_token_id=63)
    lengths = torch.tensor([ids.shape[1]])
    anchors, keep = draw_anchors(mask, lengths, [0], num_anchors=1000, seed=0, epoch=0)
    embed, head = target.model.embed_tokens.weight, Head(target.lm_head.weight)
    optimizer = build_optimizer(draft, lr=3e-3)
    for _ in range(400):
        optimizer.zero_grad()
        sums = training_loss(draft, embed, head, ids, mask, lengths, features, anchors, keep)
        if sums.accuracy == 1.0 and sums.loss < 0.05:
            break
        (sums.num / sums.den).backward()
        optimizer.step()
    assert sums.accuracy == 1.0 and sums.eal == 4.0
    export_zlab(tmp_path, draft.config, draft.state_dict(), dtype="float32")
    (result,) = speculative_decode(target, load_zlab(tmp_path)[1], [prompt], max_new_tokens=40)
    assert result.tokens == answer
    assert set(result.produced[:-1]) == {4}


def reference() -> Any:
    """The module of the method's authors, where installed, with its CUDA clock replaced."""
    import time

    pytest.importorskip("dflash")
    module = pytest.importorskip("dflash.model")
    module._cuda_time = time.perf_counter
    return module


@pytest.mark.timeout(60)
def test_w5_w6_the_reference_class_loads_the_export_and_agrees(
    make_draft: Make, make_rows: Make, tmp_path: Path
) -> None:
    from flowdflash.dflash.mask import draft_mask

    draft, rows = make_draft(rms_norm_eps=1e-4, rope_theta=777.0), make_rows([12])
    export_zlab(tmp_path, draft.config, draft.state_dict(), dtype="float32")
    theirs, info = reference().DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    embeds = nn.functional.embedding(torch.tensor([[7, 260, 260, 260]]), rows.embed)
    with torch.no_grad():
        wanted = theirs.eval()(position_ids=torch.arange(16)[None], noise_embedding=embeds, target_hidden=rows.features)
        cache = draft.new_cache(1, 12)
        draft.extend(cache, rows.features, torch.arange(12)[None])
        mask = draft_mask(torch.tensor([12]), torch.tensor([4]), context=12, slots=4)
        ours = draft.propose(embeds, cache, torch.arange(12, 16)[None], mask, 12)
    torch.testing.assert_close(ours @ rows.head.T, wanted @ rows.head.T, atol=1e-5, rtol=1e-5)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seed", range(3))
def test_the_reference_loop_accepts_the_same_lengths(
    make_target: Make, make_draft: Make, tmp_path: Path, seed: int
) -> None:
    module = reference()
    target = make_target(seed, vocab_size=6).float()
    draft: DFlashDraft = make_draft(seed, 8.0, vocab_size=6, mask_token_id=5)
    export_zlab(tmp_path, draft.config, draft.state_dict(), dtype="float32")
    theirs = module.DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for prompt, stop_ids in (([1], []), ([4, 2, 0, 3, 3], [2])):
        for max_new_tokens in (1, 2, 3, 4, 5, 15):
            out = module.dflash_generate(
                theirs, target, torch.tensor([prompt]), max_new_tokens, stop_ids, temperature=0.0, return_stats=True
            )
            (ours,) = speculative_decode(target, draft, [prompt], max_new_tokens=max_new_tokens, stop_ids=stop_ids)
            assert ours.tokens == tuple(out.output_ids[0, len(prompt) :].tolist())
            assert ours.produced == tuple(out.acceptance_lengths)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_reference_decodes_as_plain_greedy_does_with_our_tau(
    make_target: Make, make_draft: Make, tmp_path: Path, family: str
) -> None:
    """Several prompts, decoded together here and one by one there, from the same file in its usual bfloat16."""
    module = reference()
    target = make_target(2, family=family, vocab_size=6, tied=True).float()
    draft: DFlashDraft = make_draft(3, 8.0, vocab_size=6, mask_token_id=5)
    export_zlab(tmp_path / "out", draft.config, draft.state_dict())
    theirs = module.DFlashDraftModel.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ours = load_zlab(tmp_path / "out")[1].float()
    rng = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 5, (n,), generator=rng).tolist() for n in (1, 2, 5, 8, 13, 13)]
    results = speculative_decode(target, ours, prompts, max_new_tokens=24, stop_ids=[4])
    plain = greedy(target, prompts, max_new_tokens=24, stop_ids=[4])
    outs = [
        module.dflash_generate(theirs, target, torch.tensor([prompt]), 24, [4], return_stats=True) for prompt in prompts
    ]
    generated = [tuple(out.output_ids[0, len(p) :].tolist()) for p, out in zip(prompts, outs, strict=True)]
    assert generated == [r.tokens for r in results] == plain
    lengths = [out.acceptance_lengths for out in outs if out.acceptance_lengths]
    wanted = sum(sum(own) / len(own) for own in lengths) / len(lengths)
    total = summarise(results, draft.config.block_size)
    assert total.tau_request_mean == pytest.approx(wanted) and 1.2 < wanted < 4
    assert total.tau_pooled == pytest.approx(sum(map(sum, lengths)) / sum(map(len, lengths)))


def test_nothing_of_the_reference_is_needed_to_import_this_package() -> None:
    assert "dflash" not in {name.split(".")[0] for name in vars(sys.modules["flowdflash.dflash.export"])}
