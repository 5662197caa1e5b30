"""The pipeline as a graph: nodes, typed edges, facts. The only module that imports networkx."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import networkx as nx

from flowdflash.stage import Kind, Stage


@dataclass(frozen=True, slots=True)
class Edge:
    """One input of a stage.

    Attributes:
        source: name of the stage that writes.
        port: output port of that stage, ``""`` for its main output.
        target: name of the stage that reads.
        payload: class of what travels.
        capacity: most items that may wait in the channel (per replica, where the reader has several).
        capacity_bytes: most bytes that may wait, 0 for no limit. Never blocks the first item.
    """

    source: str
    port: str
    target: str
    payload: type
    capacity: int = 2
    capacity_bytes: int = 0

    @property
    def name(self) -> str:
        """``from->to``, with the port where it is not the main one."""
        return f"{self.source}.{self.port}->{self.target}" if self.port else f"{self.source}->{self.target}"


_StageClass = type[Stage]


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One stage of a checked pipeline.

    Attributes:
        name: its name in the pipeline.
        kind, type: as in the registry.
        cls: the class; a stage is ``cls(config)``.
        config: validated ``cls.Config``.
        inputs: edges that it reads, in the order written.
        facts: facts of everything upstream, as ``check`` saw them.
    """

    name: str
    kind: Kind
    type: str
    cls: _StageClass
    config: Any
    inputs: tuple[Edge, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A checked pipeline.

    Attributes:
        nodes: by name in topological order; the order of the file breaks ties.
        edges: all edges, by reader in the order of ``nodes``.
        returned: the facts that each stage returned from ``check``, by stage.
    """

    nodes: Mapping[str, Node]
    edges: tuple[Edge, ...]
    returned: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def outputs(self, name: str) -> tuple[Edge, ...]:
        """Edges that leave a stage."""
        return tuple(edge for edge in self.edges if edge.source == name)

    def of_kind(self, kind: Kind) -> tuple[Node, ...]:
        """Nodes of one kind, in topological order."""
        return tuple(node for node in self.nodes.values() if node.kind == kind)


class Checked(Protocol):
    """A checked pipeline, as far as a run and a comparison of two need it."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def graph(self) -> Graph:
        """Its stages."""

    @property
    def seed(self) -> int:
        """Of everything random."""

    @property
    def ordering(self) -> str:
        """``plan`` or ``arrival``."""

    @property
    def stall_secs(self) -> float:
        """How long nothing may move before a person is told; 0 for ever."""


MAX_CYCLES = 20
"""Most cycles told at once, for stages that are tangled; the count grows exponentially."""


def topological(names: Sequence[str], wires: Iterable[tuple[str, str]]) -> tuple[list[str], list[list[str]]]:
    """Names in topological order, and the cycles.

    Stages on a cycle are left out of the order. Where the wires leave a choice, the order of ``names`` holds. A cycle
    starts with the stage that comes first in ``names``.
    """
    rank = {name: i for i, name in enumerate(names)}
    tangle = nx.DiGraph()
    tangle.add_nodes_from(names)
    tangle.add_edges_from(dict.fromkeys(wires))
    cycles = []
    for cycle in islice(nx.simple_cycles(tangle), MAX_CYCLES):
        first = cycle.index(min(cycle, key=rank.__getitem__))
        cycles.append([*cycle[first:], *cycle[:first]])
    for knot in list(nx.strongly_connected_components(tangle)):
        if len(knot) > 1 or tangle.has_edge(*knot, *knot):
            tangle.remove_nodes_from(knot)
    order = list(nx.lexicographical_topological_sort(tangle, key=rank.__getitem__))
    return order, sorted(cycles, key=lambda cycle: [rank[name] for name in cycle])
