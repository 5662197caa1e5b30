import numpy as np
import pytest
from flowdflash_stratified import GoldenLatticeInterleaver, StratifiedInterleaver
from hypothesis import given, settings
from hypothesis import strategies as st

from flowdflash.errors import DataInvalid
from flowdflash.runtime.order_metrics import measure
from flowdflash.stage import Check, History
from flowdflash.stages.sorted_budget import SortedBudgetBucketer
from flowdflash.testing import BRIEF_BUDGET, assert_bucketer_contract, brief_samples, make_samples


def bucketer(**options):
    return SortedBudgetBucketer(SortedBudgetBucketer.Config(**options))


@pytest.mark.parametrize("options", [{}, {"noise": 0, "drop_last": True}, {"noise": 0.5, "max_samples": 3}])
def test_keeps_the_contract_of_a_bucketer(options):
    assert_bucketer_contract(SortedBudgetBucketer, token_budget=1024, **options)


def test_the_brief_hardly_wastes_anything_and_a_lattice_mixes_it_well():
    stage = bucketer(token_budget=BRIEF_BUDGET)
    table, left = stage.batches(brief_samples(), np.random.default_rng(0))
    lattice = GoldenLatticeInterleaver(GoldenLatticeInterleaver.Config())
    figures = measure(table, lattice.order(table, History(8), np.random.default_rng(0)), 8)
    assert left is None and set(table.bucket.tolist()) == {-1}
    assert figures.padding_waste <= 0.02 and stage.summary()["fill"] > 0.93
    assert len(table) <= 6440 * 0.74
    assert figures.noise_ratio <= 0.26 and figures.tokens_cv <= 0.01 and figures.window_spread <= 0.18


def test_without_noise_waste_is_next_to_nothing():
    stage = bucketer(token_budget=BRIEF_BUDGET, noise=0)
    stage.batches(brief_samples(), np.random.default_rng(0))
    assert stage.summary()["padding_waste"] < 0.001


def test_noise_gives_a_sample_other_neighbours_in_another_epoch():
    samples, mates = brief_samples(10), []
    for seed in (1, 2):
        table, _ = bucketer(token_budget=BRIEF_BUDGET).batches(samples, np.random.default_rng(seed))
        of = np.repeat(np.arange(len(table)), table.sizes)[np.argsort(table.members)]
        mates.append({(i, j) for i, j in zip(range(999), range(1, 1000), strict=True) if of[i] == of[j]})
    both = len(mates[0] & mates[1]) / len(mates[0])
    assert both < 0.98 and mates[0] != mates[1]


def test_stratified_takes_the_lattice_for_batches_without_buckets():
    table, _ = bucketer(token_budget=BRIEF_BUDGET).batches(brief_samples(100), np.random.default_rng(0))
    orders = [
        np.asarray(cls(cls.Config()).order(table, History(8), np.random.default_rng(0))).tolist()
        for cls in (StratifiedInterleaver, GoldenLatticeInterleaver)
    ]
    assert orders[0] == orders[1]


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 300), max_size=80),
    st.integers(300, 1500),
    st.sampled_from([0, 0.02, 0.9]),
    st.integers(0, 5),
    st.booleans(),
    st.booleans(),
)
def test_budget_and_coverage_hold_for_any_lengths(lengths, budget, noise, most, drop_last, last):
    options = {"token_budget": budget, "noise": noise, "max_samples": most, "drop_last": drop_last}
    table, left = bucketer(**options).batches(make_samples(lengths, last=last), np.random.default_rng(0))
    held = [] if left is None else left.ids.tolist()
    assert sorted([*table.members.tolist(), *held]) == list(range(len(lengths)))
    assert (table.padded_tokens <= budget).all() and (table.sizes <= (most or len(lengths))).all()
    if last and not drop_last:
        assert left is None


def test_a_sample_over_the_budget_is_an_error_unless_the_options_say_otherwise():
    samples = make_samples([50, 50, 150])
    with pytest.raises(DataInvalid, match="budget of 100 tokens"):
        bucketer(token_budget=100).batches(samples, np.random.default_rng(0))
    table, left = bucketer(token_budget=100, over_budget="alone").batches(samples, np.random.default_rng(0))
    assert left is None and table.sizes[table.max_length == 150].tolist() == [1]


def test_check_refuses_a_budget_that_one_sample_can_exceed_and_tells_that_there_are_no_buckets():
    check = Check("buckets", {"max_length": 600})
    assert bucketer(token_budget=512).check(check) == {"buckets": 0}
    assert [p.path for p in check.problems] == ["token_budget"]
