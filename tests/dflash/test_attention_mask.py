"""Who sees whom, and the backends that must agree on it."""

from __future__ import annotations

import warnings

import pytest
import torch

from flowdflash.dflash.mask import AttentionMask, Backend, attend, block_mask, draft_mask
from flowdflash.errors import ModelInvalid

BACKENDS: tuple[Backend, ...] = ("sdpa", "eager", "flex")


def test_golden_example_of_two_blocks() -> None:
    mask = block_mask(
        torch.tensor([[2, 3]]), torch.ones(1, 2, dtype=torch.bool), context=6, block_size=3, backend="sdpa"
    )
    assert mask.visible is not None
    seen = [torch.nonzero(row)[:, 0].tolist() for row in mask.visible[0, 0]]
    assert seen == [[0, 1, 6, 7, 8]] * 3 + [[0, 1, 2, 9, 10, 11]] * 3


def test_n2_a_slot_without_a_block_sees_itself_alone() -> None:
    keep = torch.tensor([[True, False]])
    mask = block_mask(torch.tensor([[2, 5]]), keep, context=6, block_size=3, backend="eager")
    assert mask.visible is not None
    assert [torch.nonzero(row)[:, 0].tolist() for row in mask.visible[0, 0, 3:]] == [[9, 10, 11]] * 3


@pytest.mark.parametrize("seed", range(6))
def test_l10_backends_agree(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    b, A, B, S, H, kv, d = 2, (1, 3, 5, 7, 8, 40)[seed], (4, 3, 2, 5, 1, 8)[seed], 17 + seed, 4, 2, 8
    anchors = torch.randint(0, S - 1, (b, A), generator=rng)
    keep = torch.rand(b, A, generator=rng) > 0.3
    q = torch.randn(b, H, A * B, d, generator=rng)
    k, v = torch.randn(b, kv, S + A * B, d, generator=rng), torch.randn(b, kv, S + A * B, d, generator=rng)
    outs = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for backend in BACKENDS:
            mask = block_mask(anchors, keep, context=S, block_size=B, backend=backend)
            outs.append(attend(q, k, v, mask))
    for other in outs[1:]:
        torch.testing.assert_close(other, outs[0], atol=1e-5, rtol=1e-5)


def test_attention_is_grouped_query_attention_by_definition() -> None:
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    visible = torch.rand(1, 1, 3, 5) > 0.4
    visible[..., 0] = True
    out = attend(q, k, v, AttentionMask("sdpa", visible=visible))
    for head in range(4):
        scores = (q[0, head] @ k[0, head // 2].T / 8**0.5).masked_fill(~visible[0, 0], float("-inf"))
        torch.testing.assert_close(out[0, head], scores.softmax(-1) @ v[0, head // 2], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_l9_no_backend_runs_without_a_mask(backend: Backend) -> None:
    with pytest.raises(ModelInvalid, match="no mask"):
        AttentionMask(backend)


def test_l9_a_backend_that_cannot_mask_is_refused() -> None:
    with pytest.raises(ModelInvalid, match="flash_attention_2"):
        AttentionMask("flash_attention_2", visible=torch.ones(1, 1, 1, 1, dtype=torch.bool))  # type: ignore[arg-type]


def test_flex_refuses_to_train_where_it_has_no_backward() -> None:
    mask = block_mask(torch.tensor([[2]]), torch.tensor([[True]]), context=4, block_size=2, backend="flex")
    q = torch.randn(1, 2, 2, 8, requires_grad=True)
    with pytest.raises(ModelInvalid, match="no backward on cpu"):
        attend(q, torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8), mask)


def test_the_rule_when_serving_is_the_rule_when_training() -> None:
    starts, sizes = torch.tensor([2, 5]), torch.tensor([3, 3])
    serving = draft_mask(starts, sizes, context=7, slots=3)
    training = block_mask(starts[:, None], torch.ones(2, 1, dtype=torch.bool), context=7, block_size=3, backend="sdpa")
    assert serving.visible is not None and training.visible is not None
    assert torch.equal(serving.visible, training.visible)


def test_a_short_block_does_not_see_its_padding_slots() -> None:
    mask = draft_mask(torch.tensor([1]), torch.tensor([2]), context=1, slots=4)
    assert mask.visible is not None
    assert mask.visible[0, 0, :2].tolist() == [[True, True, True, False, False]] * 2
    assert mask.visible[0, 0].any(dim=-1).all()
