"""The words of a drawing: what a box and a line say, and which plane they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flowdflash.graph import Edge, Graph, Node
from flowdflash.items import BatchInfo, BatchTable, SampleTable

PLANNING_KINDS = ("source", "bucketer", "interleaver")
MOST_DETAILS = 4


def is_planning(edge: Edge) -> bool:
    """What travels is numbers about batches, no tokens and no tensors."""
    return issubclass(edge.payload, (SampleTable, BatchTable, BatchInfo))


def replicas(node: Node) -> int:
    """How many copies of a stage run."""
    return int(getattr(node.config, "replicas", 1))


def details(graph: Graph, node: Node) -> list[str]:
    """A few facts worth a line each: what the stage says of itself, then options that the pipeline sets."""
    shown: dict[str, str] = {}
    written = {name: getattr(node.config, name) for name in sorted(getattr(node.config, "model_fields_set", ()))}
    for source in (graph.returned.get(node.name, {}), in_order(node, written)):
        for key, value in source.items():
            if key not in shown and key != "replicas" and (text := brief(value)):
                shown[key] = text
    return [f"{key} {text}" for key, text in list(shown.items())[:MOST_DETAILS]]


def in_order(node: Node, values: Mapping[str, Any]) -> dict[str, Any]:
    """Options in the order that their model declares."""
    names = type(node.config).model_fields if node.config is not None else ()
    return {name: values[name] for name in names if name in values}


def brief(value: Any) -> str:
    """A value in a few characters; empty for what has no short form."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Path):
        return value.name or str(value)
    if isinstance(value, (list, tuple)) and all(isinstance(item, (int, float, str)) for item in value):
        items = [brief(item) for item in value]
        return " ".join(items if len(items) <= 8 else [*items[:3], "…", *items[-3:]])
    return flat(value) if isinstance(value, (int, str)) else ""


def carries(edge: Edge) -> str:
    """Port and payload of a line."""
    return f"{edge.port}: {edge.payload.__name__}" if edge.port else edge.payload.__name__


def capacity(edge: Edge) -> str:
    """How much may wait."""
    return f"queue {edge.capacity}" + (f", {size(edge.capacity_bytes)}" if edge.capacity_bytes else "")


def size(count: int) -> str:
    """A number of bytes as a person writes it."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"


def flat(text: object) -> str:
    """A text on one line, without characters that XML, Mermaid or a terminal cannot show."""
    return "".join(ch if ch.isprintable() else " " if ch.isspace() else "\ufffd" for ch in str(text))


def counted(count: int, noun: str) -> str:
    """``1 stage``, ``2 stages``."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def titled(node: Node) -> str:
    """Kind and type, and the number of copies where there is more than one."""
    many = f" ×{replicas(node)}" if replicas(node) > 1 else ""
    return f"{node.kind}/{node.type}{many}"


def planes(graph: Graph) -> list[tuple[str, str, list[str]]]:
    """Short name, title and stages of each plane that has any."""
    planning = [name for name, node in graph.nodes.items() if node.kind in PLANNING_KINDS]
    data = [name for name, node in graph.nodes.items() if node.kind not in PLANNING_KINDS]
    every = [
        ("planning", "planning plane: numbers about batches", planning),
        ("data", "data plane: tokens and tensors", data),
    ]
    return [plane for plane in every if plane[2]]


def elide(text: str, most: int) -> str:
    """The text, cut to a number of characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def joined(parts: Iterable[str], by: str = ", ") -> str:
    """Parts that say something, joined."""
    return by.join(part for part in parts if part)
