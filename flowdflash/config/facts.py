"""The check phase: every stage looks at its options and at the facts of what comes before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowdflash.config.options import Found
from flowdflash.config.wiring import Declared, Wired
from flowdflash.graph import Edge, Graph, Node
from flowdflash.stage import Check


def with_facts(stages: Mapping[str, Declared], wired: Wired, found: Found) -> Graph:
    """The graph of all stages whose options are valid, checked in topological order."""
    nodes: dict[str, Node] = {}
    flowing: dict[str, Mapping[str, Any]] = {}
    returned: dict[str, Mapping[str, Any]] = {}
    edges: list[Edge] = []
    broken: set[str] = set()
    for name in wired.order:
        stage, inputs = stages[name], wired.edges[name]
        read = stage.wires is not None and len(stage.wires) == len(inputs) and (bool(inputs) or stage.kind == "source")
        complete = read and not any(edge.source in broken for edge in inputs)
        facts = _merged([flowing[edge.source] for edge in inputs if edge.source in flowing])
        own = _checked(stage, facts, complete, found)
        flowing[name] = {**facts, **own}
        if not complete or stage.cls is None or stage.config is None:
            broken.add(name)
        if stage.cls is not None and stage.config is not None:
            returned[name] = own
            kind = stage.cls.kind
            nodes[name] = Node(name, kind, stage.type, stage.cls, stage.config, inputs, facts)
            edges += inputs
    return Graph(nodes, tuple(edges), returned)


def _merged(upstream: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Facts of several inputs. One on which they disagree is not a fact, and left out."""
    merged: dict[str, Any] = {}
    disputed = set()
    for facts in upstream:
        for key, value in facts.items():
            if key in merged and not _same(merged[key], value):
                disputed.add(key)
            merged[key] = value
    return {key: value for key, value in merged.items() if key not in disputed}


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # arrays compare element by element; a fact is not worth more than leaving it out
        return False


def _checked(stage: Declared, facts: Mapping[str, Any], complete: bool, found: Found) -> Mapping[str, Any]:
    if stage.cls is None or stage.config is None:
        return {}
    check = Check(stage.name, facts=dict(facts), complete=complete)
    plugin = f" (plugin {stage.owner!r})" if stage.owner else ""
    try:
        own = stage.cls(stage.config).check(check)
        if not isinstance(own, Mapping) or not all(isinstance(key, str) for key in own):
            raise TypeError(f"it must return a mapping of facts by name, it returned {type(own).__name__}")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a plugin does here, SystemExit included, is a mistake in the plugin
        own = {}
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        message = f"the check of {stage.kind}/{stage.type}{plugin} failed: {reason}"
        found.add(stage.path, message, "this is a mistake in the plugin, not in the pipeline", key=True)
    for problem in check.problems:
        option = [step for step in str(problem.path).split(".") if step]
        path = (*stage.path, *option)
        found.add(path, problem.message, problem.hint, key=not option, severity=problem.severity)
    return dict(own)
