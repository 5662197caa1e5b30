"""What differs between two checked pipelines, by place; and whether a run may go on with the other one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from flowdflash.graph import Checked, Node


@dataclass(frozen=True, slots=True)
class Change:
    """One difference.

    Attributes:
        path: dotted place.
        before, after: the values, as text.
        safe: no weight depends on it, so that a run may go on with the new value.
    """

    path: str
    before: str
    after: str
    safe: bool = False

    def __str__(self) -> str:
        return f"{self.path}: {self.before} before, {self.after} now"


def changes(before: Checked, after: Checked) -> list[Change]:
    """What differs in what the two pipelines do: by value, not by how it is written."""
    found = [
        Change(name, str(getattr(before, name)), str(getattr(after, name)), safe=name == "stall_secs")
        for name in ("seed", "ordering", "stall_secs")
        if getattr(before, name) != getattr(after, name)
    ]
    old, new = before.graph.nodes, after.graph.nodes
    for name in dict.fromkeys([*old, *new]):
        if name not in new or name not in old:
            there = [_told(nodes[name]) if name in nodes else "absent" for nodes in (old, new)]
            found.append(Change(f"stages.{name}", there[0], there[1]))
        else:
            found += _of_stage(old[name], new[name])
    return found


def _told(node: Node) -> str:
    return f"{node.kind} {node.type}"


def _of_stage(old: Node, new: Node) -> Iterator[Change]:
    path = f"stages.{old.name}"
    if (old.kind, old.type) != (new.kind, new.type):
        yield Change(path, _told(old), _told(new))
        return
    if (wires := [[edge.name for edge in node.inputs] for node in (old, new)])[0] != wires[1]:
        yield Change(f"{path}.inputs", ", ".join(wires[0]), ", ".join(wires[1]))
        return
    for edge, other in zip(old.inputs, new.inputs, strict=True):
        for option in ("capacity", "capacity_bytes"):
            values = getattr(edge, option), getattr(other, option)
            if values[0] != values[1]:
                yield Change(f"{path}.inputs.{option}", str(values[0]), str(values[1]), safe=True)
    safe: Collection[str] = getattr(old.cls, "safe_to_change", ())
    was, now = _values(old.config), _values(new.config)
    for option in dict.fromkeys([*was, *now]):
        if was.get(option) != now.get(option):
            yield Change(f"{path}.{option}", str(was.get(option)), str(now.get(option)), safe=option in safe)


def _values(config: Any) -> Mapping[str, Any]:
    return config.model_dump() if isinstance(config, BaseModel) else vars(config)
