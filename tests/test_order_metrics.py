import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowdflash.runtime import order_metrics as m
from flowdflash.testing import make_batches


def of(*buckets):
    return np.array(buckets, dtype=np.int64)


@pytest.mark.parametrize(("buckets", "run"), [((), 0), ((3,), 1), ((1, 1, 0, 1), 2), ((0, 2, 2, 2), 3), ((5,) * 4, 4)])
def test_longest_run(buckets, run):
    assert m.longest_run(of(*buckets)) == run


def test_equal_neighbours_is_a_share_of_pairs():
    assert m.equal_neighbours(of(0, 0, 1, 1, 1)) == 0.75
    assert m.equal_neighbours(of(0)) == 0.0


def test_prefix_discrepancy_of_one_after_the_other():
    assert m.prefix_discrepancy(of(0, 0, 1, 1)) == 1.0
    assert m.prefix_discrepancy(of(0, 1, 0, 1)) == 0.5


def test_windows_hold_whole_windows_only():
    assert m.window_distinct(of(0, 1, 2, 2, 9), 2).tolist() == [2, 1]
    assert m.homogeneous_windows(of(0, 1, 2, 2, 9), 2) == 0.5


def test_window_kl_is_zero_for_the_mix_of_the_epoch_and_one_bit_for_half_of_it():
    assert m.window_kl(of(0, 1, 1, 0), 2).tolist() == [0.0, 0.0]
    assert m.window_kl(of(0, 0, 1, 1), 2).tolist() == [1.0, 1.0]


def test_noise_ratio_is_one_for_random_order_and_zero_for_equal_windows():
    lengths = np.tile([100.0, 1000.0], 4000)
    assert m.noise_ratio(lengths, 8) == pytest.approx(0.0, abs=1e-12)
    assert m.noise_ratio(np.random.default_rng(0).permutation(lengths), 8) == pytest.approx(1.0, abs=0.1)
    assert m.noise_ratio(np.sort(lengths), 8) == pytest.approx(8.0)
    assert m.noise_ratio(np.full(10, 5.0), 2) == 0.0


def test_tokens_cv():
    assert m.tokens_cv(of(1, 3, 3, 1), 2) == 0.0
    assert m.tokens_cv(of(1, 1, 3, 3), 2) == 0.5


def test_adjacent_length_corr_tells_alternation_from_sorting():
    assert m.adjacent_length_corr(np.array([1.0, 9.0] * 10)) == pytest.approx(-1.0)
    assert m.adjacent_length_corr(np.arange(20.0)) == pytest.approx(1.0)
    assert m.adjacent_length_corr(np.ones(20)) == 0.0


def test_tail_share_shows_a_bucket_that_ran_out():
    assert m.tail_share(of(*[0, 1] * 20, *[1] * 10), 0.1) == {1: 1.0}


def test_window_spread_weighs_samples_by_their_tokens():
    batches = make_batches(of(0, 1, 0, 1), of(10, 1000, 10, 1000))
    assert m.window_spread(batches, np.arange(4), 2) == pytest.approx(0.0)
    assert m.window_spread(batches, of(0, 2, 1, 3), 2) == pytest.approx(1.0)


def test_measure_puts_all_together():
    batches = make_batches(of(0, 0, 1, 1))
    figures = m.measure(batches, of(0, 2, 1, 3), 2).as_dict()
    assert figures["longest_run"] == 1 and figures["window_distinct"] == 2.0 and figures["batches"] == 4
    assert figures["padding_waste"] == 0.0 and figures["tail_gap"] == 0.5
    assert all(type(value) in (int, float) for value in figures.values())


@pytest.mark.parametrize("buckets", [(), (0,), (0, 1, 2)])
def test_fewer_batches_than_one_window_give_figures_too(buckets):
    figures = m.measure(make_batches(of(*buckets)), np.arange(len(buckets)), 8)
    assert figures.homogeneous_windows == figures.noise_ratio == figures.tokens_cv == 0.0


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(1, 9))
def test_bounds_that_hold_for_every_order(buckets, window):
    figures = m.measure(make_batches(of(*buckets)), np.arange(len(buckets)), window)
    assert 1 <= figures.longest_run <= len(buckets)
    assert 0 <= figures.equal_neighbours <= 1 and 0 <= figures.homogeneous_windows <= 1
    assert figures.window_kl_max >= figures.window_kl >= -1e-9
    assert figures.prefix_discrepancy < max(np.bincount(buckets)) + 1e-9
    assert figures.window_distinct_min <= max(figures.window_distinct, len(set(buckets)))
