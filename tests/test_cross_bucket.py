import numpy as np
import pytest
from flowdflash_cross_bucket import CrossBucketBucketer

from flowdflash.errors import DataInvalid
from flowdflash.stage import Check
from flowdflash.testing import BRIEF_BUDGET, BRIEF_EDGES, assert_bucketer_contract, brief_samples, make_samples


def bucketer(**options):
    return CrossBucketBucketer(CrossBucketBucketer.Config(**options))


def refusals(**options):
    check = Check("buckets", options.pop("facts", {}))
    bucketer(**{"token_budget": 512, "edges": (64, 128, 256), **options}).check(check)
    return [p.path for p in check.problems]


@pytest.mark.parametrize("merge", ["pairs", "triples", ((0, 1, 2), (3,)), ((1, 2),)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_keeps_the_contract_of_a_bucketer(merge, drop_last):
    assert_bucketer_contract(
        CrossBucketBucketer, token_budget=1024, edges=(64, 128, 256, 512), merge=merge, drop_last=drop_last
    )


@pytest.mark.parametrize(
    ("merge", "batches", "cost"),
    [
        ("pairs", 8079, 0.134),
        (((4, 5),), 7691, 0.086),
        (((0, 1), (2, 3)), 6828, 0.057),
        ("triples", 10169, 0.231),
        (((0,),), 6440, 0.0),
    ],
)
def test_reports_what_merging_costs_against_unmerged_buckets(merge, batches, cost):
    stage = bucketer(token_budget=BRIEF_BUDGET, edges=BRIEF_EDGES, merge=merge)
    table, _ = stage.batches(brief_samples(), np.random.default_rng(0))
    summary = stage.summary()
    assert len(table) == summary["batches"] == batches and summary["batches_unmerged"] == 6440
    assert summary["throughput_cost"] == pytest.approx(cost, abs=0.002)


def test_pairs_cost_twelve_to_fifteen_percent_for_any_seed():
    stage = bucketer(token_budget=BRIEF_BUDGET, edges=BRIEF_EDGES)
    for seed in range(3):
        stage.batches(brief_samples(10), np.random.default_rng(seed))
        assert 0.12 <= stage.summary()["throughput_cost"] <= 0.15
        stage._epoch = -1  # the next seed stands alone


def test_batches_of_a_merged_bucket_mix_its_parts_and_are_sized_for_the_larger():
    stage = bucketer(token_budget=1000, edges=(10, 100))
    table, _ = stage.batches(make_samples([5] * 50 + [90] * 50), np.random.default_rng(0))
    assert set(table.sizes.tolist()) == {10} and set(table.bucket.tolist()) == {0}
    assert all(low < 10 < high for low, high in zip(table.min_length, table.max_length, strict=True))


def test_padded_tokens_never_exceed_the_budget():
    stage = bucketer(token_budget=BRIEF_BUDGET, edges=BRIEF_EDGES)
    table, _ = stage.batches(brief_samples(100), np.random.default_rng(0))
    assert (table.padded_tokens <= BRIEF_BUDGET).all()


def test_too_long_samples_follow_the_policy():
    with pytest.raises(DataInvalid, match=r"1 of 2 .*first sample 1 with 101"):
        bucketer(token_budget=1000, edges=(100,)).batches(make_samples([50, 101]), np.random.default_rng(0))
    stage = bucketer(token_budget=1000, edges=(100,), over_long="drop")
    assert stage.batches(make_samples([50, 101]), np.random.default_rng(0))[1].ids.tolist() == [1]


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"merge": ((0, 2),)}, "merge.0"),
        ({"merge": ((0,), (1, 3))}, "merge.1"),
        ({"merge": ((0, 1), (1, 2))}, "merge"),
        ({"merge": ((),)}, "merge.0"),
        ({"edges": (64, 32)}, "edges.1"),
        ({"token_budget": 200}, "token_budget"),
        ({"facts": {"max_length": 300}}, "edges"),
    ],
)
def test_check_says_where_the_mistake_is(options, where):
    assert refusals(**options) == [where]


def test_check_accepts_a_sound_config_and_counts_merged_buckets():
    assert refusals() == []
    assert bucketer(token_budget=512, edges=(64, 128, 256)).check(Check("b")) == {"buckets": 2}


def test_without_a_batch_there_is_no_cost_to_report():
    stage = bucketer(token_budget=512, edges=(64,))
    stage.batches(make_samples([]), np.random.default_rng(0))
    assert stage.summary() == {}
