"""What a batch costs: tokens of the target and anchors of the draft, and who is told."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flowdflash_packing import PackingBucketer
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_fakes import headers
from test_streaming import Stream

from flowdflash import stages
from flowdflash.config.check import load_mapping
from flowdflash.errors import DataInvalid, FlowdflashError, PipelineInvalid
from flowdflash.graph import Graph
from flowdflash.items import BatchTable, SampleTable
from flowdflash.plugin.loader import load_plugins
from flowdflash.runtime import executor, probe
from flowdflash.runtime.draft_shape import DraftShape
from flowdflash.runtime.planner import PlanNames, Planner, plan_epochs
from flowdflash.stage import Check, OpenContext
from flowdflash.stages.equal_token import EqualTokenBucketer
from flowdflash.stages.length import LengthBucketer
from flowdflash.stages.optimal import OptimalBucketer
from flowdflash.stages.sorted_budget import SortedBudgetBucketer
from flowdflash.testing import make_samples, run_pipeline

BUCKETERS = [
    (LengthBucketer, {}),
    (LengthBucketer, {"batch_size": "dynamic"}),
    (EqualTokenBucketer, {}),
    (OptimalBucketer, {"batch_size": "dynamic"}),
    (SortedBudgetBucketer, {}),
]
TREE: dict[str, Any] = {
    "version": 1,
    "name": "cost",
    "seed": 3,
    "stages": {
        "corpus": {
            "kind": "source",
            "type": "synthetic_lengths",
            "samples": 12,
            "law": "uniform",
            "min_length": 8,
            "max_length": 32,
            "vocab_size": 127,
        },
        "buckets": {"kind": "bucketer", "type": "length", "inputs": "corpus", "buckets": 2, "token_budget": 96},
        "order": {"kind": "interleaver", "type": "stratified", "inputs": "buckets"},
        "dispatch": {"kind": "dispatcher", "type": "least_outstanding", "inputs": "order"},
        "target": {"kind": "target-forward", "type": "toy", "inputs": "dispatch", "vocab_size": 128},
        "drafter": {
            "kind": "drafter",
            "type": "dflash",
            "inputs": "target",
            "block_size": 4,
            "num_hidden_layers": 1,
            "num_anchors": 4,
            "accumulate": 2,
            "softmax": "seen",
        },
        "metrics": {"kind": "sink", "type": "jsonl", "inputs": "drafter.records"},
        "save": {"kind": "sink", "type": "checkpoint", "inputs": "drafter.checkpoints"},
    },
}


def with_options(stage: str, **options: Any) -> dict[str, Any]:
    return {**TREE, "stages": {**TREE["stages"], stage: {**TREE["stages"][stage], **options}}}


def checked(tree: dict[str, Any]) -> Graph:
    return load_mapping(tree, load_plugins(builtin=[stages]), Path.cwd()).graph


def priced(lengths: Any, cost: float, anchors: int) -> Any:
    samples = make_samples(lengths)
    return replace(samples, anchor_cost=DraftShape(anchors, 4, anchor_cost_tokens=cost).anchor_cost(samples))


def test_a_batch_costs_its_padded_tokens_and_as_many_anchors_per_row_as_the_one_with_most() -> None:
    samples = priced([10, 20, 3], 2.0, 8)
    padded = BatchTable.build(samples, [np.array([0, 1]), np.array([2])], [0, 0])
    assert padded.cost.tolist() == [40 + 2 * 8 * 2.0, 3 + 2 * 2.0]
    packed = BatchTable.build(samples, [np.array([0, 1, 2])], [0], packed=True)
    assert packed.cost.tolist() == [33 + (8 + 8 + 2) * 2.0]
    every_slot = DraftShape(8, 4, every_slot=True, anchor_cost_tokens=2.0)
    assert every_slot.anchor_cost(samples).tolist() == [16.0] * 3
    assert BatchTable.build(make_samples([10]), [np.array([0])], [0]).cost.tolist() == [10.0]


@pytest.mark.parametrize(("cls", "options"), BUCKETERS)
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=60),
    cost=st.floats(0, 10),
    anchors=st.integers(1, 30),
    budget=st.floats(420, 2000),
)
def test_no_batch_costs_more_than_its_budget(
    cls: Any, options: Any, lengths: list[int], cost: float, anchors: int, budget: float
) -> None:
    stage = cls(cls.Config(token_budget=400, cost_budget=budget, **options))
    table, left = stage.batches(priced(lengths, cost, anchors), np.random.default_rng(0))
    assert sorted(table.members.tolist()) == list(range(len(lengths))) and left is None
    assert (table.padded_tokens <= 400).all() and (table.cost <= budget + 1e-6).all()


def test_a_sample_over_the_budget_of_cost_follows_the_named_policy() -> None:
    samples = priced([10, 50], 2.0, 40)
    stage = LengthBucketer(LengthBucketer.Config(token_budget=99, cost_budget=100))
    with pytest.raises(DataInvalid, match=r"1 of 2 samples are dearer than the budget of 100.*raise cost_budget"):
        stage.batches(samples, np.random.default_rng(0))
    drop = LengthBucketer(LengthBucketer.Config(token_budget=99, cost_budget=100, over_budget="drop"))
    table, left = drop.batches(samples, np.random.default_rng(0))
    assert left.ids.tolist() == [1] and table.sizes.tolist() == [1]


def test_what_cannot_obey_a_budget_of_cost_refuses_it() -> None:
    for cls, options in ((PackingBucketer, {}), (OptimalBucketer, {"minimise": "batches"})):
        check = Check("buckets", {})
        cls(cls.Config(token_budget=64, cost_budget=100, **options)).check(check)
        assert [problem.severity for problem in check.problems] == ["error"]
    both = with_options("drafter", anchor_cost_tokens="probe")
    both["stages"]["buckets"] = {**both["stages"]["buckets"], "cost_budget": 500}
    with pytest.raises(PipelineInvalid, match=r"stages\.drafter\.anchor_cost_tokens: .*no two runs"):
        checked(both)


@pytest.mark.parametrize("cost_budget", [0, 100])
def test_the_plan_counts_anchors_as_the_drafter_says(tmp_path: Path, cost_budget: int) -> None:
    tree = with_options("drafter", anchor_cost_tokens=3.0)
    tree["stages"]["buckets"] = {**tree["stages"]["buckets"], "cost_budget": cost_budget}
    infos = headers(checked(tree), 3, tmp_path)
    anchors = [max(min(n - 1, 4) for n in info.supervised) * info.samples for info in infos]
    assert [info.cost for info in infos] == [i.padded_tokens + 3.0 * n for i, n in zip(infos, anchors, strict=True)]
    assert (max(info.cost for info in infos) <= 100) == bool(cost_budget)


class Forgetful(LengthBucketer):
    """Makes a table of its own of what it holds back."""

    def batches(self, samples: SampleTable, rng: Any) -> Any:
        table, left = super().batches(samples, rng)
        return table, left and replace(left, anchor_cost=None)


def test_samples_that_are_held_back_cost_no_less() -> None:
    stream = Stream(make_samples([30] * 9), 2)
    bucketer = Forgetful(Forgetful.Config(token_budget=100, edges=(30,)))
    shape = DraftShape(4, 4, anchor_cost_tokens=2.0)
    plan = Planner(stream, bucketer, None, PlanNames("corpus", "buckets"), seed=0, shape=shape)
    assert [info.cost for info in plan.batches()] == [3 * (30 + 4 * 2.0)] * 3


def test_the_plan_made_beforehand_has_the_cost_that_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def planned(planner: Planner) -> Any:
        seen.append(planner.shape and planner.shape.anchor_cost_tokens)
        return plan_epochs(planner)

    monkeypatch.setattr(executor, "plan_epochs", planned)
    monkeypatch.setattr(executor, "measured", lambda graph, shape, *_: replace(shape, anchor_cost_tokens=7.5))
    run_pipeline(with_options("drafter", anchor_cost_tokens="probe"), run_dir=tmp_path / "run")
    assert seen == [7.5]


def test_two_costs_are_told_apart_by_least_squares() -> None:
    sizes = np.array([[100.0, 10], [100, 1], [400, 100], [400, 2]])
    assert probe._solve(sizes, sizes @ [0.037, 0.41]) == pytest.approx((0.037, 0.41))
    assert probe._solve(sizes, sizes @ [1.0, -0.5])[1] == 0.0
    with pytest.raises(FlowdflashError, match=r"cannot be explained.*give anchor_cost_tokens a number"):
        probe._solve(sizes, -sizes[:, 0])


def left_behind(folder: Path) -> tuple[Any, ...]:
    """What a run leaves: its records without their times, its plan, the bytes of its last draft and ledger."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    timeless = [{k: v for k, v in record.items() if not k.endswith("_secs")} for record in records]
    checkpoint = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text(encoding="utf-8").strip()
    files = [path for path in sorted(checkpoint.rglob("*")) if path.suffix == ".safetensors"]
    assert records and files
    return timeless, (folder / "plan.json").read_text(encoding="utf-8"), [path.read_bytes() for path in files]


@pytest.mark.timeout(200)
def test_a_probe_leaves_no_trace_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def random_states() -> list[bytes]:
        return [bytes(torch.get_rng_state().tolist()), pickle.dumps(np.random.get_state())]

    def watched(*given: Any) -> Any:
        before = random_states()
        result = measured(*given)
        assert random_states() == before
        return result

    measured = probe.measured
    monkeypatch.setattr(executor, "measured", watched)
    monkeypatch.setattr(probe, "LIMIT_SECS", 0.0)
    kept = []
    for name, cost in (("with", "probe"), ("without", 0.0)):
        outcome = run_pipeline(with_options("drafter", anchor_cost_tokens=cost), run_dir=tmp_path / name)
        counts = outcome.steps, outcome.batches, outcome.samples, outcome.tokens, outcome.summaries["drafter"]
        kept.append((*left_behind(tmp_path / name), counts))
    assert kept[0] == kept[1]
    found = json.loads((tmp_path / "with" / "cost.json").read_text(encoding="utf-8"))
    assert found["token_secs"] > 0 and found["anchor_cost_tokens"] >= 0
    assert not (tmp_path / "without" / "cost.json").exists()


def test_a_run_that_is_resumed_takes_the_cost_that_it_had(tmp_path: Path) -> None:
    (tmp_path / "cost.json").write_text('{"anchor_cost_tokens": 7.5}', encoding="utf-8")
    graph = checked(with_options("drafter", anchor_cost_tokens="probe"))
    shape = DraftShape.of(graph)
    assert shape is not None and shape.measured and shape.anchor_cost_tokens == 0
    assert probe.measured(graph, shape, None, OpenContext("", tmp_path, tmp_path)).anchor_cost_tokens == 7.5
