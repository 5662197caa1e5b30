"""Strategies named on the command line: the pipeline with another bucketer, another interleaver, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import click
from pydantic import ValidationError

from flowdflash.errors import PipelineInvalid, Problem
from flowdflash.graph import Graph, Node
from flowdflash.plugin.registry import Registry
from flowdflash.stage import Check, Stage

KINDS = ("bucketer", "interleaver")


def strategies(graph: Graph, compare: Sequence[str], registry: Registry) -> dict[str, Graph]:
    """The pipeline's own graph under the types of its stages, then one graph per strategy named.

    A strategy is the type of an interleaver or of a bucketer, or ``bucketer+interleaver``; one that the pipeline has
    already, or that was named before, is left out. A bucketer is given what the
    pipeline says to its own, as far as it has such options; an interleaver its defaults.

    Raises:
        PipelineInvalid: a bucketer cannot work with these options.
        click.UsageError: there is no such strategy.
    """
    found = {_types(graph): graph}
    for name in compare:
        changed = graph
        kinds = [_kind(part, registry) for part in name.split("+")]
        if len(set(kinds)) < len(kinds):
            raise click.UsageError(f"--compare {name}: it names two {kinds[0]}s; write bucketer+interleaver")
        for kind, part in zip(kinds, name.split("+"), strict=True):
            cls = registry.get(kind, part)
            assert cls is not None
            changed = _with(changed, kind, cls, name)
        if _types(changed) not in map(_types, found.values()):
            found[name] = changed
    return found


def _types(graph: Graph) -> str:
    return "+".join(node.type for kind in KINDS for node in graph.of_kind(kind))  # type: ignore[arg-type]


def _kind(part: str, registry: Registry) -> str:
    for kind in reversed(KINDS):
        if registry.get(kind, part) is not None:
            return kind
    known = [stage.type for kind in KINDS for stage in registry.types(kind)]
    close = get_close_matches(part, known, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
    raise click.UsageError(f"--compare: there is no interleaver or bucketer {part!r}; {hint}")


def _with(graph: Graph, kind: str, cls: type[Stage], name: str) -> Graph:
    """The graph with one stage replaced; a pipeline without an interleaver is given one."""
    at = next(iter(graph.of_kind(kind)), None)  # type: ignore[arg-type]
    if at is None:
        before = graph.of_kind("bucketer")
        facts = before[0].facts if before else {}
        return replace(graph, nodes={**graph.nodes, kind: Node(kind, cls.kind, cls.type, cls, cls.Config(), (), facts)})
    if at.cls is cls:
        return graph
    config = _config(graph, at, cls, name)
    node = replace(at, type=cls.type, cls=cls, config=config)
    check = Check(at.name, dict(at.facts))
    facts = cls(config).check(check)
    if wrong := [problem for problem in check.problems if problem.severity == "error"]:
        raise PipelineInvalid(replace(problem, path=f"--compare {name}: {problem.path}") for problem in wrong)
    return replace(graph, nodes={**graph.nodes, at.name: node}, returned={**graph.returned, at.name: {**facts}})


def _config(graph: Graph, at: Node, cls: type[Stage], name: str) -> Any:
    """Options for another type of stage: those written for the stage at hand that it has too."""
    if at.kind != "bucketer":
        return cls.Config()
    written: dict[str, Any] = {option: getattr(at.config, option) for option in sorted(at.config.model_fields_set)}
    count = graph.returned.get(at.name, {}).get("buckets")
    if "edges" not in cls.Config.model_fields and count:
        # Edges given by hand say how many buckets are wanted.
        written.setdefault("buckets", count)
    options = {option: value for option, value in written.items() if option in cls.Config.model_fields}
    try:
        return cls.Config(**options)
    except ValidationError as error:
        raise PipelineInvalid(
            Problem(
                f"{'.'.join(map(str, fault['loc']))}: {fault['msg'].lower()}",
                path=f"--compare {name}",
                hint=f"options are taken from stages.{at.name}; write it there if {at.type} has it too",
            )
            for fault in error.errors()
        ) from error
