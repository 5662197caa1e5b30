"""Each stage on its own: its class, its inputs as written, and its options against that one class."""

from __future__ import annotations

from functools import partial
from typing import Any

from flowdflash.config.options import Found, fields_of, validate
from flowdflash.config.resolve import near
from flowdflash.config.spec import STAGE_KEYS, InputSpec, PipelineSpec, Plugins
from flowdflash.config.tree import Items, Node, Scalar, Table, shown
from flowdflash.config.wiring import Declared, Wire
from flowdflash.stage import KINDS, Stage


def declare(found: Found, plugins: Plugins) -> dict[str, Declared]:
    """Every stage of the pipeline, as far as it can be made out."""
    stages = found.root.entries.get("stages")
    if not isinstance(stages, Table):
        return {}
    return {name: _stage(name, node, found, plugins) for name, node in stages.entries.items()}


def _stage(name: str, node: Node, found: Found, plugins: Plugins) -> Declared:
    path = ("stages", name)
    if not isinstance(node, Table):
        hint = elsewhere(name, found.root, plugins, "") or "write the options of the stage under it, indented"
        found.add(path, "a stage is a mapping with 'kind' and 'type'", hint, key=True)
        return Declared(name, wires=None)
    kind, type_ = _word(node, "kind", path, found), _word(node, "type", path, found)
    wires = _wires(node.entries.get("inputs"), (*path, "inputs"), found)
    cls = _class(kind, type_, path, found, plugins)
    if cls is None:
        return Declared(name, kind, type_, wires=wires)
    where_to = partial(elsewhere, root=found.root, plugins=plugins, here=name)
    config = validate(cls.Config, node.without(*STAGE_KEYS), path, found, where_to, plugins.registry)
    owner = next((r.owner for r in plugins.registry.types(kind) if r.cls is cls), "")
    return Declared(name, kind, type_, cls, config, wires, owner)


def _word(node: Table, key: str, path: tuple[str, ...], found: Found) -> str:
    """The text of ``kind`` or ``type``; empty if there is none, which has been reported."""
    value = node.entries.get(key)
    if isinstance(value, Scalar) and value.text and (*path, key) not in found.failed:
        return value.text
    if value is None:
        hint = f"kinds: {', '.join(KINDS)}" if key == "kind" else "`flowdflash stages` lists the types of each kind"
        found.add(path, f"{key} is missing", hint, key=True)
    elif (*path, key) not in found.failed:
        found.add((*path, key), f"{key} is one word")
    return ""


def _class(kind: str, type_: str, path: tuple[str, ...], found: Found, plugins: Plugins) -> type[Stage] | None:
    if kind and kind not in KINDS:
        hint = near(kind, KINDS, 0.5) or f"kinds: {', '.join(KINDS)}"
        found.add((*path, "kind"), f"there is no kind {shown(kind)}", hint)
        return None
    if not kind or not type_:
        return None
    cls = plugins.registry.get(kind, type_)
    if cls is None:
        why = plugins.explain_missing(kind, type_)
        names = [r.type for r in plugins.registry.types(kind)]
        hint = "" if why else near(type_, names, 0.5) or f"types of {kind}: {', '.join(names) or 'none'}"
        found.add((*path, "type"), why or f"there is no {kind} of type {shown(type_)}", hint)
    return cls


def _wires(node: Node | None, path: tuple[str, ...], found: Found) -> tuple[Wire, ...] | None:
    """Inputs as written, or None if one could not be read."""
    if node is None:
        return ()
    if not isinstance(node, Items):
        wire = _wire(node, path, found)
        return None if wire is None else (wire,)
    wires = [_wire(item, (*path, str(index)), found) for index, item in enumerate(node.nodes)]
    return None if None in wires else tuple(wire for wire in wires if wire)


def _wire(node: Node, path: tuple[str, ...], found: Found) -> Wire | None:
    if path in found.failed:
        return None
    if isinstance(node, Scalar) and node.text:
        return Wire(node.text, path)
    if not isinstance(node, Table):
        message = "an input is a stage, stage.port, or a mapping with 'from'"
        found.add(path, message, "such as inputs: target, or inputs: {from: target, capacity: 4}")
        return None
    spec = validate(InputSpec, node, path, found)
    if spec is None:
        return None
    given = frozenset(spec.model_fields_set)
    return Wire(spec.from_, (*path, "from"), spec.capacity, spec.capacity_bytes, given)


def elsewhere(key: str, root: Table, plugins: Plugins, here: str | None = None) -> str:
    """Where an unknown key may belong: another level of the file, another stage, another type.

    Args:
        key: the unknown key.
        root: the pipeline.
        plugins: what supplies the stages.
        here: the stage it stands in, ``""`` among the stages, None at the top.
    """
    stages = root.entries.get("stages")
    tables = {n: t for n, t in stages.entries.items() if isinstance(t, Table)} if isinstance(stages, Table) else {}
    takers = [f"{name!r}" for name, table in tables.items() if name != here and key in _options(table, plugins)]
    if here is None:
        value = root.entries.get(key)
        if isinstance(value, Table) and {"kind", "type"} & value.entries.keys():
            return "a stage belongs under 'stages'"
    elif key in PipelineSpec.model_fields and key != "stages":
        return f"{key!r} belongs at the top of the file"
    if takers:
        inside = "it belongs inside that stage, indented further" if not here else "it is no option of this one"
        return f"{key!r} is an option of stage {', '.join(takers[:3])}; {inside}"
    kind = _text(tables[here], "kind") if here else ""
    types = [r.type for r in plugins.registry.types(kind) if key in fields_of(r.cls.Config)] if kind else []
    return f"{key!r} is an option of type {', '.join(types[:3])}" if types else ""


def _options(table: Table, plugins: Plugins) -> dict[str, Any]:
    cls = plugins.registry.get(_text(table, "kind"), _text(table, "type"))
    return {} if cls is None else {**fields_of(cls.Config), **dict.fromkeys(STAGE_KEYS)}


def _text(table: Table, key: str) -> str:
    value = table.entries.get(key)
    return value.text or "" if isinstance(value, Scalar) else ""
