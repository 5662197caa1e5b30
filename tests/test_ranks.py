from dataclasses import replace

import numpy as np
import pytest
from flowdflash_stratified import TijdemanInterleaver
from hypothesis import given
from hypothesis import strategies as st

from flowdflash.runtime.draft_shape import DraftShape
from flowdflash.runtime.ranks import balance, share_out
from flowdflash.stage import History
from flowdflash.stages.length import LengthBucketer
from flowdflash.testing import BRIEF_BUDGET, BRIEF_EDGES, brief_samples

COSTS = st.lists(st.floats(0, 1000), max_size=40)
MS_PER_ANCHOR, MS_PER_TOKEN = 0.41, 0.037


def costs_of(values):
    return np.array(values, dtype=np.float64)


def by_window(costs, window, ranks):
    """Per window of an epoch, the positions in the epoch of each rank's batches."""
    starts = range(0, len(costs), window)
    return [[share + at for share in share_out(costs[at : at + window], ranks)] for at in starts]


def test_four_ranks_are_busy_to_98_percent_on_the_brief():
    """Windows of eight micro-batches per rank, in the default order."""
    samples = brief_samples(10)
    shape = DraftShape(512, 16, anchor_cost_tokens=MS_PER_ANCHOR / MS_PER_TOKEN)
    samples = replace(samples, anchor_cost=shape.anchor_cost(samples))
    bucketer = LengthBucketer(LengthBucketer.Config(token_budget=BRIEF_BUDGET, edges=BRIEF_EDGES))
    table, _ = bucketer.batches(samples, np.random.default_rng(0))
    order = TijdemanInterleaver(TijdemanInterleaver.Config()).order(table, History(32), np.random.default_rng(0))
    costs = table.cost[order]
    assert costs.max() > 3 * costs.min(), "batches cost all the same: the test would show nothing"
    whole = [shares for shares in by_window(costs, 32, 4) if sum(map(len, shares)) == 32]
    by_turns = [np.arange(start, start + 32).reshape(8, 4).T for start in range(0, 32 * len(whole), 32)]
    assert np.mean([balance(costs, shares) for shares in whole]) >= 0.98
    assert np.mean([balance(costs, shares) for shares in by_turns]) < 0.93


@given(COSTS, st.integers(1, 9), st.integers(1, 6))
def test_every_batch_has_one_rank_and_every_rank_the_same_number_of_steps(costs, window, ranks):
    shares = by_window(costs_of(costs), window, ranks)
    assert len(shares) == -(-len(costs) // window) and all(len(of) == ranks for of in shares)
    given_to = [np.concatenate(of).tolist() for of in shares]
    assert [sorted(window_of) for window_of in given_to] == [
        list(range(start, min(start + window, len(costs)))) for start in range(0, len(costs), window)
    ]


@given(COSTS.filter(bool), st.integers(1, 6))
def test_no_two_ranks_are_further_apart_than_the_dearest_batch(costs, ranks):
    loads = [sum(costs[batch] for batch in share) for share in share_out(costs_of(costs), ranks)]
    assert max(loads) - min(loads) <= max(costs) * (1 + 1e-9)


@pytest.mark.parametrize(("batches", "sizes"), [(7, [4, 3]), (1, [1, 0]), (0, None)])
def test_a_rank_without_a_batch_takes_the_step_too(batches, sizes):
    shares = by_window(np.ones(batches), 8, 2)
    assert [sorted((len(share) for share in of), reverse=True) for of in shares] == ([sizes] if sizes else [])


def test_equal_costs_make_equal_counts_up_to_one_and_nothing_costs_nothing():
    assert sorted(len(share) for share in share_out(np.ones(5), 2)) == [2, 3]
    assert balance(np.zeros(3), share_out(np.zeros(3), 2)) == 1.0
