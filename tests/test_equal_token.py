import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowdflash.errors import DataInvalid
from flowdflash.stage import Check
from flowdflash.stages.equal_token import EqualTokenBucketer
from flowdflash.stages.length import LengthBucketer
from flowdflash.testing import BRIEF_BUDGET, assert_bucketer_contract, brief_samples, make_samples


def bucketer(**options):
    return EqualTokenBucketer(EqualTokenBucketer.Config(**options))


@pytest.mark.parametrize("options", [{}, {"buckets": 1}, {"batch_size": "dynamic", "drop_last": True}])
def test_keeps_the_contract_of_a_bucketer(options):
    assert_bucketer_contract(EqualTokenBucketer, token_budget=1024, **options)


def test_on_the_brief_no_bucket_makes_most_of_the_batches():
    stage = bucketer(token_budget=BRIEF_BUDGET)
    table, left = stage.batches(brief_samples(), np.random.default_rng(0))
    shares = np.bincount(table.bucket) / len(table)
    assert left is None and shares.max() <= 0.22 and shares.min() >= 0.12
    assert stage.summary()["padding_waste"] == pytest.approx(0.185, abs=0.003) and len(table) < 5900


def test_it_is_what_the_length_bucketer_does_without_edges():
    samples = brief_samples(100)
    mine = bucketer(token_budget=BRIEF_BUDGET, buckets=4).batches(samples, np.random.default_rng(3))[0]
    other = LengthBucketer(LengthBucketer.Config(token_budget=BRIEF_BUDGET, buckets=4))
    theirs = other.batches(samples, np.random.default_rng(3))[0]
    assert mine.members.tolist() == theirs.members.tolist() and mine.bucket.tolist() == theirs.bucket.tolist()


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 300), max_size=80),
    st.integers(300, 1500),
    st.integers(1, 8),
    st.sampled_from(["fixed", "dynamic"]),
    st.integers(0, 5),
    st.booleans(),
    st.booleans(),
)
def test_budget_and_coverage_hold_for_any_lengths(lengths, budget, buckets, size, most, drop_last, last):
    options = {"token_budget": budget, "buckets": buckets, "max_samples": most, "drop_last": drop_last}
    table, left = bucketer(batch_size=size, **options).batches(
        make_samples(lengths, last=last), np.random.default_rng(0)
    )
    held = [] if left is None else left.ids.tolist()
    assert sorted([*table.members.tolist(), *held]) == list(range(len(lengths)))
    assert (table.padded_tokens <= budget).all() and (table.sizes <= (most or len(lengths))).all()
    assert table.bucket.max(initial=0) < buckets
    if last and not drop_last:
        assert left is None


def test_a_sample_over_the_budget_is_an_error_unless_the_options_say_otherwise():
    samples = make_samples([50, 50, 150])
    with pytest.raises(DataInvalid, match="budget of 100 tokens"):
        bucketer(token_budget=100).batches(samples, np.random.default_rng(0))
    _, left = bucketer(token_budget=100, over_budget="drop").batches(samples, np.random.default_rng(0))
    assert left.ids.tolist() == [2]


def test_check_refuses_a_budget_that_one_sample_can_exceed():
    check = Check("buckets", {"max_length": 600})
    assert bucketer(token_budget=512).check(check) == {"buckets": 6}
    assert [p.path for p in check.problems] == ["token_budget"]
