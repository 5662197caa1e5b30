from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from flowdflash.dflash.config import DraftConfig
from flowdflash.errors import PipelineInvalid, StageFailed
from flowdflash.items import BatchTable, FeatureBatch, SampleTable, TokenBatch
from flowdflash.runtime.draft_shape import DraftShape
from flowdflash.runtime.order_metrics import measure
from flowdflash.runtime.plan_compare import joined, plan_strategies
from flowdflash.runtime.plan_figures import bucket_rows, figures, per_window
from flowdflash.runtime.plan_memory import feature_bytes, memory
from flowdflash.runtime.plan_series import histogram, length_classes, series
from flowdflash.runtime.planner import PlanBlock
from flowdflash.stage import SilentReport
from flowdflash.testing import make_batches, make_samples
from tests.runtime_fakes import FakeSource, Pipeline


def planned(graphs, tmp_path: Path, seed: int = 7):
    return plan_strategies(graphs, seed, run_dir=tmp_path, cache_dir=tmp_path, report=SilentReport())


def test_the_source_is_opened_and_read_once_whatever_is_compared(tmp_path: Path) -> None:
    pipeline = Pipeline(options={"source": {"epochs": 3}, "drafter": {"accumulate": 4}})
    graph = pipeline.graph
    plans, totals = planned({"own": graph, "again": graph}, tmp_path)
    opened = [name for name, *_ in pipeline.journal.of("open")]
    assert opened == ["source", "buckets", "order", "buckets", "order"]
    assert sorted(name for name, *_ in pipeline.journal.of("close")) == sorted(opened)
    assert (totals.epochs, totals.batches, totals.steps, totals.samples, totals.tokens) == (3, 21, 6, 42, 126)
    assert plans[0].order.tolist() == plans[1].order.tolist()


def test_what_is_shown_is_what_a_run_does(tmp_path: Path) -> None:
    pipeline = Pipeline(options={"source": {"lengths": list(range(3, 17))}})
    plans, _ = planned({"own": pipeline.graph}, tmp_path)
    pipeline.run(tmp_path)
    table = plans[0].table
    shown = [tuple(table.samples.ids[table.positions(i)].tolist()) for i in plans[0].order.tolist()]
    assert [ids for _, _, ids in pipeline.journal.of("step")] == shown


@pytest.mark.parametrize(
    ("stage", "method", "phase", "opened"),
    [("order", "order", "run", 5), ("buckets", "open", "open", 4), ("buckets", "close", "close", 5)],
)
def test_a_stage_that_fails_is_named_and_all_are_closed(
    stage: str, method: str, phase: str, opened: int, tmp_path: Path
) -> None:
    pipeline = Pipeline()
    pipeline.faults.at(stage, method, 1, OSError("no"))
    with pytest.raises(StageFailed) as caught:
        planned({"own": pipeline.graph, "again": pipeline.graph}, tmp_path)
    assert (caught.value.stage, caught.value.phase) == (stage, phase)
    assert len(pipeline.journal.of("open")) == len(pipeline.journal.of("close")) == opened


def test_a_streaming_source_is_refused_since_its_samples_are_not_known(tmp_path: Path) -> None:
    class Stream(FakeSource):
        type = "stream"
        streaming = True

    with pytest.raises(PipelineInvalid, match="source 'source' is streaming"):
        planned({"own": Pipeline(classes={"source": Stream}).graph}, tmp_path)


def test_an_epoch_that_comes_in_blocks_is_planned_as_one_table(tmp_path: Path) -> None:
    class Blocks(FakeSource):
        type = "blocks"

        def epochs(self):
            for epoch in range(2):
                for block, last in ((range(5), False), (range(5, 14), True)):
                    ids = np.array(block)
                    yield SampleTable(epoch, ids, ids + 3, ids + 3, last)

    pipeline = Pipeline(classes={"source": Blocks}, options={"buckets": {"drop_last": True}})
    plans, totals = planned({"own": pipeline.graph, "again": pipeline.graph}, tmp_path)
    for plan in plans:
        ids = plan.table.samples.ids[plan.table.members]
        assert sorted(ids.tolist()) == list(range(14)) and sorted(plan.order.tolist()) == list(range(7))
        assert (plan.table.tokens == [sum(i + 3 for i in ids[a : a + 2]) for a in range(0, 14, 2)]).all()
    assert totals.batches == 14 and totals.epochs == 2


def test_joined_blocks_keep_their_order_and_their_samples() -> None:
    first, second = make_batches([0, 1], [5, 7]), make_batches([1, 0, 2], [9, 11, 13])
    table, order = joined(
        [PlanBlock(first, np.array([1, 0]), 0, {}, False), PlanBlock(second, np.array([2, 0, 1]), 1, {}, True)]
    )
    assert table.tokens[order].tolist() == [7, 5, 13, 9, 11] and table.bucket[order].tolist() == [1, 0, 2, 1, 0]


@pytest.mark.parametrize("supervised", [0, 1, 2, 3, 7, 8, 9, 40])
@pytest.mark.parametrize("num_anchors", [1, 5, 100])
def test_loss_terms_are_those_that_drawing_anchors_would_give_on_average(supervised: int, num_anchors: int) -> None:
    shape = DraftShape(num_anchors=num_anchors, block_size=8)
    places = [min(7, supervised - 1 - at) for at in range(max(supervised - 1, 0))]
    drawn = min(num_anchors, len(places))
    samples = make_samples([41], [supervised])
    assert shape.anchors(samples.supervised).tolist() == [drawn]
    for packed in (False, True):
        table = BatchTable.build(samples, [np.array([0])], [0], packed=packed)
        assert shape.terms(table)[0] == pytest.approx(sum(places) / max(len(places), 1) * drawn)


def test_rows_per_bucket_add_up() -> None:
    table = make_batches([0, 0, 1, 1, 1], [10, 20, 30, 40, 50])
    rows = bucket_rows(table, np.array([1.0, 1.0, 2.0, 2.0, 2.0]))
    for share in ("sample_share", "batch_share", "token_share", "term_share"):
        assert sum(row[share] for row in rows) == pytest.approx(1)
    assert [(row["min_length"], row["max_length"], row["batches"]) for row in rows] == [(10, 20, 2), (30, 50, 3)]


def test_the_incomplete_window_at_the_end_is_a_step_too() -> None:
    assert per_window(np.array([1, 2, 3, 4, 5]), 2).tolist() == [3, 7, 5]
    assert per_window(np.zeros(0), 2).tolist() == []


def test_figures_of_batches_without_buckets_say_nothing_of_buckets(tmp_path: Path) -> None:
    plans, _ = planned({"own": Pipeline().graph}, tmp_path)
    table = make_batches([-1] * 40, np.arange(1, 41))
    bare = figures(replace(plans[0], table=table, order=np.arange(40)), 8, None)
    assert (
        bare["longest_run"] is bare["prefix_discrepancy"] is bare["largest_batch_share"] is bare["tail_share"] is None
    )
    assert bare["noise_ratio"] == measure(table, np.arange(40), 8).noise_ratio and bare["terms_per_step"] is None
    assert bare["noise_ratio_by_window"]["16"] is None and bare["noise_ratio_by_window"]["8"] == bare["noise_ratio"]


def told_graph(pipeline: Pipeline, **told):
    graph = pipeline.graph
    return replace(graph, returned={**graph.returned, **told})


def test_edges_hold_at_most_their_capacity_of_the_largest_batch() -> None:
    pipeline = Pipeline(capacities={"target": 3, "drafter": 2}, options={"target": {"replicas": 2}})
    graph = told_graph(pipeline, target={"hidden_size": 10, "layers": (1, 2), "dtype": "bfloat16", "replicas": 2})
    told = memory(graph, make_batches([0, 0], [50, 100]), "plan", Path())
    assert told["features"]["bytes_per_token"] == 40 and told["features"]["largest_batch_bytes"] == 4000
    tokens = 100 * 9 + 8
    by_edge = {edge["edge"]: (edge["capacity"], edge["most_bytes"]) for edge in told["edges"]}
    # Two replicas with an inbox of three each; before the drafter a reorder buffer of four per replica.
    assert by_edge == {"dispatch->target": (6, 6 * tokens), "target->drafter": (8, 8 * (4000 + tokens))}
    unordered = memory(graph, make_batches([0, 0], [50, 100]), "arrival", Path())
    assert unordered["edges"][1]["capacity"] == 2


def test_a_limit_in_bytes_bounds_an_edge_but_for_a_first_window() -> None:
    pipeline = Pipeline(capacities={"drafter": 50}, capacity_bytes={"drafter": 10_000})
    graph = told_graph(pipeline, target={"hidden_size": 10, "layers": (1, 2), "dtype": "float32"})
    each = 100 * 80 + 100 * 9 + 8
    told = memory(graph, make_batches([0], [100]), "plan", Path())
    assert told["edges"][1]["most_bytes"] == 10_000 + each
    graph = replace(graph, returned={**graph.returned, "drafter": {"window": 8}})
    assert memory(graph, make_batches([0], [100]), "plan", Path())["edges"][1]["most_bytes"] == 8 * each


def test_features_are_unknown_where_the_target_must_be_opened_first() -> None:
    table = make_batches([0], [100])
    graph = told_graph(Pipeline(), target={"model": "some/model"})
    assert feature_bytes(graph, table) is None
    edges = {edge["edge"]: edge["most_bytes"] for edge in memory(graph, table, "plan", Path())["edges"]}
    assert edges["target->drafter"] is None and edges["dispatch->target"] > 0
    auto = told_graph(Pipeline(), target={"hidden_size": 10, "layers": (1,)})
    assert feature_bytes(auto, table)["dtype_assumed"] and feature_bytes(auto, table)["bytes_per_token"] == 20


def test_checkpoints_are_held_against_the_free_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=3500 if path == tmp_path else 0))
    graph = told_graph(Pipeline(), save={"checkpoint_bytes": 1000, "checkpoints": 4})
    [sink] = memory(graph, make_batches([0], [100]), "plan", tmp_path / "runs")["checkpoints"]
    assert (sink["total_bytes"], sink["free_bytes"], sink["fits"]) == (4000, 3500, False)


def test_classes_are_the_buckets_or_equal_shares_of_the_tokens() -> None:
    assert length_classes(make_batches([2, 0, 0, 1], [90, 10, 20, 50])) == [20, 50, 90]
    bare = length_classes(make_batches([-1] * 60, np.arange(1, 61)))
    assert len(bare) == 6 and bare[-1] == 60


def test_a_histogram_counts_every_sample() -> None:
    drawn = histogram(make_samples([1, 5, 5, 700]).lengths)
    assert sum(drawn["counts"]) == 4 and drawn["bounds"][-1] == 700


def test_thinning_out_hides_no_peak(tmp_path: Path) -> None:
    plans, _ = planned({"own": Pipeline().graph}, tmp_path)
    table = make_batches(np.repeat([0, 1], 1500), np.repeat([10, 20], 1500))
    drawn = series(replace(plans[0], table=table, order=np.arange(3000)), [10, 20])
    assert max(drawn["discrepancy"]) == 750 and len(drawn["discrepancy"]) == len(drawn["discrepancy_at"]) == 400
    assert drawn["strip"] == [0] * 500


def test_the_size_of_a_checkpoint_follows_from_the_options() -> None:
    from flowdflash_checkpoint import CheckpointSink

    from flowdflash.stage import Check
    from flowdflash.stages.dflash_drafter import DFlashDrafter
    from flowdflash.target.catalogue import facts_of

    known = facts_of("Qwen/Qwen3-0.6B")
    facts = {"model": "Qwen/Qwen3-0.6B", "layers": (1, 13, 25), "hidden_size": 1024, "num_layers": 28}
    told = DFlashDrafter(DFlashDrafter.Config(block_size=8, num_hidden_layers=2)).check(Check("drafter", facts))
    config = DraftConfig(
        hidden_size=1024,
        intermediate_size=known["intermediate_size"],
        num_hidden_layers=2,
        num_attention_heads=known["num_heads"],
        num_key_value_heads=known["num_kv_heads"],
        head_dim=known["head_dim"],
        vocab_size=known["vocab_size"],
        block_size=8,
        mask_token_id=0,
        target_layer_ids=(1, 13, 25),
        num_target_layers=28,
    )
    assert told["draft_parameters"] == config.num_parameters and told["num_anchors"] == 512
    sink = CheckpointSink(CheckpointSink.Config(every_steps=10, keep=2))
    size = sink.check(Check("save", told))
    assert size == {"checkpoint_bytes": 14 * config.num_parameters, "checkpoints": 3}
    assert sink.check(Check("save", {})) == {}


def test_the_payloads_that_fill_memory_are_those_with_tensors() -> None:
    table = make_batches([0], [100])
    edges = memory(told_graph(Pipeline()), table, "plan", Path())["edges"]
    heavy = [e.name for e in Pipeline().graph.edges if e.payload in (TokenBatch, FeatureBatch)]
    assert [edge["edge"] for edge in edges] == heavy
