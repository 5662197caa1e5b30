"""Labels, weights, the chunked head, and sums that add up."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from flowdflash.dflash.head import Head, head_loss
from flowdflash.dflash.loss import (
    auf_weights,
    auto_gamma,
    block_labels,
    decay_weights,
    dpace_weights,
    leading_runs,
    loss_sums,
    slot_decay,
)
from flowdflash.dflash.model import DFlashDraft
from flowdflash.dflash.training import LossOptions, training_loss
from flowdflash.errors import ModelInvalid

KINDS: tuple[Any, ...] = ("kl", "tv")


def labels_of(mask: list[int], anchors: list[int], block_size: int, **options: Any) -> tuple[Tensor, Tensor]:
    S = len(mask)
    return block_labels(
        torch.arange(100, 100 + S)[None],
        torch.tensor([mask], dtype=torch.bool),
        options.pop("lengths", torch.tensor([S])),
        torch.tensor([anchors]),
        options.pop("keep", torch.ones(1, len(anchors), dtype=torch.bool)),
        block_size=block_size,
        **options,
    )


def test_golden_example_of_labels_weights_and_denominator() -> None:
    labels, valid = labels_of([0, 0, 1, 1, 1, 1], [2, 3], 3)
    assert labels.tolist() == [[[103, 104], [104, 105]]] and valid.all()
    weights = decay_weights(3, 4.0)(torch.zeros(1, 2, 2), valid, valid)
    assert weights[0, 0].tolist() == pytest.approx([1.0, 0.7788], abs=1e-4)
    assert weights.sum().item() == pytest.approx(3.5576, abs=1e-4)


def test_l4_the_label_of_slot_k_is_the_token_at_anchor_plus_k() -> None:
    labels, valid = labels_of([1] * 12, [0, 3, 7], 5)
    for j, anchor in enumerate((0, 3, 7)):
        assert labels[0, j].tolist() == [100 + anchor + k for k in range(1, 5)]
    assert valid.all()


def test_labels_end_with_the_row_and_with_its_real_tokens() -> None:
    _, valid = labels_of([0, 0, 1, 1, 1, 1], [4], 4)
    assert valid[0, 0].tolist() == [True, False, False]
    _, valid = labels_of([1] * 8, [2], 4, lengths=torch.tensor([5]))
    assert valid[0, 0].tolist() == [True, True, False]


def test_a_block_is_cut_at_a_gap_unless_told_otherwise() -> None:
    mask = [1, 1, 0, 1, 1, 1]
    assert labels_of(mask, [0], 5)[1][0, 0].tolist() == [True, False, False, False]
    assert labels_of(mask, [0], 5, label_gap="keep")[1][0, 0].tolist() == [True, False, True, True]


def test_a_block_that_is_not_kept_has_no_label() -> None:
    assert not labels_of([1] * 6, [0], 3, keep=torch.tensor([[False]]))[1].any()


@pytest.mark.parametrize(("block_size", "gamma", "total"), [(16, 7.0, 6.631), (10, 5.0, 4.605), (8, 4.0, 3.735)])
def test_n12_decay_starts_at_slot_one(block_size: int, gamma: float, total: float) -> None:
    assert auto_gamma(block_size) == gamma
    decay = slot_decay(block_size, gamma)
    assert decay[0] == 0 and decay[1] == 1
    assert (decay[2:] / decay[1:-1]).tolist() == pytest.approx([math.exp(-1 / gamma)] * (block_size - 2), rel=1e-5)
    assert decay.sum().item() == pytest.approx(total, abs=1e-3)


def test_no_gamma_weighs_all_slots_alike() -> None:
    assert slot_decay(4, None).tolist() == [0, 1, 1, 1]
    assert slot_decay(4, 4.0).tolist() == pytest.approx([0, 1, 0.7788, 0.6065], abs=1e-4)


@pytest.mark.parametrize("chunk", [0, 1, 3, 128])
def test_n5_chunks_change_neither_loss_nor_gradient(chunk: int) -> None:
    hidden = torch.randn(17, 8, dtype=torch.float64, requires_grad=True)
    weight, labels, outer = torch.randn(30, 8).double(), torch.randint(0, 30, (17,)), torch.rand(17).double()
    wanted = nn.functional.cross_entropy(hidden @ weight.T, labels, reduction="none")
    (gradient,) = torch.autograd.grad((wanted * outer).sum(), hidden)
    loss, ce, correct = head_loss(hidden, Head(weight), labels, chunk_slots=chunk)
    (ours,) = torch.autograd.grad((loss * outer).sum(), hidden)
    assert torch.equal(loss, ce) and not ce.requires_grad
    torch.testing.assert_close(ce, wanted)
    torch.testing.assert_close(ours, gradient)
    assert torch.equal(correct, (hidden @ weight.T).argmax(-1) == labels)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("kind", ["kl", "tv"])
def test_a_distilled_loss_and_its_gradient_are_those_of_the_textbook(kind: Any, softcap: float | None) -> None:
    hidden = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)
    weight, taught, labels = torch.randn(30, 8).double(), torch.randn(7, 8).double(), torch.randint(0, 30, (7,))

    def log_probabilities(states: Tensor) -> Tensor:
        logits = states @ weight.T
        return (logits if softcap is None else softcap * torch.tanh(logits / softcap)).log_softmax(-1)

    p, log_q = log_probabilities(taught).exp(), log_probabilities(hidden)
    if kind == "kl":
        wanted = nn.functional.kl_div(log_q, p, reduction="none").sum(-1)
    else:
        wanted = 1 - torch.minimum(p, log_q.exp()).sum(-1)
    (gradient,) = torch.autograd.grad(wanted.sum(), hidden)
    loss, ce, _ = head_loss(hidden, Head(weight, softcap=softcap), labels, taught=taught, kind=kind, chunk_slots=3)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(ce, -log_q.detach().gather(1, labels[:, None])[:, 0])
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), hidden)[0], gradient)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_soft_cap_bends_logits_and_gradient(softcap: float | None) -> None:
    hidden = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)
    weight, labels = torch.randn(30, 8).double(), torch.randint(0, 30, (7,))
    logits = hidden @ weight.T
    wanted = nn.functional.cross_entropy(logits if softcap is None else softcap * torch.tanh(logits / softcap), labels)
    loss, _, _ = head_loss(hidden, Head(weight, softcap=softcap).restricted(torch.arange(30)), labels)
    torch.testing.assert_close(loss.mean(), wanted)
    gradients = [torch.autograd.grad(value, hidden, retain_graph=True)[0] for value in (loss.mean(), wanted)]
    torch.testing.assert_close(*gradients)


def test_golden_values_of_distillation() -> None:
    """Two tokens: the target says .8 and .2, the draft .5 and .5."""
    taught, hidden = torch.tensor([[math.log(4.0), 0.0]]), torch.zeros(1, 2)
    found = [head_loss(hidden, Head(torch.eye(2)), torch.tensor([0]), taught=taught, kind=kind) for kind in KINDS]
    assert [loss.item() for loss, _, _ in found] == pytest.approx([0.8 * math.log(1.6) + 0.2 * math.log(0.4), 0.3])
    same = [head_loss(taught, Head(torch.eye(2)), torch.tensor([0]), taught=taught, kind=kind) for kind in KINDS]
    assert [loss.item() for loss, _, _ in same] == pytest.approx([0.0, 0.0], abs=1e-7)


def test_distillation_without_the_targets_states_is_refused() -> None:
    hidden, labels = torch.randn(2, 8), torch.tensor([1, 2])
    with pytest.raises(ModelInvalid, match="kl needs the last hidden states"):
        head_loss(hidden, Head(torch.randn(5, 8)), labels, kind="kl")
    with pytest.raises(ModelInvalid, match="ce takes no last hidden states"):
        head_loss(hidden, Head(torch.randn(5, 8)), labels, taught=hidden)


def test_l4_the_teacher_of_slot_k_is_the_state_at_the_place_before_its_label(
    make_draft: Callable[..., DFlashDraft], make_rows: Callable[..., Any]
) -> None:
    """One block at anchor 8 of four slots: states 8, 9 and 10 teach it, no other does."""
    draft, rows = make_draft(), make_rows([24])
    args = (rows.input_ids, rows.loss_mask, rows.lengths, rows.features, torch.tensor([[8]]), torch.tensor([[True]]))

    def loss(states: Tensor) -> float:
        options = LossOptions(kind="kl")
        return training_loss(draft, rows.embed, Head(rows.head), *args, options, last_hidden=states).num.item()

    moved = []
    for place in range(24):
        changed = rows.last_hidden.clone()
        changed[0, place] += 1.0
        moved.append(loss(changed) != loss(rows.last_hidden))
    assert [place for place in range(24) if moved[place]] == [8, 9, 10]


def test_golden_values_of_dpace() -> None:
    q, valid = torch.tensor([[[0.8, 0.5, 0.2]]]), torch.ones(1, 1, 3, dtype=torch.bool)
    weights = dpace_weights(0.5)(-q.log(), valid, valid)
    assert weights.flatten().tolist() == pytest.approx([1.98, 1.08, 0.405])
    # A slot that does not count is a factor of 1 and no term of the sum.
    gap = torch.tensor([[[True, False, True]]])
    weights = dpace_weights(0.5)(-q.log() * gap, gap, gap)
    assert weights.flatten().tolist() == pytest.approx([0.9 + 0.9 * 0.6, 0.0, 0.9 * 0.6])
    # At alpha 1 only the slot decides: how many slots follow, itself included.
    assert dpace_weights(1.0)(-q.log(), valid, valid).flatten().tolist() == [3, 2, 1]


def test_golden_values_of_auf() -> None:
    correct = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1], [0, 1, 0, 1]], dtype=torch.bool)
    valid = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]], dtype=torch.bool)
    weights = auf_weights(torch.zeros(4, 4), correct, valid)
    assert weights.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [0, 1, 1, 0]]


@pytest.mark.parametrize(("weights", "kind"), [("decay", "ce"), ("dpace", "ce"), ("auf", "kl"), ("dpace", "tv")])
@pytest.mark.parametrize("chunk", [1, 3, 128])
def test_n5_chunks_change_nothing_in_a_training_step(
    make_draft: Callable[..., DFlashDraft], make_rows: Callable[..., Any], chunk: int, weights: Any, kind: Any
) -> None:
    draft, rows = make_draft(), make_rows([24, 13, 8])
    gradients, losses = [], []
    for size in (0, chunk):
        draft.zero_grad()
        sums = rows.loss(draft, options=LossOptions(chunk_slots=size, weights=weights, kind=kind))
        sums.num.backward()
        losses.append(sums.num.item())
        gradients.append(torch.cat([p.grad.flatten() for p in draft.parameters() if p.grad is not None]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-5, rtol=1e-5)


def test_the_head_without_rows_gives_an_empty_result_with_a_graph() -> None:
    hidden = torch.randn(0, 8, requires_grad=True)
    loss, ce, correct = head_loss(hidden, Head(torch.randn(5, 8)), torch.zeros(0, dtype=torch.long))
    assert loss.shape == ce.shape == correct.shape == (0,) and loss.requires_grad


def test_n6_no_gradient_flows_through_the_weights(
    make_draft: Callable[..., DFlashDraft], make_rows: Callable[..., Any]
) -> None:
    draft, rows = make_draft(), make_rows([24])
    seen: list[Tensor] = []

    def adaptive(ce: Tensor, correct: Tensor, valid: Tensor) -> Tensor:
        assert not ce.requires_grad
        seen.append(dpace_weights(0.5)(ce, correct, valid))
        return seen[-1]

    gradients = []
    for weights in (adaptive, lambda ce, correct, valid: seen[0]):
        draft.zero_grad()
        rows.loss(draft, options=LossOptions(weights=weights)).num.backward()
        assert draft.fc.weight.grad is not None
        gradients.append(draft.fc.weight.grad.clone())
    assert torch.equal(gradients[0], gradients[1])


def test_n11_expected_acceptance_length_counts_leading_runs_per_block() -> None:
    correct = torch.tensor([[[1, 1, 0], [0, 1, 1], [1, 1, 1]]], dtype=torch.bool)
    assert leading_runs(correct).tolist() == [[2, 0, 3]]
    valid, keep = torch.ones_like(correct), torch.ones(1, 3, dtype=torch.bool)
    sums = loss_sums(*torch.zeros(2, 1, 3, 3), correct, valid, keep, decay_weights(4, 4.0))
    assert sums.eal == pytest.approx(2.667, abs=1e-3)
    assert sums.accuracy_per_slot == pytest.approx((2 / 3, 1.0, 2 / 3))


def test_n11_blocks_without_all_labels_neither_break_nor_extend_a_run() -> None:
    correct = torch.tensor([[[1, 1, 1], [1, 0, 0], [0, 0, 0]]], dtype=torch.bool)
    valid = torch.tensor([[[1, 1, 1], [1, 0, 0], [1, 1, 1]]], dtype=torch.bool)
    keep = torch.tensor([[True, True, True]])
    sums = loss_sums(*torch.zeros(2, 1, 3, 3), correct, valid, keep, decay_weights(4, 4.0))
    assert int(sums.full_blocks) == 2 and sums.eal == 1 + 3 / 2
    assert int(sums.terms) == 7
    empty = loss_sums(*torch.zeros(2, 1, 3, 3), correct, valid & False, keep, decay_weights(4, 4.0))
    assert math.isnan(empty.eal) and empty.loss == 0.0


class Oracle(DFlashDraft):
    """A draft that knows the row: slot k gives the one-hot of the token at anchor + k + shift."""

    tokens: Tensor
    shift: int = 0

    def forward(self, block_embeds: Tensor, features: Tensor, position_ids: Tensor, mask: Any) -> Tensor:
        places = (position_ids[:, features.shape[1] :] + self.shift).clamp(max=self.tokens.shape[1] - 1)
        return nn.functional.one_hot(self.tokens.gather(1, places), 32).float() * 50 + 0 * self.fc.weight.sum()


@pytest.mark.parametrize(("shift", "right"), [(0, True), (1, False), (-1, False)])
def test_an_oracle_has_loss_zero_and_a_shifted_one_does_not(config: Any, shift: int, right: bool) -> None:
    from dataclasses import replace

    oracle = Oracle(replace(config, vocab_size=32, mask_token_id=31))
    oracle.tokens, oracle.shift = torch.randint(0, 30, (2, 40), generator=torch.Generator().manual_seed(1)), shift
    anchors = torch.tensor([[5, 9, 30], [4, 5, 6]])
    sums = training_loss(
        oracle,
        torch.randn(32, 32),
        Head(torch.eye(32)),
        oracle.tokens,
        torch.ones(2, 40, dtype=torch.bool),
        torch.tensor([40, 40]),
        torch.zeros(2, 40, 64),
        anchors,
        torch.ones(2, 3, dtype=torch.bool),
    )
    assert int(sums.terms) == 18
    if right:
        assert sums.loss == pytest.approx(0.0, abs=1e-6)
        assert sums.accuracy_per_slot == (1.0, 1.0, 1.0) and sums.eal == 4.0
    else:
        assert sums.loss > 10 and sums.accuracy < 0.3


def test_a_restricted_head_equals_the_softmax_over_its_rows() -> None:
    weight, hidden, ids = torch.randn(30, 8), torch.randn(6, 8), torch.tensor([9, 4, 20, 4, 11])
    head = Head(weight).restricted(ids)
    assert head.ids is not None and head.ids.tolist() == [4, 9, 11, 20]
    labels = torch.tensor([4, 20, 11, 9, 9, 4])
    ce, _, _ = head_loss(hidden, head, labels)
    rows = torch.tensor([0, 3, 2, 1, 1, 0])
    torch.testing.assert_close(
        ce, nn.functional.cross_entropy(hidden @ weight[[4, 9, 11, 20]].T, rows, reduction="none")
    )


@pytest.mark.parametrize("label", [0, 5, 29])
def test_a_label_outside_the_training_vocabulary_is_an_error(label: int) -> None:
    head = Head(torch.randn(30, 8)).restricted(torch.tensor([4, 9, 20]))
    with pytest.raises(ModelInvalid, match=f"token {label} is a label"):
        head_loss(torch.randn(2, 8), head, torch.tensor([4, label]))


def test_unusable_training_vocabularies_are_refused() -> None:
    head = Head(torch.randn(30, 8))
    for ids in ([30], [-1, 3], []):
        with pytest.raises(ModelInvalid, match="training vocabulary"):
            head.restricted(torch.tensor(ids, dtype=torch.long))
    with pytest.raises(ModelInvalid, match="restricted already"):
        head.restricted(torch.tensor([1, 2])).restricted(torch.tensor([1]))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(5, 20), min_size=2, max_size=5))
def test_sums_of_parts_are_the_sums_of_the_whole(lengths: list[int]) -> None:
    rng = torch.Generator().manual_seed(sum(lengths))
    shape = (len(lengths), 4, 3)
    ce, correct = torch.rand(shape, generator=rng), torch.rand(shape, generator=rng) > 0.5
    valid, keep = torch.rand(shape, generator=rng) > 0.2, torch.ones(shape[:2], dtype=torch.bool)
    weights = decay_weights(4, 4.0)
    whole = loss_sums(ce * valid, ce, correct, valid, keep, weights)
    rows = [slice(i, i + 1) for i in range(len(lengths))]
    parts = [loss_sums((ce * valid)[r], ce[r], correct[r], valid[r], keep[r], weights) for r in rows]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    assert total.loss == pytest.approx(whole.loss, rel=1e-5)
    assert total.accuracy_per_slot == whole.accuracy_per_slot
    assert int(total.terms) == int(whole.terms) and int(total.anchors) == int(whole.anchors)
