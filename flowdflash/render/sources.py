"""Graphs as Mermaid and as DOT: text that other programs draw."""

from __future__ import annotations

import re

from flowdflash.graph import Edge, Graph, Node
from flowdflash.render.labels import capacity, carries, details, elide, flat, is_planning, planes, titled


def _lines(graph: Graph, node: Node) -> list[str]:
    return [flat(line) for line in (node.name, titled(node), *(elide(d, 48) for d in details(graph, node)))]


def _ids(graph: Graph) -> dict[str, str]:
    """A plain identifier per stage: a name may be a word of the language it is drawn in."""
    return {name: f"n{index}" for index, name in enumerate(graph.nodes)}


def mermaid(graph: Graph, name: str) -> str:
    """A Mermaid flowchart, one subgraph per plane; thin dashed lines carry numbers, solid ones tensors."""
    ids = _ids(graph)
    lines = ["---", f"title: {_quoted(flat(name))}", "---", "flowchart LR"]
    for plane, title, names in planes(graph):
        lines.append(f'  subgraph {plane}_plane["{_entities(title)}"]')
        for stage in names:
            label = "<br/>".join(map(_entities, _lines(graph, graph.nodes[stage])))
            lines.append(f'    {ids[stage]}["{label}"]:::{plane}')
        lines.append("  end")
    for edge in graph.edges:
        arrow = "-.->" if is_planning(edge) else "-->"
        label = _entities(f"{flat(carries(edge))} {capacity(edge)}")
        lines.append(f'  {ids[edge.source]} {arrow}|"{label}"| {ids[edge.target]}')
    lines.append("  classDef planning stroke:#0969da,stroke-dasharray:4 3")
    lines.append("  classDef data stroke:#1a7f37,stroke-width:2px")
    return "\n".join(lines) + "\n"


def _entities(text: str) -> str:
    """Letters, digits and a few marks as they are, all else as a numbered entity of Mermaid."""
    text = re.sub(r"(?<=[a-z])-(?=[a-z])", "\0", text)  # a hyphen in a word is no arrow
    return "".join(ch if ch.isalnum() or ch in " _./,:=×…" else f"#{ord(ch)};" for ch in text).replace("#0;", "-")


def dot(graph: Graph, name: str) -> str:
    """A Graphviz digraph, one cluster per plane."""
    ids = _ids(graph)
    lines = [f"digraph {_quoted(flat(name))} {{", "  rankdir=LR;"]
    lines.append('  node [shape=box, style=rounded, fontname="sans-serif"];')
    lines.append('  edge [fontname="sans-serif", fontsize=10];')
    for plane, title, names in planes(graph):
        lines += [f"  subgraph cluster_{plane} {{", f"    label={_quoted(title)};"]
        lines += [f"    {ids[stage]} [label={_multiline(_lines(graph, graph.nodes[stage]))}];" for stage in names]
        lines.append("  }")
    lines += [f"  {ids[edge.source]} -> {ids[edge.target]} [{_edge_attributes(edge)}];" for edge in graph.edges]
    return "\n".join([*lines, "}"]) + "\n"


def _edge_attributes(edge: Edge) -> str:
    style = ", style=dashed" if is_planning(edge) else ""
    return f"label={_multiline([flat(carries(edge)), capacity(edge)])}{style}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _quoted(text: str) -> str:
    return f'"{_escape(text)}"'


def _multiline(lines: list[str]) -> str:
    return '"' + "\\n".join(map(_escape, lines)) + '"'
