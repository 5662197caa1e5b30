"""Drawings of a graph, made here and now: no service, no other program, the same text every time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from flowdflash.graph import Edge, Graph, Node
from flowdflash.render.labels import replicas
from flowdflash.render.page import page
from flowdflash.render.sources import dot, mermaid
from flowdflash.render.svg import svg
from flowdflash.render.text import text
from flowdflash.secrets import hidden


def as_json(graph: Graph, name: str) -> str:
    """Nodes with their options and facts, and edges, for programs."""
    tree = {
        "name": name,
        "nodes": [_node(graph, node) for node in graph.nodes.values()],
        "edges": [_edge(edge) for edge in graph.edges],
    }
    return json.dumps(tree, indent=2, ensure_ascii=False, default=str) + "\n"


def _node(graph: Graph, node: Node) -> dict[str, Any]:
    dump = getattr(node.config, "model_dump", dict)
    return {
        "name": node.name,
        "kind": node.kind,
        "type": node.type,
        "replicas": replicas(node),
        "options": dump(),
        "facts": dict(node.facts),
        "returned": dict(graph.returned.get(node.name, {})),
    }


def _edge(edge: Edge) -> dict[str, Any]:
    return {
        "from": edge.source,
        "port": edge.port,
        "to": edge.target,
        "payload": edge.payload.__name__,
        "capacity": edge.capacity,
        "capacity_bytes": edge.capacity_bytes,
    }


FORMATS: Mapping[str, Callable[[Graph, str], str]] = {
    "text": text,
    "mermaid": mermaid,
    "dot": dot,
    "svg": svg,
    "html": page,
    "json": as_json,
}
"""Formats by name; each takes a graph and the name of the pipeline, and gives text."""


def render(graph: Graph, format: str, *, name: str = "pipeline") -> str:
    """A graph as text in one of ``FORMATS``.

    Raises:
        ValueError: there is no such format.
    """
    if format not in FORMATS:
        raise ValueError(f"there is no format {format!r}; choose one of {', '.join(FORMATS)}")
    drawn = FORMATS[format](graph, name)
    for spelt in (str, escape, _in_json):
        drawn = hidden(drawn, spelt)
    return drawn


def _in_json(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)[1:-1]
