"""Packed rows: documents end to end in one row train the draft as they would in rows of their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowdflash.dflash.anchors import draw_anchors, valid_anchors, without_anchor
from flowdflash.dflash.documents import documents, positions
from flowdflash.dflash.head import Head
from flowdflash.dflash.loss import LossSums, block_labels
from flowdflash.dflash.mask import attend, block_mask
from flowdflash.dflash.model import DFlashDraft
from flowdflash.dflash.training import LossOptions, training_loss, training_step_inputs
from flowdflash.errors import ModelInvalid

Make = Callable[..., Any]
LENGTHS = [24, 3, 13, 1, 30]


def end_to_end(column: Tensor, lengths: Tensor) -> Tensor:
    return torch.cat([row[:length] for row, length in zip(column, lengths.tolist(), strict=True)])[None]


def packed(rows: Any) -> Any:
    columns = {name: end_to_end(getattr(rows, name), rows.lengths) for name in ("input_ids", "loss_mask", "features")}
    return replace(rows, **columns)


def packed_anchors(anchors: Tensor, keep: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    starts = lengths.cumsum(0) - lengths
    row = torch.cat([one[kept] + start for one, kept, start in zip(anchors, keep, starts, strict=True)])[None]
    return row, torch.ones_like(row, dtype=torch.bool)


def train(draft: DFlashDraft, rows: Any, anchors: Tensor, keep: Tensor, **options: Any) -> tuple[LossSums, Tensor]:
    draft.zero_grad()
    sums = training_loss(
        draft,
        rows.embed,
        Head(rows.head),
        rows.input_ids,
        rows.loss_mask,
        rows.lengths,
        rows.features,
        anchors,
        keep,
        LossOptions(**options),
    )
    sums.num.backward()
    return sums, torch.cat([p.grad.flatten() for p in draft.parameters() if p.grad is not None])


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("label_gap", ["cut", "keep"])
def test_l7_packed_documents_train_as_rows_of_their_own(
    make_draft: Make, make_rows: Make, backend: str, label_gap: str
) -> None:
    draft, rows = make_draft(scale=2.0), make_rows(LENGTHS, prompt=2)
    anchors, keep = draw_anchors(
        rows.loss_mask.numpy(), rows.lengths.numpy(), rows.sample_ids, num_anchors=6, seed=7, epoch=0
    )
    apart, gradient_apart = train(draft, rows, anchors, keep, backend=backend, label_gap=label_gap)
    row = packed(rows)
    together, gradient = train(
        draft, row, *packed_anchors(anchors, keep, rows.lengths), backend=backend, label_gap=label_gap
    )
    assert int(apart.terms) > 20 and together.num.item() == pytest.approx(apart.num.item(), rel=1e-5)
    assert together.den.item() == pytest.approx(apart.den.item(), rel=1e-6)
    for name in ("terms", "anchors", "correct_per_slot", "terms_per_slot"):
        assert torch.equal(getattr(together, name), getattr(apart, name)), name
    scale = gradient_apart.abs().max()
    torch.testing.assert_close(gradient / scale, gradient_apart / scale, atol=1e-5, rtol=1e-5)


def test_l7_a_document_is_not_changed_by_what_its_neighbours_say(make_draft: Make, make_rows: Make) -> None:
    draft, rows = make_draft(), packed(make_rows([20, 20, 20]))
    anchors, keep = torch.tensor([[24, 38]]), torch.ones(1, 2, dtype=torch.bool)
    loss = train(draft, rows, anchors, keep)[0].num.item()
    other = replace(rows, input_ids=rows.input_ids.clone(), features=rows.features.clone())
    other.input_ids[:, :20], other.input_ids[:, 40:] = 7, 9
    other.features[:, :20] = 3.0
    other.features[:, 40:] = -3.0
    assert train(draft, other, anchors, keep)[0].num.item() == pytest.approx(loss, rel=1e-6)
    # Within the document a token before the anchor counts.
    other.features[:, 20] += 1.0
    assert train(draft, other, anchors, keep)[0].num.item() != pytest.approx(loss, rel=1e-4)


def test_l7_labels_end_with_their_document_and_positions_restart(make_rows: Make, config: Any) -> None:
    lengths, anchors, keep = torch.tensor([6, 4]), torch.tensor([[4, 7]]), torch.ones(1, 2, dtype=torch.bool)
    ids = torch.arange(100, 110)[None]
    labels, valid = block_labels(ids, torch.ones(1, 10, dtype=torch.bool), lengths, anchors, keep, block_size=4)
    assert valid[0].tolist() == [[True, False, False], [True, True, False]]
    assert labels[valid].tolist() == [105, 108, 109]
    _, places, _ = training_step_inputs(config, ids, anchors, keep, lengths=lengths)
    assert places.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4]]
    assert positions(lengths, 10).tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3]]
    found = documents(torch.tensor([1, 2]), torch.arange(3))
    assert [column.tolist() for column in found] == [[0, 1, 1], [0, 1, 1], [1, 3, 3]]


@pytest.mark.parametrize("seed", range(4))
def test_l10_backends_agree_on_packed_rows(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    lengths, B, H, kv, d = torch.tensor([[9, 1, 30, 4], [3, 140], [40, 40, 40], [1, 1]][seed]), 1 + seed, 4, 2, 8
    S = int(lengths.sum())
    chosen = torch.randperm(S, generator=rng)[: max(1, S // 3)].sort().values
    anchors, keep = torch.cat([chosen, torch.zeros(2, dtype=torch.long)])[None], torch.ones(1, len(chosen) + 2) > 0
    keep[:, len(chosen) :] = False
    n = anchors.shape[1] * B
    q = torch.randn(1, H, n, d, generator=rng)
    k, v = (torch.randn(1, kv, S + n, d, generator=rng) for _ in "kv")
    outs = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for backend in ("sdpa", "eager", "flex"):
            mask = block_mask(anchors, keep, context=S, block_size=B, backend=backend, lengths=lengths)  # type: ignore[arg-type]
            outs.append(attend(q, k, v, mask))
    for other in outs[1:]:
        torch.testing.assert_close(other, outs[0], atol=1e-5, rtol=1e-5)
    # By definition: a slot sees its document strictly before its anchor, and its own block.
    number = documents(lengths, torch.arange(S)).number
    block = torch.arange(n) // B
    limit = torch.where(keep[0], anchors[0], 0)[block]
    seen = (torch.arange(S) < limit[:, None]) & (number == number[anchors[0]][block][:, None])
    visible = torch.cat([seen, block[:, None] == block], dim=1)
    scores = (q[0, 0] @ k[0, 0].T / d**0.5).masked_fill(~visible, float("-inf"))
    torch.testing.assert_close(outs[0][0, 0], scores.softmax(-1) @ v[0, 0], atol=1e-5, rtol=1e-5)


def test_attention_over_a_packed_row_costs_what_its_documents_cost() -> None:
    lengths = torch.tensor([50] * 20)
    anchors = torch.arange(0, 1000, 10)[None]
    mask = block_mask(
        anchors, torch.ones_like(anchors) > 0, context=1000, block_size=4, backend="sdpa", lengths=lengths
    )
    sizes = [part.mask.visible.numel() for part in mask.parts if part.mask.visible is not None]
    assert sizes == [20 * (50 + 20)] * 20


def test_anchors_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="must ascend"):
        block_mask(
            torch.tensor([[5, 1]]),
            torch.ones(1, 2) > 0,
            context=6,
            block_size=2,
            backend="sdpa",
            lengths=torch.tensor([3, 3]),
        )


def test_lengths_of_other_rows_are_refused(make_draft: Make, make_rows: Make) -> None:
    rows = make_rows([5, 6])
    wrong = replace(rows, lengths=torch.tensor([5, 6, 1]))
    with pytest.raises(ModelInvalid, match="3 lengths do not fit 2 rows"):
        train(make_draft(), wrong, torch.tensor([[1], [1]]), torch.ones(2, 1) > 0)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 60), min_size=2, max_size=6), limit=st.integers(1, 30), seed=st.integers(0, 99))
def test_anchors_stay_in_their_document_in_proportion_to_its_places(lengths: list[int], limit: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    masks = [rng.random(length) < 0.8 for length in lengths]
    ids = list(range(50, 50 + len(lengths)))
    row = np.concatenate(masks)[None]
    anchors, keep = draw_anchors(row, lengths, ids, num_anchors=limit, seed=seed, epoch=1)
    stops = np.cumsum(lengths)
    valid = [valid_anchors(mask, len(mask)) for mask in masks]
    drawn = anchors[keep].numpy()
    assert drawn.tolist() == sorted(set(drawn.tolist()))
    total, places = sum(min(limit, len(v)) for v in valid), sum(len(v) for v in valid)
    assert len(drawn) == total
    missing = 0
    for start, stop, own in zip(stops - np.array(lengths), stops, valid, strict=True):
        mine = drawn[(drawn >= start) & (drawn < stop)] - start
        assert set(mine.tolist()) <= set(own.tolist())
        assert abs(len(mine) - total * len(own) / max(places, 1)) < 1
        missing += not len(mine)
    assert without_anchor(anchors, keep, np.array(lengths)) == missing


def test_documents_that_use_all_their_places_have_the_anchors_that_they_have_alone() -> None:
    lengths, ids = [12, 30, 7], [4, 5, 6]
    mask = np.arange(30) < np.array(lengths)[:, None]
    apart = packed_anchors(*draw_anchors(mask, lengths, ids, num_anchors=40, seed=1, epoch=2), torch.tensor(lengths))[0]
    row = np.ones((1, sum(lengths)), dtype=bool)
    together, keep = draw_anchors(row, lengths, ids, num_anchors=40, seed=1, epoch=2)
    assert keep.all() and torch.equal(together, apart)
    again, _ = draw_anchors(row, lengths, ids, num_anchors=5, seed=1, epoch=3)
    assert again.shape == (1, 15) and not torch.equal(
        again, draw_anchors(row, lengths, ids, num_anchors=5, seed=1, epoch=4)[0]
    )


def test_a_packed_row_without_a_place_for_an_anchor_trains_to_zero(make_draft: Make, make_rows: Make) -> None:
    rows = packed(make_rows([4, 3, 5], prompt=9))
    anchors, keep = draw_anchors(
        rows.loss_mask.numpy(), rows.lengths.numpy(), rows.sample_ids, num_anchors=4, seed=0, epoch=0
    )
    assert not keep.any() and without_anchor(anchors, keep, rows.lengths.numpy()) == 3
    sums, gradient = train(make_draft(), rows, anchors, keep)
    assert sums.num.item() == 0 and not gradient.any()


def test_fixed_slots_and_lengths_that_do_not_fill_the_row_are_refused() -> None:
    row = np.ones((1, 9), dtype=bool)
    with pytest.raises(ValueError, match="fixed slots"):
        draw_anchors(row, [4, 5], [0, 1], num_anchors=4, seed=0, epoch=0, slots="fixed")
    with pytest.raises(ValueError, match="do not describe one batch"):
        draw_anchors(row, [4, 4], [0, 1], num_anchors=4, seed=0, epoch=0)
