"""The draft model: names, shapes, what depends on what, and parity of training with serving."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowdflash.dflash.config import tensor_shapes
from flowdflash.dflash.mask import Backend, draft_mask
from flowdflash.dflash.model import DFlashDraft, DraftConfig, RMSNorm, init_from_layers, init_fusion
from flowdflash.dflash.training import training_step_inputs
from flowdflash.errors import ModelInvalid

BACKENDS: tuple[Backend, ...] = ("sdpa", "eager", "flex")


def states_of(draft: DFlashDraft, rows: Any, anchors: Tensor, embeds: Tensor | None = None, **options: Any) -> Tensor:
    """``[b, A, B, D]`` output of the draft."""
    keep = options.pop("keep", torch.ones_like(anchors, dtype=torch.bool))
    features = options.pop("features", rows.features)
    ids, positions, mask = training_step_inputs(draft.config, rows.input_ids, anchors, keep, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = draft(nn.functional.embedding(ids, rows.embed) if embeds is None else embeds, features, positions, mask)
    return out.view(*anchors.shape, draft.config.block_size, -1)


def test_names_and_shapes_are_the_published_ones(config: DraftConfig) -> None:
    draft = DFlashDraft(config)
    assert {name: tuple(t.shape) for name, t in draft.state_dict().items()} == tensor_shapes(config)
    assert all(p.dtype == torch.float32 and p.requires_grad for p in draft.parameters())
    assert sum(p.numel() for p in draft.parameters()) == config.num_parameters


def test_initial_weights_follow_the_seed_and_leave_the_global_generator_alone(config: DraftConfig) -> None:
    before = torch.get_rng_state()
    one, same, other = DFlashDraft(config, seed=1), DFlashDraft(config, seed=1), DFlashDraft(config, seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.fc.weight, same.fc.weight) and not torch.equal(one.fc.weight, other.fc.weight)
    assert one.fc.weight.std().item() == pytest.approx(config.initializer_range, rel=0.1)
    assert all(torch.equal(p, torch.ones_like(p)) for p in one.parameters() if p.dim() == 1)


@torch.no_grad()
@pytest.mark.parametrize("backend", BACKENDS)
def test_l1_a_block_sees_features_strictly_before_its_anchor(
    make_draft: Callable[..., DFlashDraft], make_rows: Callable[..., Any], backend: Backend
) -> None:
    draft, rows, anchors = make_draft(), make_rows([24]), torch.tensor([[5, 7]])
    base = states_of(draft, rows, anchors, backend=backend)
    for t in range(24):
        changed = rows.features.clone()
        changed[0, t] += 3.0
        out = states_of(draft, rows, anchors, backend=backend, features=changed)
        for block, anchor in enumerate((5, 7)):
            same = torch.equal(out[0, block], base[0, block])
            assert same == (t >= anchor), f"state {t}, anchor {anchor}"


@torch.no_grad()
@pytest.mark.parametrize("backend", BACKENDS)
def test_l2_blocks_do_not_see_each_other(
    make_draft: Callable[..., DFlashDraft], make_rows: Callable[..., Any], backend: Backend
) -> None:
    draft, rows = make_draft(), make_rows([24])
    anchors = torch.tensor([[5, 6, 7, 9]])
    base = states_of(draft, rows, anchors, backend=backend)
    ids, _, _ = training_step_inputs(draft.config, rows.input_ids, anchors, torch.ones(1, 4, dtype=torch.bool))
    embeds = nn.functional.embedding(ids, rows.embed).view(1, 4, 4, -1)
    for block in range(4):
        noisy = embeds.clone()
        others = [j for j in range(4) if j != block]
        noisy[:, others] += 1.0
        out = states_of(draft, rows, anchors, noisy.flatten(1, 2), backend=backend)
        assert torch.equal(out[0, block], base[0, block])
        alone = states_of(draft, rows, anchors[:, block : block + 1], backend=backend)
        torch.testing.assert_close(alone[0, 0], base[0, block], atol=1e-5, rtol=1e-5)
    permuted = states_of(draft, rows, anchors[:, [3, 1, 0, 2]], backend=backend)
    torch.testing.assert_close(permuted, base[:, [3, 1, 0, 2]], atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("backend", BACKENDS)
def test_l3_attention_inside_a_block_goes_both_ways(
    make_draft: Callable[..., DFlashDraft], make_rows: Callable[..., Any], backend: Backend
) -> None:
    draft, rows, anchors = make_draft(), make_rows([24]), torch.tensor([[8]])
    base = states_of(draft, rows, anchors, backend=backend)
    ids, _, _ = training_step_inputs(draft.config, rows.input_ids, anchors, torch.ones(1, 1, dtype=torch.bool))
    for slot in range(4):
        embeds = nn.functional.embedding(ids, rows.embed)
        embeds[:, slot] += 1.0
        out = states_of(draft, rows, anchors, embeds, backend=backend)
        assert not (out[0, 0] == base[0, 0]).all(dim=-1).any(), f"slot {slot} is not seen by all slots"


@torch.no_grad()
@pytest.mark.parametrize("seed", range(4))
def test_l8_training_equals_incremental_serving(
    make_draft: Callable[..., DFlashDraft], make_rows: Callable[..., Any], seed: int
) -> None:
    """The master parity test: context in random chunks, rejected states overwritten, one block at a time."""
    rng = torch.Generator().manual_seed(seed)
    draft, rows, B = make_draft(seed), make_rows([30, 30], seed=seed), 4
    anchors = torch.tensor([[4, 5, 8, 15, 16, 25], [1, 9, 10, 11, 20, 29]])
    trained = states_of(draft, rows, anchors) @ rows.head.T
    cache, done = draft.new_cache(2, 40), [0, 0]
    for j in range(anchors.shape[1]):
        for row in range(2):
            goal = int(anchors[row, j])
            while done[row] < goal:
                n = int(torch.randint(1, goal - done[row] + 1, (1,), generator=rng))
                # The other row is written too, at places behind its anchor: as stale as the rest there.
                chunk = torch.randn(2, n + B, rows.features.shape[-1], generator=rng)
                chunk[row, :n] = rows.features[row, done[row] : done[row] + n]
                starts = torch.tensor(done)
                positions = (starts[:, None] + torch.arange(n + B)).clamp(max=39)
                draft.extend(cache, chunk, positions)
                done[row] += n
        starts = anchors[:, j]
        block = torch.full((2, B), draft.config.mask_token_id)
        block[:, 0] = rows.input_ids.gather(1, starts[:, None])[:, 0]
        mask = draft_mask(starts, torch.tensor([B, B]), context=int(starts.max()), slots=B)
        positions = starts[:, None] + torch.arange(B)
        served = (
            draft.propose(nn.functional.embedding(block, rows.embed), cache, positions, mask, int(starts.max()))
            @ rows.head.T
        )
        torch.testing.assert_close(served, trained[:, j], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_w5_the_forward_is_the_one_of_qwen3_modules(
    make_draft: Callable[..., DFlashDraft], make_rows: Callable[..., Any]
) -> None:
    """One block after a whole row as context, computed with the norms, rotations and MLP of transformers."""
    from transformers import Qwen3Config
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    draft, rows, S, B = make_draft(rms_norm_eps=1e-3, rope_theta=555.0), make_rows([9]), 9, 4
    config = Qwen3Config(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 555.0},
    )  # fmt: skip
    t = draft.state_dict()

    def norm(x: Tensor, name: str) -> Tensor:
        module = qwen3.Qwen3RMSNorm(x.shape[-1], eps=1e-3)
        module.weight.copy_(t[name])
        return module(x)

    x = nn.functional.embedding(torch.tensor([[7, 260, 260, 260]]), rows.embed)
    context = norm(rows.features @ t["fc.weight"].T, "hidden_norm.weight")
    cos, sin = qwen3.Qwen3RotaryEmbedding(config)(x, torch.arange(S + B)[None])
    for i in range(2):
        p = f"layers.{i}."
        u = norm(x, p + "input_layernorm.weight")
        both = torch.cat([context, u], dim=1)
        q = norm((u @ t[p + "self_attn.q_proj.weight"].T).view(1, B, 4, 8), p + "self_attn.q_norm.weight")
        k = norm((both @ t[p + "self_attn.k_proj.weight"].T).view(1, S + B, 2, 8), p + "self_attn.k_norm.weight")
        v = (both @ t[p + "self_attn.v_proj.weight"].T).view(1, S + B, 2, 8).transpose(1, 2)
        _, k = qwen3.apply_rotary_pos_emb(k.transpose(1, 2), k.transpose(1, 2), cos, sin)
        q, _ = qwen3.apply_rotary_pos_emb(q.transpose(1, 2), q.transpose(1, 2), cos[:, S:], sin[:, S:])
        k, v = qwen3.repeat_kv(k, 2), qwen3.repeat_kv(v, 2)
        attended = (q @ k.transpose(2, 3) / 8**0.5).softmax(-1) @ v
        x = x + attended.transpose(1, 2).flatten(2) @ t[p + "self_attn.o_proj.weight"].T
        mlp = qwen3.Qwen3MLP(config)
        mlp.load_state_dict({n: t[f"{p}mlp.{n}"] for n in mlp.state_dict()})
        x = x + mlp(norm(x, p + "post_attention_layernorm.weight"))
    cache = draft.new_cache(1, S)
    draft.extend(cache, rows.features, torch.arange(S)[None])
    mask = draft_mask(torch.tensor([S]), torch.tensor([B]), context=S, slots=B)
    embeds = nn.functional.embedding(torch.tensor([[7, 260, 260, 260]]), rows.embed)
    ours = draft.propose(embeds, cache, torch.arange(S, S + B)[None], mask, S)
    torch.testing.assert_close(ours, norm(x, "norm.weight"), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_w5_positions_and_rotary_base_matter(
    make_draft: Callable[..., DFlashDraft], make_rows: Callable[..., Any]
) -> None:
    rows, anchors = make_rows([24]), torch.tensor([[9]])
    base = states_of(make_draft(), rows, anchors)
    assert not torch.allclose(states_of(make_draft(rope_theta=500.0), rows, anchors), base, atol=1e-3)


def test_rms_norm_is_computed_in_fp32() -> None:
    norm = RMSNorm(64, 1e-6)
    x = torch.randn(5, 64) * 300
    wanted = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(norm(x), wanted)
    low = norm(x.bfloat16())
    assert low.dtype == torch.bfloat16
    precise = norm(x.bfloat16().float())
    assert torch.equal(low, precise.bfloat16())


@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 4, 64)])
def test_rms_norm_has_the_gradients_of_its_formula(shape: tuple[int, ...]) -> None:
    norm = RMSNorm(64, 1e-3).double()
    x, out = torch.randn(shape).double().requires_grad_(), torch.randn(shape).double()
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
    wanted = norm.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)
    inputs = (x, norm.weight)
    for ours, theirs in zip(
        torch.autograd.grad(norm(x), inputs, out), torch.autograd.grad(wanted, inputs, out), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_bf16_autocast_keeps_parameters_and_gradients_in_fp32(
    make_draft: Callable[..., DFlashDraft], make_rows: Callable[..., Any]
) -> None:
    draft, rows = make_draft(scale=1.0), make_rows([24, 12])
    full = rows.loss(draft)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = rows.loss(draft)
    low.num.backward()
    assert low.loss == pytest.approx(full.loss, rel=0.02)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in draft.parameters())


def test_init_from_layers_copies_what_matches(config: DraftConfig) -> None:
    source = DFlashDraft(config, seed=5)
    states = [
        {k: v for k, v in layer.state_dict().items() if "q_norm" not in k and "k_norm" not in k}
        for layer in source.layers
    ]
    draft = DFlashDraft(config, seed=6)
    fc = draft.fc.weight.clone()
    init_from_layers(draft, states, final_norm=torch.full((32,), 2.0))
    assert torch.equal(draft.fc.weight, fc)
    assert all(torch.equal(a, b) for a, b in zip(draft.layers.parameters(), source.layers.parameters(), strict=True))
    assert torch.equal(draft.norm.weight, torch.full((32,), 2.0))


def test_init_from_layers_refuses_other_shapes_and_missing_tensors(config: DraftConfig) -> None:
    state = DFlashDraft(config).layers[0].state_dict()
    draft = DFlashDraft(config, seed=6)
    before = {k: v.clone() for k, v in draft.state_dict().items()}
    wrong = {**state, "self_attn.k_proj.weight": torch.zeros(32, 32)}
    with pytest.raises(ModelInvalid, match=r"layer 1: self_attn\.k_proj\.weight has shape"):
        init_from_layers(draft, [state, wrong])
    with pytest.raises(ModelInvalid, match=r"mlp\.up_proj\.weight is missing"):
        init_from_layers(draft, [state, {k: v for k, v in state.items() if k != "mlp.up_proj.weight"}])
    with pytest.raises(ModelInvalid, match="1 target layers"):
        init_from_layers(draft, [state])
    assert all(torch.equal(v, before[k]) for k, v in draft.state_dict().items())


def test_init_fusion_starts_the_context_as_the_deepest_tapped_state(config: DraftConfig) -> None:
    draft = DFlashDraft(config)
    norm = torch.rand(config.hidden_size) + 0.5
    init_fusion(draft, norm, others=0.0)
    features = torch.randn(1, 5, config.num_features * config.hidden_size)
    deepest = features[..., -config.hidden_size :]
    expected = torch.nn.functional.rms_norm(deepest, (config.hidden_size,), norm, config.rms_norm_eps)
    torch.testing.assert_close(draft.contexts(features)[0], expected)
    with pytest.raises(ModelInvalid, match="norm"):
        init_fusion(draft, norm[:-1])
