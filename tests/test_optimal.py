from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowdflash.batching import MOST_CELLS, optimal_edges
from flowdflash.errors import DataInvalid
from flowdflash.stage import Check
from flowdflash.stages.optimal import OptimalBucketer
from flowdflash.testing import BRIEF_BUDGET, assert_bucketer_contract, brief_samples, make_samples


def bucketer(**options):
    return OptimalBucketer(OptimalBucketer.Config(**options))


def cost(lengths, edges, *, budget, minimise):
    """What the edges cost, sample by sample."""
    bound = np.asarray(edges)[np.searchsorted(edges, lengths)]
    return (bound if minimise == "padding" else 1 / np.maximum(budget // bound, 1)).sum()


@pytest.mark.parametrize("options", [{}, {"buckets": 1, "grid": 1}, {"minimise": "batches", "batch_size": "dynamic"}])
def test_keeps_the_contract_of_a_bucketer(options):
    assert_bucketer_contract(OptimalBucketer, token_budget=1024, **options)


def test_six_buckets_of_the_brief_waste_less_and_none_makes_most_batches():
    stage = bucketer(token_budget=BRIEF_BUDGET)
    table, left = stage.batches(brief_samples(), np.random.default_rng(0))
    summary = stage.summary()
    assert left is None and summary["padding_waste"] <= 0.175
    assert np.bincount(table.bucket).max() / len(table) <= 0.21
    assert summary["edges"] == [1088, 1824, 2720, 3872, 5536, 8192] and len(table) <= 6440 * 0.91


def test_edges_that_make_fewest_batches_make_fewer_than_those_that_waste_least():
    made = {}
    for minimise in ("padding", "batches"):
        stage = bucketer(token_budget=BRIEF_BUDGET, minimise=minimise)
        table, _ = stage.batches(brief_samples(), np.random.default_rng(0))
        made[minimise] = (len(table), stage.summary()["padding_waste"])
    assert made["batches"][0] < made["padding"][0] and made["batches"][1] > made["padding"][1]


def test_more_buckets_never_waste_more():
    lengths = brief_samples(100).lengths
    costs = [
        cost(lengths, optimal_edges(lengths, k, grid=32, budget=1, minimise="padding"), budget=1, minimise="padding")
        for k in (1, 2, 4, 8, 16)
    ]
    assert costs == sorted(costs, reverse=True) and len(set(costs)) == 5


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=30),
    st.integers(1, 4),
    st.sampled_from([1, 4, 7]),
    st.sampled_from(["padding", "batches"]),
)
def test_no_other_edges_on_the_grid_cost_less(lengths, buckets, grid, minimise):
    lengths = np.array(lengths)
    edges = optimal_edges(lengths, buckets, grid=grid, budget=200, minimise=minimise)
    assert (np.diff(edges) > 0).all() and edges[-1] >= lengths.max() and (edges % grid == 0).all()
    assert len(edges) <= buckets
    places = sorted({-(-int(n) // grid) * grid for n in lengths})
    others = [(*inner, places[-1]) for k in range(min(buckets, len(places))) for inner in combinations(places[:-1], k)]
    least = min(cost(lengths, other, budget=200, minimise=minimise) for other in others)
    assert cost(lengths, edges, budget=200, minimise=minimise) == pytest.approx(least)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 300), max_size=80),
    st.integers(300, 1500),
    st.integers(1, 8),
    st.sampled_from([1, 32, 64]),
    st.sampled_from(["fixed", "dynamic"]),
    st.integers(0, 5),
    st.booleans(),
    st.booleans(),
)
def test_budget_and_coverage_hold_for_any_lengths(lengths, budget, buckets, grid, size, most, drop_last, last):
    options = {"token_budget": budget, "buckets": buckets, "grid": grid, "max_samples": most, "drop_last": drop_last}
    table, left = bucketer(batch_size=size, **options).batches(
        make_samples(lengths, last=last), np.random.default_rng(0)
    )
    held = [] if left is None else left.ids.tolist()
    assert sorted([*table.members.tolist(), *held]) == list(range(len(lengths)))
    assert (table.padded_tokens <= budget).all() and (table.sizes <= (most or len(lengths))).all()
    assert table.bucket.max(initial=0) < buckets
    if last and not drop_last:
        assert left is None


def test_where_lengths_are_very_many_the_grid_gets_coarser_and_edges_still_hold_all():
    lengths = np.arange(1, 40 * MOST_CELLS)
    edges = optimal_edges(lengths, 5, grid=1, budget=10**6, minimise="padding")
    assert len(edges) == 5 and edges[-1] >= lengths[-1] and (edges % 64 == 0).all()


def test_a_sample_over_the_budget_follows_the_named_policy():
    samples = make_samples([50, 50, 150])
    with pytest.raises(DataInvalid, match=r"1 of 3 samples.*budget of 100 tokens.*2 \(150 tokens\)"):
        bucketer(token_budget=100).batches(samples, np.random.default_rng(0))
    _, left = bucketer(token_budget=100, over_budget="drop").batches(samples, np.random.default_rng(0))
    assert left.ids.tolist() == [2]
    table, left = bucketer(token_budget=100, over_budget="alone").batches(samples, np.random.default_rng(0))
    assert left is None and table.sizes[table.max_length == 150].tolist() == [1]


def test_check_refuses_a_budget_that_one_sample_can_exceed():
    check = Check("buckets", {"max_length": 600})
    assert bucketer(token_budget=512, buckets=3).check(check) == {"buckets": 3}
    assert [p.path for p in check.problems] == ["token_budget"]
