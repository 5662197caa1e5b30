"""The planning plane of a graph: its stages, and the accumulation window that the plan is made for."""

from __future__ import annotations

from dataclasses import dataclass

from flowdflash.errors import PipelineInvalid, Problem, StageFailed
from flowdflash.graph import Graph, Node
from flowdflash.runtime.draft_shape import DraftShape
from flowdflash.runtime.ledger import NOTHING, Ledger
from flowdflash.runtime.planner import PlanNames, Planner
from flowdflash.stage import Bucketer, Interleaver, Source, Stage


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
    window = graph.returned.get(name, {}).get("window", 1)
    return window if isinstance(window, int) and window > 0 else 1


def plan_window(graph: Graph) -> int:
    """The window that the plan is made for: that of the first drafter, or 1."""
    drafters = graph.of_kind("drafter")
    return window_of(graph, drafters[0].name) if drafters else 1
