"""A graph for a terminal: a chain goes straight down, a branch is indented."""

from __future__ import annotations

from collections.abc import Iterator

from flowdflash.graph import Edge, Graph
from flowdflash.render.labels import capacity, carries, counted, details, flat, joined, titled


def text(graph: Graph, name: str) -> str:
    """One line per stage and one per edge; a stage that several others feed is drawn once and referred to after."""
    head = f"{flat(name)}: {counted(len(graph.nodes), 'stage')}, {counted(len(graph.edges), 'edge')}"
    lines = [head]
    drawn: set[str] = set()
    for node in graph.nodes.values():
        if not node.inputs:
            lines += ["", *_from(graph, node.name, drawn)]
    return "\n".join(lines) + "\n"


def _from(graph: Graph, start: str, drawn: set[str]) -> Iterator[str]:
    # A stack and not recursion: a chain may be longer than Python's stack is deep.
    stack: list[tuple[str, str, str]] = [(start, "", "")]
    while stack:
        name, lead, rest = stack.pop()
        if name.startswith("\0"):
            yield name[1:]
            continue
        yield f"{lead}{_stage(graph, name, name in drawn)}"
        if name in drawn:
            continue
        drawn.add(name)
        outputs = graph.outputs(name)
        below: list[tuple[str, str, str]] = []
        if len(outputs) == 1:
            below.append((f"\0{rest}│ {_edge(outputs[0])}", "", ""))
            below.append((outputs[0].target, rest, rest))
        for index, edge in enumerate(outputs if len(outputs) > 1 else ()):
            last = index == len(outputs) - 1
            below.append(
                (edge.target, f"{rest}{'└' if last else '├'}─ {_edge(edge)} → ", rest + ("   " if last else "│  "))
            )
        stack.extend(reversed(below))


def _edge(edge: Edge) -> str:
    return f"{flat(carries(edge))} ({capacity(edge)})"


def _stage(graph: Graph, name: str, again: bool) -> str:
    node = graph.nodes[name]
    if again:
        return f"{flat(name)} (above)"
    return joined([f"{flat(name)}  {titled(node)}", ", ".join(details(graph, node))], "  ")
