"""The planning plane of a graph: its stages, and what a run will look like before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from flowdflash.errors import PipelineInvalid, Problem, StageFailed
from flowdflash.graph import Graph, Node
from flowdflash.runtime.draft_shape import DraftShape
from flowdflash.runtime.ledger import NOTHING, Ledger
from flowdflash.runtime.planner import Plan, PlanNames, Planner, plan_epochs
from flowdflash.stage import Bucketer, Interleaver, OpenContext, Report, SilentReport, Source, Stage


@dataclass(frozen=True, slots=True, eq=False)
class PlanStages:
    """The stages of the planning plane, built and not yet opened."""

    source: Source
    bucketer: Bucketer
    interleaver: Interleaver | None
    names: PlanNames
    shape: DraftShape | None = None

    @classmethod
    def build(cls, graph: Graph) -> PlanStages:
        """The chain source, bucketer, interleaver of a pipeline.

        Raises:
            PipelineInvalid: it has none, or more than one.
        """
        problems, found = [], []
        for kind, least in (("source", 1), ("bucketer", 1), ("interleaver", 0)):
            nodes = [node for node in graph.nodes.values() if node.kind == kind]
            if not least <= len(nodes) <= 1:
                wanted = "exactly one" if least else "at most one"
                problems.append(Problem(f"a run needs {wanted} {kind}, this pipeline has {len(nodes)}", path="stages"))
            found.append(nodes[0] if nodes else None)
        if problems:
            raise PipelineInvalid(problems)
        built = [build(node) if node else None for node in found]
        names = PlanNames(*[node.name if node else "" for node in found])
        source, bucketer, interleaver = built
        assert isinstance(source, Source) and isinstance(bucketer, Bucketer)
        assert interleaver is None or isinstance(interleaver, Interleaver)
        return cls(source, bucketer, interleaver, names, DraftShape.of(graph))

    def stages(self) -> tuple[tuple[str, Stage], ...]:
        """Names and stages, upstream first."""
        chain: list[tuple[str, Stage]] = [(self.names.source, self.source), (self.names.bucketer, self.bucketer)]
        return (*chain, (self.names.interleaver, self.interleaver)) if self.interleaver else tuple(chain)

    def planner(self, seed: int, window: int, skip: Ledger = NOTHING) -> Planner:
        """A planner over these stages."""
        stages = self.source, self.bucketer, self.interleaver
        return Planner(*stages, self.names, seed=seed, window=window, skip=skip, shape=self.shape)


def build(node: Node) -> Stage:
    """A stage from its config.

    Raises:
        StageFailed: its constructor raised.
    """
    try:
        return node.cls(node.config)
    except BaseException as error:
        raise StageFailed(node.name, error, phase="open") from error


def window_of(graph: Graph, name: str) -> int:
    """Micro-batches per optimizer step of a drafter, from what its check returned; 1 if it did not say."""
    returned: Mapping[str, Mapping[str, object]] = getattr(graph, "returned", {})
    window = returned.get(name, {}).get("window", 1)
    return window if isinstance(window, int) and window > 0 else 1


def plan_window(graph: Graph) -> int:
    """The window that the plan is made for: that of the first drafter, or 1."""
    drafters = graph.of_kind("drafter")
    return window_of(graph, drafters[0].name) if drafters else 1


def plan_graph(
    graph: Graph, seed: int, *, run_dir: Path, cache_dir: Path, report: Report | None = None, window: int = 0
) -> Plan:
    """Open the planning plane of a pipeline, plan every epoch, close it. Nothing downstream is touched.

    Raises:
        StageFailed: a stage raised in open, while planning, or in close.
    """
    stages = PlanStages.build(graph)
    ctx = OpenContext("", run_dir, cache_dir, seed=seed, report=report or SilentReport())
    with ExitStack() as closing:
        for name, stage in stages.stages():
            closing.callback(_close, name, stage)
            node: Node = graph.nodes[name]
            try:
                stage.open(replace(ctx, stage=name, facts=node.facts))
            except BaseException as error:
                raise StageFailed(name, error, phase="open") from error
        return plan_epochs(stages.planner(seed, window or plan_window(graph)))


def _close(name: str, stage: Stage) -> None:
    try:
        stage.close()
    except BaseException as error:
        raise StageFailed(name, error, phase="close") from error
