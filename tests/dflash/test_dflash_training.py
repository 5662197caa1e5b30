"""One training forward as a whole: padding, normalisation, degenerate rows, frozen target, parity with decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowdflash.dflash.head import Head
from flowdflash.dflash.mask import draft_mask
from flowdflash.dflash.model import DFlashDraft, DraftConfig
from flowdflash.dflash.optim import build_optimizer, scale_gradients
from flowdflash.dflash.training import LossOptions, training_loss, training_step_inputs
from flowdflash.errors import ModelInvalid

Make = Callable[..., Any]


def gradient(draft: DFlashDraft) -> Tensor:
    return torch.cat([p.grad.flatten() for p in draft.parameters() if p.grad is not None])


def test_golden_example_of_block_ids_and_positions(config: DraftConfig) -> None:
    small = replace(config, block_size=3)
    ids, positions, _ = training_step_inputs(
        small, torch.arange(100, 106)[None], torch.tensor([[2, 3]]), torch.ones(1, 2, dtype=torch.bool)
    )
    M = config.mask_token_id
    assert ids.tolist() == [[102, M, M, 103, M, M]]
    assert positions.tolist() == [[0, 1, 2, 3, 4, 5, 2, 3, 4, 3, 4, 5]]


def test_d6_a_row_without_anchors_gives_zero_loss_and_zero_gradients(make_draft: Make, make_rows: Make) -> None:
    draft = make_draft()
    for lengths in ([4], [5, 4], [1]):
        draft.zero_grad()
        sums = make_rows(lengths).loss(draft)
        assert sums.num.item() == sums.den.item() == 0 and int(sums.terms) == int(sums.anchors) == 0
        sums.num.backward()
        assert all(p.grad is not None and not p.grad.any() for p in draft.parameters())


def test_n2_empty_rows_beside_full_ones_stay_finite_and_change_nothing(make_draft: Make, make_rows: Make) -> None:
    draft, rows = make_draft(), make_rows([24, 4, 2])
    both = rows.loss(draft)
    both.num.backward()
    mixed = gradient(draft)
    draft.zero_grad()
    alone = rows.take([0]).loss(draft)
    alone.num.backward()
    assert torch.isfinite(mixed).all()
    torch.testing.assert_close(mixed, gradient(draft), atol=1e-4, rtol=1e-4)
    assert both.loss == pytest.approx(alone.loss, rel=1e-5)


def test_a_block_larger_than_the_row_trains_on_what_there_is(make_draft: Make, make_rows: Make) -> None:
    sums = make_rows([7]).loss(make_draft(block_size=16))
    assert int(sums.terms) == 1 and int(sums.full_blocks) == 0


def test_d8_padding_order_and_batch_mates_do_not_matter(make_draft: Make, make_rows: Make) -> None:
    draft, rows = make_draft(), make_rows([24, 13, 9])
    alone = [rows.take([i], columns=int(rows.lengths[i])).loss(draft) for i in range(3)]
    padded = [rows.take([i]).loss(draft) for i in range(3)]
    for a, b in zip(alone, padded, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-5) and int(a.terms) == int(b.terms)
    for order in ([0, 1, 2], [2, 0, 1]):
        whole = rows.take(order).loss(draft)
        assert whole.num.item() == pytest.approx(sum(a.num.item() for a in alone), rel=1e-5)
    junk = replace(rows, features=rows.features.clone(), input_ids=rows.input_ids.clone())
    junk.features[1, 13:], junk.input_ids[1, 13:] = 99.0, 7
    assert junk.loss(draft).loss == pytest.approx(rows.loss(draft).loss, rel=1e-5)


def test_n4_gradients_do_not_depend_on_the_micro_batches(make_draft: Make, make_rows: Make) -> None:
    draft, rows = make_draft(scale=2.0), make_rows([60, 7, 20, 9])
    found = []
    for split in ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]):
        draft.zero_grad()
        den = 0.0
        for part in split:
            longest = int(rows.lengths[part].max())
            sums = rows.take(part, columns=longest).loss(draft, num_anchors=1000)
            sums.num.backward()
            den += float(sums.den)
        scale_gradients(draft.parameters(), den)
        found.append(gradient(draft))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-6, rtol=1e-5)


def test_w2_nothing_of_the_target_is_trained(make_draft: Make, make_rows: Make) -> None:
    draft, rows = make_draft(), make_rows([24, 13])
    embed, head = rows.embed.clone(), rows.head.clone()
    optimizer = build_optimizer(draft, lr=1e-2)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in draft.parameters()}
    for _ in range(3):
        optimizer.zero_grad()
        rows.loss(draft).num.backward()
        optimizer.step()
    assert torch.equal(rows.embed, embed) and torch.equal(rows.head, head)
    assert rows.embed.grad is rows.head.grad is rows.features.grad is None


@pytest.mark.parametrize("which", ["embed", "head"])
def test_w2_a_target_tensor_that_wants_gradients_is_refused(make_draft: Make, make_rows: Make, which: str) -> None:
    rows = make_rows([24])
    with pytest.raises(ModelInvalid, match="must be frozen"):
        replace(rows, **{which: getattr(rows, which).clone().requires_grad_()}).loss(make_draft())


def test_the_row_of_sums_keeps_no_graph_and_loses_no_number(make_draft: Make, make_rows: Make) -> None:
    sums = make_rows([24]).loss(make_draft())
    assert sums.num.requires_grad and not sums.den.requires_grad
    row = sums.row()
    assert not row.requires_grad
    assert row.tolist() == pytest.approx(
        [
            float(sums.num.detach()),
            float(sums.den),
            int(sums.terms),
            int(sums.anchors),
            *sums.correct_per_slot.tolist(),
            *sums.terms_per_slot.tolist(),
        ]
    )


def test_inputs_of_another_target_are_refused(make_draft: Make, make_rows: Make) -> None:
    draft, rows = make_draft(), make_rows([24])
    for changes, named in (
        ({"embed": rows.embed[:200]}, "embedding table"),
        ({"head": rows.head[:200]}, "head"),
        ({"features": rows.features[..., :32]}, "features"),
        ({"features": rows.features[:, :20]}, "features"),
    ):
        with pytest.raises(ModelInvalid, match=named):
            replace(rows, **changes).loss(draft)


def test_the_training_vocabulary_must_hold_the_mask_token(make_draft: Make, make_rows: Make) -> None:
    draft, rows = make_draft(), make_rows([24])
    args = (rows.input_ids, rows.loss_mask, rows.lengths, rows.features, torch.tensor([[8]]), torch.tensor([[True]]))
    with pytest.raises(ModelInvalid, match="mask token 260"):
        training_loss(draft, rows.embed, Head(rows.head).restricted(torch.arange(200)), *args)
    whole = training_loss(draft, rows.embed, Head(rows.head), *args)
    same = training_loss(draft, rows.embed, Head(rows.head).restricted(torch.arange(272)), *args)
    assert same.loss == pytest.approx(whole.loss, rel=1e-6)


@pytest.mark.timeout(300)
def test_a_compiled_draft_gives_the_same_gradients_for_rows_of_any_size(make_draft: Make, make_rows: Make) -> None:
    """One graph for several rows and one for a single row. Traced, without a C++ compiler."""
    draft, plain, graphs = make_draft(num_hidden_layers=1), make_draft(num_hidden_layers=1), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    draft.compile(dynamic=True, backend=backend)
    for lengths in ([24, 13], [17], [30, 9, 21]):
        for model in (draft, plain):
            model.zero_grad()
            make_rows(lengths).loss(model).num.backward()
        torch.testing.assert_close(gradient(draft), gradient(plain), atol=1e-4, rtol=1e-4)
    assert len(graphs) == 2


def test_an_unknown_gamma_is_refused() -> None:
    with pytest.raises(ValueError, match="gamma"):
        LossOptions(gamma="fast").block_weights(4, 4)


@pytest.mark.timeout(60)
def test_training_then_generating_gives_the_same_logits(make_draft: Make, make_rows: Make) -> None:
    """Three steps, then anchor 20 of a row in training against a prompt of 20 tokens when serving."""
    draft, rows = make_draft(scale=1.0), make_rows([40, 24])
    optimizer = build_optimizer(draft, lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        rows.loss(draft).num.backward()
        optimizer.step()
    anchors = torch.tensor([[20]])
    with torch.no_grad():
        ids, positions, mask = training_step_inputs(
            draft.config, rows.input_ids[:1], anchors, torch.ones(1, 1, dtype=torch.bool)
        )
        trained = draft(nn.functional.embedding(ids, rows.embed), rows.features[:1], positions, mask) @ rows.head.T
        cache = draft.new_cache(1, 24)
        draft.extend(cache, rows.features[:1, :20], torch.arange(20)[None])
        served = draft.propose(
            nn.functional.embedding(ids, rows.embed),
            cache,
            torch.arange(20, 24)[None],
            draft_mask(torch.tensor([20]), torch.tensor([4]), context=20, slots=4),
            20,
        )
    torch.testing.assert_close(served @ rows.head.T, trained, atol=1e-4, rtol=1e-4)
