"""One epoch of a pipeline, planned under several strategies over the same samples."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flowdflash.errors import PipelineInvalid, Problem, StageFailed
from flowdflash.graph import Graph
from flowdflash.items import BatchTable, IntArray, SampleTable
from flowdflash.runtime.plan import PlanStages, plan_window
from flowdflash.runtime.planner import PlanBlock, blamed_on
from flowdflash.stage import OpenContext, Report, Source, Stage


@dataclass(frozen=True, slots=True, eq=False)
class StrategyPlan:
    """The first epoch under one strategy.

    Attributes:
        name: what the strategy is called.
        bucketer, interleaver: their types; the second is empty if there is none.
        token_budget: of the bucketer's options, 0 if it has none.
        table: the batches.
        order: indices into ``table``.
        dropped: samples that are in no batch, by reason.
        summary: what the bucketer says of its work.
        secs: wall time of bucketing and ordering.
    """

    name: str
    bucketer: str
    interleaver: str
    token_budget: int
    table: BatchTable
    order: IntArray
    dropped: Mapping[str, int]
    summary: Mapping[str, Any]
    secs: float


@dataclass(frozen=True, slots=True)
class RunTotals:
    """A whole run under the pipeline's own strategy."""

    epochs: int = 0
    batches: int = 0
    steps: int = 0
    samples: int = 0
    tokens: int = 0

    def plus(self, blocks: Sequence[PlanBlock], window: int) -> RunTotals:
        """These totals and one epoch more. A window never crosses the end of an epoch."""
        batches = sum(len(b.order) for b in blocks)
        return RunTotals(
            self.epochs + 1,
            self.batches + batches,
            self.steps - (-batches // window),
            self.samples + sum(len(b.batches.members) for b in blocks),
            self.tokens + sum(int(b.batches.tokens.sum()) for b in blocks),
        )


def plan_strategies(
    graphs: Mapping[str, Graph], seed: int, *, run_dir: Path, cache_dir: Path, report: Report
) -> tuple[tuple[StrategyPlan, ...], RunTotals]:
    """Plan the first epoch of each graph; of the first one also the rest, to count what a run comes to.

    The graphs have one source: it is opened once, and all plan over the tables that it gives.

    Raises:
        PipelineInvalid: the planning plane is not one source, one bucketer and at most one interleaver, or the source
            is streaming.
        StageFailed: a stage raised in open, while planning, or in close.
    """
    first, *others = graphs
    chosen = PlanStages.build(graphs[first])
    window = plan_window(graphs[first])
    ctx = OpenContext("", run_dir, cache_dir, seed=seed, report=report)
    with ExitStack() as closing:
        _open(chosen.names.source, chosen.source, graphs[first], ctx, closing)
        tables = _first_epoch(chosen)
        plans, totals = [], RunTotals()
        for name in (first, *others):
            stages = chosen if name == first else replace(PlanStages.build(graphs[name]), source=_Replay(tables))
            with ExitStack() as closing_these:
                for stage_name, stage in stages.stages()[1:]:
                    _open(stage_name, stage, graphs[name], ctx, closing_these)
                plan, of_run = _plan(name, stages, seed, window)
            plans.append(plan)
            totals = of_run if name == first else totals
    return tuple(plans), totals


def _plan(name: str, stages: PlanStages, seed: int, window: int) -> tuple[StrategyPlan, RunTotals]:
    blocks: list[PlanBlock] = []
    kept: list[PlanBlock] = []
    summary: Mapping[str, Any] = {}
    totals, secs, began = RunTotals(), 0.0, time.perf_counter()
    for block in stages.planner(seed, window).blocks():
        blocks.append(block)
        if not block.last:
            continue
        if not totals.epochs:
            kept, summary, secs = blocks, stages.bucketer.summary(), time.perf_counter() - began
        totals = totals.plus(blocks, window)
        blocks = []
    table, order = joined(kept)
    plan = StrategyPlan(
        name=name,
        bucketer=stages.bucketer.type,
        interleaver=stages.interleaver.type if stages.interleaver else "",
        token_budget=int(getattr(stages.bucketer.config, "token_budget", 0)),
        table=table,
        order=order,
        dropped={reason: count for block in kept for reason, count in block.dropped.items()},
        summary=summary,
        secs=secs,
    )
    return plan, totals


def joined(blocks: Sequence[PlanBlock]) -> tuple[BatchTable, IntArray]:
    """All blocks of an epoch as one table and one order."""
    if len(blocks) == 1:
        return blocks[0].batches, blocks[0].order
    tables = [block.batches for block in blocks]
    samples, groups = tables[0].samples, []
    base = rows = 0
    orders = [np.zeros(0, np.int64)]
    for table, block in zip(tables, blocks, strict=True):
        samples = table.samples if not base and not rows else samples.joined(table.samples)
        groups += [table.positions(i) + base for i in range(len(table))]
        orders.append(block.order + rows)
        base, rows = base + len(table.samples), rows + len(table)
    join = np.concatenate
    bucket, cost = join([t.bucket for t in tables]), join([t.cost for t in tables])
    return BatchTable.build(samples, groups, bucket, cost, packed=any(t.packed for t in tables)), join(orders)


class _Replay(Source):
    """Tables that a source has given before."""

    type = "replay"

    def __init__(self, tables: Sequence[SampleTable]) -> None:
        super().__init__(None)
        self._tables = tables

    def epochs(self) -> Iterator[SampleTable]:
        yield from self._tables


def _first_epoch(stages: PlanStages) -> list[SampleTable]:
    name, source = stages.names.source, stages.source
    if type(source).streaming:
        text = f"source {name!r} is streaming: its samples are not known before a run has read them"
        raise PipelineInvalid([Problem(text, path=f"stages.{name}", hint="only a map-style source can be planned")])
    tables: list[SampleTable] = []
    with blamed_on(name):
        for table in source.epochs():
            tables.append(table)
            if table.last:
                break
    return tables


def _open(name: str, stage: Stage, graph: Graph, ctx: OpenContext, closing: ExitStack) -> None:
    """Open a stage, and see to it that it is closed."""
    closing.callback(_close, name, stage)
    try:
        stage.open(replace(ctx, stage=name, facts=graph.nodes[name].facts))
    except BaseException as error:
        raise StageFailed(name, error, phase="open") from error


def _close(name: str, stage: Stage) -> None:
    try:
        stage.close()
    except BaseException as error:
        raise StageFailed(name, error, phase="close") from error
