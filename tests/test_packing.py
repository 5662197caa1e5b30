"""The bucketer that packs: rows, their figures in a plan, and runs on them from data to loss."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import flowdflash_packing
import numpy as np
import pytest
from flowdflash_packing import PackingBucketer, best_fit
from hypothesis import given, settings
from hypothesis import strategies as st

from flowdflash import stages
from flowdflash.cli.plan_command import plan_report
from flowdflash.config.check import load, load_mapping
from flowdflash.errors import DataInvalid, PipelineInvalid
from flowdflash.items import BatchInfo, batch_info
from flowdflash.plugin.loader import Plugins, load_plugins
from flowdflash.runtime.collate import collate
from flowdflash.stage import Check, SilentReport
from flowdflash.stages.length import LengthBucketer
from flowdflash.testing import (
    BRIEF_BUDGET,
    BRIEF_EDGES,
    assert_bucketer_contract,
    brief_samples,
    make_samples,
    run_pipeline,
)

TREE: dict[str, Any] = {
    "version": 1,
    "name": "packed",
    "seed": 6,
    "stages": {
        "corpus": {
            "kind": "source",
            "type": "synthetic_lengths",
            "samples": 40,
            "min_length": 3,
            "max_length": 40,
            "vocab_size": 127,
            "epochs": 2,
        },
        "buckets": {"kind": "bucketer", "type": "packing", "inputs": "corpus", "token_budget": 96, "open_bins": 2},
        "dispatch": {"kind": "dispatcher", "type": "pull", "inputs": "buckets"},
        "target": {"kind": "target-forward", "type": "toy", "inputs": "dispatch", "vocab_size": 128},
        "drafter": {
            "kind": "drafter",
            "type": "dflash",
            "inputs": "target",
            "block_size": 4,
            "num_hidden_layers": 1,
            "accumulate": 4,
            "precision": "float32",
        },
        "metrics": {"kind": "sink", "type": "jsonl", "inputs": "drafter.records"},
    },
}


def installed() -> Plugins:
    return load_plugins(builtin=[stages, flowdflash_packing], disabled=["packing"])


def bucketer(**options: Any) -> PackingBucketer:
    return PackingBucketer(PackingBucketer.Config(**options))


def tree(**changes: Any) -> dict[str, Any]:
    """The pipeline with other options: ``stage={option: value}``."""
    changed = copy.deepcopy(TREE)
    for name, options in changes.items():
        changed["stages"][name] |= options
    return changed


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"open_bins": 1, "max_samples": 3}])
def test_keeps_the_contract_of_a_bucketer(options: dict[str, Any]) -> None:
    assert_bucketer_contract(PackingBucketer, token_budget=1024, **options)


def test_the_brief_wastes_next_to_nothing_in_a_third_less_batches() -> None:
    samples, rng = brief_samples(), np.random.default_rng(7)
    stage = bucketer(token_budget=BRIEF_BUDGET)
    table, left = stage.batches(samples, rng)
    summary = stage.summary()
    assert left is None and table.packed and np.array_equal(table.padded_tokens, table.tokens)
    assert 1 - summary["fill"] <= 0.003 and summary["padding_waste"] == 0 and summary["batches"] == len(table)
    padded, _ = LengthBucketer(LengthBucketer.Config(token_budget=BRIEF_BUDGET, edges=BRIEF_EDGES)).batches(
        samples, rng
    )
    assert len(table) <= 0.7 * len(padded)
    # Rows mix lengths, so a row is much like any other.
    assert table.tokens[: len(table) * 9 // 10].std() / table.tokens.mean() < 0.01


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 100), max_size=80),
    capacity=st.integers(60, 300),
    bins=st.integers(1, 8),
    most=st.integers(0, 5),
)
def test_each_member_is_in_one_row_that_holds_it_and_few_rows_are_open(
    lengths: list[int], capacity: int, bins: int, most: int
) -> None:
    members, column = np.arange(len(lengths)) + 7, np.array(lengths, dtype=np.int64)
    closed, unfilled = best_fit(members, column, capacity, bins, most)
    rows = closed + unfilled
    assert sorted(i for row in rows for i in row) == members.tolist()
    assert all(sum(lengths[i - 7] for i in row) <= capacity or len(row) == 1 for row in rows)
    assert all(len(row) <= (most or len(lengths)) for row in rows)
    assert len(unfilled) <= bins
    # Closed rows never change: what has come so far decides them, whatever follows.
    for part in range(0, len(lengths), 7):
        early, _ = best_fit(members[:part], column[:part], capacity, bins, most)
        assert early == closed[: len(early)]


def test_a_member_goes_to_the_row_that_it_fills_best() -> None:
    closed, unfilled = best_fit(np.arange(5), np.array([60, 70, 30, 40, 25]), 100, 8)
    assert (closed, unfilled) == ([[1, 2], [0, 3]], [[4]])
    # With two rows open at most, the fullest is closed for a new one.
    assert best_fit(np.arange(3), np.array([60, 70, 50]), 100, 2) == ([[1]], [[0], [2]])


@pytest.mark.parametrize("drop_last", [False, True])
def test_open_rows_are_held_back_while_more_samples_may_come(drop_last: bool) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 100, 400)
    stage = bucketer(token_budget=256, open_bins=4, drop_last=drop_last)
    table, left = stage.batches(make_samples(lengths, last=False), rng)
    assert left is not None and 0 < left.lengths.sum() < 4 * 256
    assert len(table.members) + len(left) == 400
    last, dropped = stage.batches(left.joined(make_samples([])), rng)
    assert (dropped is not None and len(last.members) + len(dropped) == len(left)) if drop_last else dropped is None


def test_a_sample_longer_than_a_row_is_an_error_unless_the_options_say_otherwise() -> None:
    samples, rng = make_samples([50, 50, 150]), np.random.default_rng(0)
    with pytest.raises(DataInvalid, match="budget of 100 tokens"):
        bucketer(token_budget=100).batches(samples, rng)
    table, _ = bucketer(token_budget=100, over_budget="alone").batches(samples, rng)
    assert sorted(table.sizes.tolist()) == [1, 2]
    assert bucketer(token_budget=100, over_budget="drop").batches(samples, rng)[1].ids.tolist() == [2]  # type: ignore[union-attr]


def test_the_check_tells_that_rows_are_packed() -> None:
    check = Check("buckets", {"max_length": 600})
    assert bucketer(token_budget=512).check(check) == {"buckets": 0, "packed": True}
    assert [p.path for p in check.problems] == ["token_budget"]


def packed_info() -> BatchInfo:
    table, _ = bucketer(token_budget=16).batches(make_samples([3, 5, 2], [1, 5, 0]), np.random.default_rng(0))
    return batch_info(table, 0, seq=4, index=0, last_of_epoch=True)


def test_samples_of_a_packed_batch_are_put_end_to_end() -> None:
    info = packed_info()
    assert info.packed and info.padded_tokens == info.tokens == 10
    made = {i: (np.arange(n) + 10 * i, np.arange(n) >= n - s) for i, (n, s) in enumerate([(3, 1), (5, 5), (2, 0)])}
    batch = collate(info, made.__getitem__, source="corpus")
    assert batch.input_ids.tolist() == [np.concatenate([made[i][0] for i in info.sample_ids]).tolist()]
    assert batch.loss_mask.tolist() == [np.concatenate([made[i][1] for i in info.sample_ids]).tolist()]
    assert batch.lengths.tolist() == list(info.lengths)
    for sample, place in zip(info.sample_ids, info.places, strict=True):
        assert batch.input_ids[place].tolist() == made[sample][0].tolist()


def steps(outcome_dir: Path, run: dict[str, Any]) -> list[dict[str, Any]]:
    outcome = run_pipeline(run, run_dir=outcome_dir, plugins=installed())
    assert outcome.status == "finished", outcome
    return [json.loads(line) for line in (outcome_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(60)
def test_l7_a_run_on_packed_rows_is_a_run_on_rows_of_their_own(tmp_path: Path) -> None:
    """One optimizer step holds the whole data, and every place is an anchor: the rows are all that differs."""
    whole = {"drafter": {"accumulate": 1000}, "corpus": {"epochs": 1}}
    together = steps(tmp_path / "packed", tree(**whole))
    plain = tree(**whole)
    plain["stages"]["buckets"] = {
        "kind": "bucketer", "type": "length", "inputs": "corpus", "buckets": 3, "token_budget": 96
    }  # fmt: skip
    apart = steps(tmp_path / "padded", plain)
    assert len(together) == len(apart) == 1
    for name in ("samples", "tokens", "terms", "anchors"):
        assert together[0][name] == apart[0][name] > 0, name
    for name in ("loss", "grad_norm"):
        assert together[0][name] == pytest.approx(apart[0][name], rel=1e-5), name
    assert together[0]["padding"] == 0 < apart[0]["padding"] and together[0]["batches"] < apart[0]["batches"]


@pytest.mark.timeout(60)
def test_a_packed_run_has_the_same_losses_with_one_replica_and_with_two(tmp_path: Path) -> None:
    runs = [steps(tmp_path / str(n), tree(target={"replicas": n}, drafter={"num_anchors": 5})) for n in (1, 2)]
    assert [r["loss"] for r in runs[0]] == [r["loss"] for r in runs[1]] and len(runs[0]) > 3
    assert sum(r["samples"] for r in runs[0]) == 80 and {r["padding"] for r in runs[0]} == {0.0}


def test_fixed_anchor_slots_are_refused_beside_packing() -> None:
    with pytest.raises(PipelineInvalid, match="as many anchors as its samples need"):
        load_mapping(tree(drafter={"anchor_slots": "fixed"}), installed(), Path.cwd())


def test_packing_stands_beside_other_strategies_in_a_plan() -> None:
    plugins = installed()
    brief = load(Path(__file__).parents[1] / "pipelines" / "brief.yaml", plugins)
    told, _ = plan_report(brief, ["packing"], plugins.registry, SilentReport())
    own, packed = told["strategies"]["length+shuffle"], told["strategies"]["packing"]
    assert packed["bucketer"] == "packing" and packed["fill"] >= 0.997 and packed["padding_waste"] == 0
    assert packed["batches"] <= 0.7 * own["batches"] and packed["coverage"] == 1
    assert packed["throughput_gain"] == pytest.approx(0.266, abs=0.005)
    assert packed["window_spread"] < 0.1 < own["window_spread"] and packed["tokens_cv"] < 0.005
    # The same anchors, on other places: nearly the same number of terms over an epoch.
    epoch = [f["terms_per_step"]["mean"] * f["steps"] for f in (own, packed)]
    assert epoch[1] == pytest.approx(epoch[0], rel=0.01)
