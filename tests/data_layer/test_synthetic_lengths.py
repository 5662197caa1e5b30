from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowdflash.data.lengths import BRIEF_COUNTS, BRIEF_EDGES, brief, lognormal
from flowdflash.stage import Check, OpenContext
from flowdflash.stages.synthetic_lengths import SyntheticLengths


def opened(**options: Any) -> SyntheticLengths:
    source = SyntheticLengths(SyntheticLengths.Config(**options))
    check = Check("made_up")
    source.check(check)
    assert not check.problems
    source.open(OpenContext("made_up", Path(), Path()))
    return source


def refused(**options: Any) -> set[str]:
    check = Check("made_up")
    SyntheticLengths(SyntheticLengths.Config(**options)).check(check)
    return {problem.path for problem in check.problems}


def test_brief_has_a_fifth_of_the_samples_in_the_bucket_that_makes_half_of_the_batches() -> None:
    lengths = brief()
    groups = np.searchsorted(BRIEF_EDGES, lengths)
    counts = np.bincount(groups)
    assert tuple(counts.tolist()) == BRIEF_COUNTS
    batches = counts // (49_152 // np.array(BRIEF_EDGES))
    assert batches.tolist() == [238, 434, 612, 851, 938, 3367]
    assert counts[5] / len(lengths) == pytest.approx(0.202, abs=5e-4)
    assert batches[5] / batches.sum() == pytest.approx(0.523, abs=5e-4)
    means = np.bincount(groups, lengths) / counts
    assert means == pytest.approx([535, 991, 1462, 2056, 2827, 4831], rel=0.01)
    assert np.bincount(np.searchsorted(BRIEF_EDGES, brief(100))).tolist() == [n // 100 for n in BRIEF_COUNTS]


def test_source_of_the_brief_gives_its_lengths_in_mixed_order() -> None:
    (table,) = opened(law="brief", scale=100).epochs()
    assert sorted(table.lengths.tolist()) == brief(100).tolist() != table.lengths.tolist()


@settings(max_examples=50, deadline=None)
@given(st.floats(-2, 12), st.floats(0.05, 4), st.integers(1, 500), st.integers(0, 5000))
def test_lognormal_lengths_stay_in_range_and_rise_with_the_quantile(
    mu: float, sigma: float, low: int, more: int
) -> None:
    lengths = lognormal(np.linspace(0, 1, 50), mu, sigma, low, low + more)
    assert lengths.min() >= low
    assert lengths.max() <= low + more
    assert (np.diff(lengths) >= 0).all()


@pytest.mark.parametrize(
    "options",
    [
        {"samples": 50},
        {"law": "uniform", "samples": 50, "min_length": 1, "max_length": 9},
        {"law": "fixed", "samples": 7, "length": 5, "pattern": "cycle", "prompt_share": 0},
        {"law": "brief", "scale": 5000},
    ],
)
def test_table_agrees_with_the_tokens(options: dict[str, Any]) -> None:
    source = opened(epochs=2, avoid_token_ids=(0, 7, 255), **options)
    first, second = source.epochs()
    assert np.array_equal(first.lengths, second.lengths)
    assert (first.epoch, second.epoch) == (0, 1)
    facts = source.check(Check("made_up"))
    assert first.lengths.max() <= facts["max_length"]
    for n, sample in enumerate(first.ids.tolist()):
        ids, mask = source.tokens(sample)
        assert (len(ids), int(mask.sum())) == (first.lengths[n], first.supervised[n])
        assert not set(ids.tolist()) & {0, 7, 255}
        assert ids.max() < 256
        assert set(ids.tolist()) <= set(source.vocabulary().token_ids.tolist())


def test_cycle_is_a_sequence_in_which_each_token_follows_from_the_one_before() -> None:
    source = opened(law="fixed", length=600, samples=20, pattern="cycle", vocab_size=40, avoid_token_ids=(3,))
    allowed = [n for n in range(40) if n != 3]
    follow = dict(zip(allowed, allowed[1:] + allowed[:1], strict=True))
    for sample in range(20):
        ids = source.tokens(sample)[0].tolist()
        assert all(follow[a] == b for a, b in pairwise(ids))
    assert len({int(source.tokens(n)[0][0]) for n in range(20)}) > 5


@pytest.mark.timeout(20)
def test_tokens_depend_on_seed_and_id_alone_in_any_thread_and_order() -> None:
    source, again = opened(samples=60, seed=3), opened(samples=60, seed=3)
    expected = [again.tokens(n)[0].tolist() for n in range(60)]
    assert opened(samples=60, seed=4).tokens(0)[0].tolist() != expected[0]
    wrong: list[int] = []

    def read(seed: int) -> None:
        for n in np.random.default_rng(seed).permutation(60).tolist():
            if source.tokens(n)[0].tolist() != expected[n]:
                wrong.append(n)

    threads = [threading.Thread(target=read, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not wrong
    with pytest.raises(IndexError, match="there are 60"):
        source.tokens(60)


@pytest.mark.parametrize(
    ("options", "places"),
    [
        ({"law": "brief", "samples": 5}, {"samples"}),
        ({"law": "fixed", "mu": 1.0, "length": 4}, {"mu"}),
        ({"law": "uniform", "sigma": 1.0}, {"sigma"}),
        ({"scale": 2}, {"scale"}),
        ({"min_length": 10, "max_length": 9}, {"min_length"}),
        ({"law": "brief", "scale": 20_000}, {"scale"}),
        ({"vocab_size": 3, "avoid_token_ids": (1, 2)}, {"avoid_token_ids"}),
    ],
)
def test_options_that_the_law_does_not_use_are_refused(options: dict[str, Any], places: set[str]) -> None:
    assert refused(**options) == places
