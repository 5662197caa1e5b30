"""The pipeline as a graph: nodes, typed edges, facts. The only module that imports networkx."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
    cls: type[Stage]
    config: Any
    inputs: tuple[Edge, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A checked pipeline: nodes by name in topological order (stable: order of the file breaks ties), and all edges."""

    nodes: Mapping[str, Node]
    edges: tuple[Edge, ...]

    def outputs(self, name: str) -> tuple[Edge, ...]:
        """Edges that leave a stage."""
        return tuple(edge for edge in self.edges if edge.source == name)

    def of_kind(self, kind: Kind) -> tuple[Node, ...]:
        """Nodes of one kind, in topological order."""
        return tuple(node for node in self.nodes.values() if node.kind == kind)
