from functools import cache

import numpy as np
import pytest
from flowdflash_stratified import (
    GoldenLatticeInterleaver,
    HerdingInterleaver,
    LargestDeficitInterleaver,
    StratifiedInterleaver,
    TijdemanInterleaver,
    rules,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from flowdflash.runtime.order_metrics import measure, noise_ratio
from flowdflash.stage import History
from flowdflash.stages.length import LengthBucketer
from flowdflash.stages.shuffle import Shuffle
from flowdflash.testing import BRIEF_BUDGET, BRIEF_EDGES, assert_interleaver_contract, brief_samples, make_batches

COUNTS = st.lists(st.integers(0, 60), min_size=1, max_size=9).filter(any)
VALUES = st.lists(st.floats(-3, 3), min_size=9, max_size=9)


@cache
def brief():
    stage = LengthBucketer(LengthBucketer.Config(token_budget=BRIEF_BUDGET, edges=BRIEF_EDGES))
    return stage.batches(brief_samples(), np.random.default_rng(0))[0]


def ordered(cls, batches, seed=0, **options):
    return np.asarray(list(cls(cls.Config(**options)).order(batches, History(8), np.random.default_rng(seed))))


@pytest.mark.parametrize(
    ("cls", "options"), [(HerdingInterleaver, {}), (StratifiedInterleaver, {"strategy": "herding"})]
)
def test_keeps_the_contract_of_an_interleaver(cls, options):
    assert_interleaver_contract(cls, **options)


def test_herding_on_the_brief_has_the_least_noise_of_all_at_the_price_of_runs():
    order = ordered(HerdingInterleaver, brief())
    figures = measure(brief(), order, 8)
    assert figures.longest_run <= 3 and figures.prefix_discrepancy <= 1.07
    assert figures.window_distinct >= 4.4 and figures.window_distinct_min >= 3 and figures.tail_gap <= 0.02
    others = [
        ordered(cls, brief()) for cls in (TijdemanInterleaver, LargestDeficitInterleaver, GoldenLatticeInterleaver)
    ]
    for window, limit in ((4, 0.25), (8, 0.14), (16, 0.08), (32, 0.045)):
        mine = noise_ratio(brief().mean_length[order], window)
        assert mine <= limit and mine < min(noise_ratio(brief().mean_length[other], window) for other in others)


def test_the_strategy_of_stratified_is_the_interleaver_of_that_name():
    one, other = ordered(HerdingInterleaver, brief()), ordered(StratifiedInterleaver, brief(), strategy="herding")
    assert one.tolist() == other.tolist()


@pytest.mark.parametrize(
    ("cls", "run", "equal", "discrepancy", "distinct", "kl", "noise", "correlation"),
    [
        (Shuffle, (9, 20), 0.345, 90, (3.5, 1), 0.55, (0.8, 1.2), 0.05),
        (TijdemanInterleaver, (2, 2), 0.051, 0.9, (4.4, 3), 0.22, (0, 0.24), -0.7),
        (LargestDeficitInterleaver, (2, 3), 0.08, 0.85, (4.5, 3), 0.2, (0, 0.24), -0.6),
        (GoldenLatticeInterleaver, (2, 2), 0.145, 6, (4.45, 3), 0.21, (0, 0.25), -0.4),
        (HerdingInterleaver, (2, 3), 0.1, 1.07, (4.4, 3), 0.22, (0, 0.14), -0.6),
    ],
)
def test_every_strategy_reaches_its_row_on_the_brief(cls, run, equal, discrepancy, distinct, kl, noise, correlation):
    figures = measure(brief(), ordered(cls, brief()), 8)
    assert figures.batches == 6440 and run[0] <= figures.longest_run <= run[1]
    assert figures.equal_neighbours <= equal and figures.prefix_discrepancy <= discrepancy + 1e-9
    assert figures.window_distinct >= distinct[0] and figures.window_distinct_min >= distinct[1]
    assert figures.window_kl <= kl and noise[0] <= figures.noise_ratio <= noise[1]
    assert figures.adjacent_length_corr <= correlation
    # Windows of one bucket are what random order has and none of the others.
    assert (figures.homogeneous_windows > 0) == (cls is Shuffle)


@settings(deadline=None)
@given(COUNTS, VALUES)
def test_no_bucket_is_ever_a_whole_batch_ahead_of_its_share(counts, values):
    order = rules.herding(np.array(counts), values=np.array(values[: len(counts)]))
    assert np.bincount(order, minlength=len(counts)).tolist() == counts
    for k, count in enumerate(counts):
        ahead = np.cumsum(order == k) - count / len(order) * np.arange(1, len(order) + 1)
        assert ahead.max() < 1


@settings(deadline=None)
@given(COUNTS, VALUES, st.lists(st.floats(-1, 1), min_size=9, max_size=9))
def test_every_batch_comes_once_also_from_an_uneven_start(counts, values, ahead):
    order = rules.herding(np.array(counts), np.array(ahead[: len(counts)]), values=np.array(values[: len(counts)]))
    assert np.bincount(order, minlength=len(counts)).tolist() == counts


def test_equal_values_leave_nothing_to_cancel_and_every_bucket_keeps_to_its_share():
    order = rules.herding(np.array([5, 10, 15]), values=np.zeros(3))
    assert [np.bincount(order[:15], minlength=3)[k] for k in range(3)] == pytest.approx([2.5, 5, 7.5], abs=1)


def test_the_order_of_buckets_does_not_depend_on_the_seed_but_the_batches_do():
    batches = make_batches(np.repeat(np.arange(4), 20))
    first, second = (ordered(HerdingInterleaver, batches, seed=s) for s in (1, 2))
    assert (batches.bucket[first] == batches.bucket[second]).all() and (first != second).any()
