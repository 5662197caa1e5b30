"""Inputs to edges: names, ports, payload classes, counts, cycles, and outputs that nobody reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowdflash.config.options import Found, Steps
from flowdflash.config.resolve import near
from flowdflash.config.tree import shown
from flowdflash.graph import Edge, topological
from flowdflash.items import Checkpoint
from flowdflash.stage import (
    Bucketer,
    Dispatcher,
    Drafter,
    Generator,
    Interleaver,
    Sink,
    Source,
    Stage,
    TargetForward,
)

CONTRACTS: tuple[type[Stage], ...] = (
    Source,
    Bucketer,
    Interleaver,
    Dispatcher,
    TargetForward,
    Generator,
    Drafter,
    Sink,
)


StageClass = type[Stage]


@dataclass(frozen=True, slots=True)
class Wire:
    """An input as written: a stage or ``stage.port``, the place where it stands, and the options of its channel.

    ``given`` names those that stand there.
    """

    ref: str
    path: Steps
    capacity: int = 2
    capacity_bytes: int = 0
    given: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Declared:
    """A stage as written, as far as it could be made out.

    Attributes:
        name, kind, type: as written.
        cls: the class, None if there is none of that kind and type.
        config: the validated options, None if they are not valid.
        wires: inputs; None if they could not be read.
        owner: plugin that supplied the class.
    """

    name: str
    kind: str = ""
    type: str = ""
    cls: StageClass | None = None
    config: Any = None
    wires: tuple[Wire, ...] | None = ()
    owner: str = ""

    @property
    def path(self) -> Steps:
        """Its place in the pipeline."""
        return ("stages", self.name)

    def __str__(self) -> str:
        return f"{self.kind or 'stage'} {self.name!r}"


@dataclass(frozen=True, slots=True)
class Wired:
    """Edges by reader, and the stages in topological order; those on a cycle have none."""

    edges: Mapping[str, tuple[Edge, ...]]
    order: tuple[str, ...]


def wire(stages: Mapping[str, Declared], found: Found) -> Wired:
    """Turn inputs into edges; everything wrong with them is added to ``found``."""
    edges: dict[str, tuple[Edge, ...]] = {}
    pairs: list[tuple[str, str]] = []
    astray: list[tuple[type, ...]] = []
    for stage in stages.values():
        before = len(found.problems)
        _count(stage, found)
        edges[stage.name] = _edges(stage, stages, pairs, found)
        if stage.wires is None or len(found.problems) > before:
            astray.append(stage.cls.reads if stage.cls else (object,))
    order, cycles = topological(list(stages), pairs)
    for cycle in cycles:
        chain = " -> ".join([*cycle, cycle[0]])
        hint = "let one of them read something that comes before it"
        found.add(("stages", cycle[0], "inputs"), f"the stages form a cycle: {chain}", hint)
    _unread(stages, pairs, edges, astray, found)
    return Wired(edges, tuple(order))


def _count(stage: Declared, found: Found) -> None:
    if stage.wires is None or stage.cls is None:
        return
    count, path = len(stage.wires), (*stage.path, "inputs")
    if stage.kind == "source":
        if count:
            found.add(path, f"{stage} reads nothing, it has no inputs", "delete 'inputs'", key=True)
    elif not count:
        wanted = _classes(stage.cls.reads)
        found.add(stage.path, f"{stage} needs an input ({wanted})", "add 'inputs: ' and the stage to read", key=True)
    elif count > 1 and stage.kind != "sink":
        refs = ", ".join(w.ref for w in stage.wires)
        found.add(path, f"{stage} reads exactly one input, here are {count}: {refs}", key=True)


def _edges(
    stage: Declared, stages: Mapping[str, Declared], pairs: list[tuple[str, str]], found: Found
) -> tuple[Edge, ...]:
    edges: dict[tuple[str, str], Edge] = {}
    for wire in stage.wires or ():
        name, port = (wire.ref, "") if wire.ref in stages else _split(wire.ref)
        source = stages.get(name)
        if source is None:
            _unknown(wire, stages, found)
            continue
        pairs.append((name, stage.name))
        if source.cls is None:
            continue
        if port not in source.cls.writes:
            _no_port(wire, source, port, stage, found)
            continue
        payload = source.cls.writes[port]
        if (name, port) in edges:
            found.add(wire.path, f"{stage} reads {shown(wire.ref)} twice", "name it once")
            continue
        edges[name, port] = Edge(name, port, stage.name, payload, wire.capacity, wire.capacity_bytes)
        _without_effect(wire, source, stage, payload, found)
        if stage.cls is not None and stage.kind != "source" and not issubclass(payload, stage.cls.reads):
            _wrong_payload(wire, source, stage, payload, stages, found)
    return tuple(edges.values())


def _without_effect(wire: Wire, source: Declared, reader: Declared, payload: type, found: Found) -> None:
    """Refuse limits that would limit nothing."""
    for option in sorted(wire.given & {"capacity", "capacity_bytes"}):
        path = (*wire.path[:-1], option)
        if reader.kind in ("bucketer", "interleaver"):
            found.add(path, f"nothing waits between {source} and {reader}, which plan together", f"delete {option}")
        elif option == "capacity_bytes" and not hasattr(payload, "nbytes"):
            what = f"{payload.__name__} is a few numbers, not worth counting in bytes"
            found.add(path, what, "limit 'capacity', or delete it")


def _split(ref: str) -> tuple[str, str]:
    name, _, port = ref.partition(".")
    return name, port


def _refs(stage: Declared) -> list[str]:
    """What a reader may write to read a stage."""
    if stage.cls is None:
        return [stage.name]
    return [f"{stage.name}.{port}" if port else stage.name for port in stage.cls.writes]


def _unknown(wire: Wire, stages: Mapping[str, Declared], found: Found) -> None:
    refs = [ref for stage in stages.values() for ref in _refs(stage)]
    name, port = _split(wire.ref)
    hint = near(wire.ref, refs) or near(name, stages) or f"outputs here: {', '.join(refs) or 'none'}"
    found.add(wire.path, f"there is no stage {shown(name if port else wire.ref)}", hint)


def _no_port(wire: Wire, source: Declared, port: str, reader: Declared, found: Found) -> None:
    assert source.cls is not None
    refs = _refs(source)
    fits = [
        ref
        for ref, payload in zip(refs, source.cls.writes.values(), strict=True)
        if reader.cls is not None and issubclass(payload, reader.cls.reads)
    ]
    what = f"{source} has no output {shown(port)}" if port else f"{source} has no main output"
    if not refs:
        what, hint = f"{source} has no output: nothing can read it", ""
    elif len(fits) == 1 or near(wire.ref, refs):
        hint = f"write {fits[0]!r}" if len(fits) == 1 else near(wire.ref, refs)
    else:
        hint = f"its outputs: {', '.join(refs)}"
    found.add(wire.path, what, hint)


def _wrong_payload(
    wire: Wire, source: Declared, reader: Declared, payload: type, stages: Mapping[str, Declared], found: Found
) -> None:
    assert reader.cls is not None
    reads = reader.cls.reads
    writers = [
        ref
        for stage in stages.values()
        if stage.cls is not None and stage.name != reader.name
        for ref, carried in zip(_refs(stage), stage.cls.writes.values(), strict=True)
        if issubclass(carried, reads)
    ]
    hints = [f"{', '.join(writers)} would fit"] if writers else []
    if between := _between(payload, reads):
        hints.append(f"between them belongs {' -> '.join(between)}")
    message = f"{source} writes {payload.__name__}, but {reader} reads {_classes(reads)}"
    found.add(wire.path, message, "; ".join(hints))


def _between(payload: type, wanted: tuple[type, ...]) -> list[str]:
    """The longest chain of kinds that turns one payload into another: the usual way through a pipeline."""

    def chain(payload: type, rest: Sequence[type[Stage]]) -> list[str] | None:
        if issubclass(payload, wanted):
            return []
        ways = []
        for contract in rest:
            if contract.reads and issubclass(payload, contract.reads):
                for written in contract.writes.values():
                    onward = chain(written, [c for c in rest if c is not contract])
                    if onward is not None:
                        ways.append([contract.kind, *onward])
        return max(ways, key=len, default=None)

    return chain(payload, CONTRACTS) or []


def _classes(classes: Iterable[type]) -> str:
    return " or ".join(cls.__name__ for cls in classes) or "nothing"


def _unread(
    stages: Mapping[str, Declared],
    pairs: Sequence[tuple[str, str]],
    edges: Mapping[str, tuple[Edge, ...]],
    astray: Sequence[tuple[type, ...]],
    found: Found,
) -> None:
    """Warn of weights that are trained and never written, and of stages that work for nobody.

    What an input that is wrong may have meant to read is passed over: it may be read once that is put right.
    """
    read = {(edge.source, edge.port) for of_reader in edges.values() for edge in of_reader}
    feeding = {source for source, _ in pairs}
    for stage in stages.values():
        if stage.cls is None or not stage.cls.writes:
            continue
        if any(issubclass(payload, reads) for payload in stage.cls.writes.values() for reads in astray):
            continue
        unsaved = [
            port
            for port, payload in stage.cls.writes.items()
            if issubclass(payload, Checkpoint) and (stage.name, port) not in read
        ]
        if unsaved:
            ref = f"{stage.name}.{unsaved[0]}" if unsaved[0] else stage.name
            hint = f"add a sink that reads {ref}, such as type checkpoint"
            message = f"what {stage} learns is never written: nothing reads {ref}"
            found.add(stage.path, message, hint, key=True, severity="warning")
        elif stage.name not in feeding:
            message = f"nothing reads {stage}: its work is for nobody"
            found.add(stage.path, message, "read it, or delete the stage", key=True, severity="warning")
