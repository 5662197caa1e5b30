"""Figures of acceptance: from rounds of decoding, and teacher forced on answers that are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flowdflash.dflash.acceptance import answer_runs, eal, eal_walk, summarise, walk
from flowdflash.dflash.decode import greedy, speculative_decode
from flowdflash.dflash.loss import leading_runs
from flowdflash.dflash.rounds import DecodeResult

Make = Callable[..., Any]


def test_figures_of_acceptance_are_what_they_say() -> None:
    results = [
        DecodeResult(3, (1,) * 9, (4, 3, 1), (3, 2, 0), (3, 3, 3), "length"),
        DecodeResult(3, (1,) * 2, (1,), (2,), (3,), "stop"),
        DecodeResult(3, (1,), (), (), (), "stop"),
    ]
    summary = summarise(results, 4)
    assert (summary.requests, summary.passes, summary.tokens) == (3, 4, 9)
    assert summary.tau_request_mean == pytest.approx((8 / 3 + 1) / 2)
    assert summary.tau_pooled == pytest.approx(9 / 4)
    assert summary.histogram == (2, 0, 1, 1)
    assert summary.acceptance_per_slot == pytest.approx((3 / 4, 3 / 3, 1 / 3))


def test_figures_leave_out_slots_that_were_never_proposed() -> None:
    summary = summarise([DecodeResult(1, (1, 1, 1), (2,), (1,), (1,), "length")], 4)
    assert summary.acceptance_per_slot[0] == 1.0 and summary.acceptance_per_slot[1] != summary.acceptance_per_slot[1]
    nothing = summarise([], 4)
    assert nothing.passes == 0 and nothing.tau_pooled != nothing.tau_pooled


def test_eal_is_a_mean_over_blocks_and_no_product_of_accuracies() -> None:
    flags = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 1]])
    runs = leading_runs(flags).tolist()
    assert runs == [2, 0, 3]
    # Two more anchors, too near to the end of the answer for a full block: they count for nothing.
    assert eal([[*runs, 2, 1]], 4) == pytest.approx(1 + 5 / 3)
    marginal = flags.float().mean(dim=0)
    assert float(1 + marginal.cumprod(dim=0).sum()) == pytest.approx(2.778, abs=1e-3)


def test_eal_pools_blocks_over_answers_and_is_nan_without_a_full_one() -> None:
    assert eal([[3, 0, 2, 1], [1, 2, 1]], 4) == pytest.approx(1 + (3 + 0 + 1) / 3)
    assert eal([[1], []], 4) != eal([[1], []], 4)


def test_a_walk_jumps_by_what_is_committed_and_ends_with_the_answer() -> None:
    assert walk([2, 0, 3, 0, 1, 2, 1]) == [3, 1, 2, 1]
    assert walk([3, 0, 0, 0]) == [4] and walk([3, 0, 0]) == [3] and walk([]) == []
    assert eal_walk([[3, 0, 0, 0], [0, 0], []]) == pytest.approx((4 + 1) / 2)


@pytest.mark.parametrize("seed", [1, 6])
def test_the_walk_over_greedy_answers_puts_its_blocks_where_decoding_does(
    make_target: Make, make_draft: Make, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flowdflash.dflash import acceptance

    monkeypatch.setattr(acceptance, "SLOTS_AT_ONCE", 24)
    target, draft = make_target(seed, vocab_size=6), make_draft(seed, 8.0, vocab_size=6, mask_token_id=5).double()
    prompts = [[1, 2], [3] * 7, [0, 4, 2]]
    for block_size in (4, 6):
        results = speculative_decode(target, draft, prompts, max_new_tokens=40, block_size=block_size)
        lengths = set()
        for prompt, result in zip(prompts, results, strict=True):
            runs = answer_runs(target, draft, [*prompt, *result.tokens], len(prompt), block_size=block_size)
            assert len(runs) == 39 and max(runs) < block_size
            steps = walk(runs)
            assert sum(steps) == 39
            lengths.update(steps)
            # Where the limit cuts a block short the draft sees fewer slots, so the last blocks may differ.
            whole = [n for at, n in enumerate(result.produced) if sum(result.produced[:at]) + block_size <= 39]
            assert len(whole) > 5 and steps[: len(whole)] == whole
        assert len(lengths) > 2, "all blocks are accepted alike: the test shows nothing"


def test_teacher_forcing_reads_the_answer_that_it_is_given(make_target: Make, make_draft: Make) -> None:
    target, draft = make_target(6, vocab_size=6), make_draft(6, 8.0, vocab_size=6, mask_token_id=5).double()
    prompt = [1, 2]
    (answer,) = greedy(target, [prompt], max_new_tokens=30)
    other = [(token + 1) % 5 for token in answer]
    assert answer_runs(target, draft, [*prompt, *answer], 2) != answer_runs(target, draft, [*prompt, *other], 2)
    assert answer_runs(target, draft, [*prompt, 1], 2) == [] == answer_runs(target, draft, prompt, 2)
