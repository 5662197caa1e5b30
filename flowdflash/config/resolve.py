"""From a file as written to a tree as meant: ``extends``, then ``--set``, then ``${vars.x}`` and ``${env:NAME}``.

Overrides go in before references are filled, so that ``--set vars.x=4`` reaches every place that uses ``x``, and a
value that is overridden may have named an environment variable that is not set.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flowdflash.config.document import MAX_NODES, parse, read
from flowdflash.config.tree import MAX_DEPTH, Items, Node, Place, Scalar, Table, child, leaves, shown, unusable
from flowdflash.errors import PipelineInvalid, Problem
from flowdflash.secrets import MIN_CHARS, is_secret
from flowdflash.stage import path_from

MAX_FILES = 8
"""Most files that one pipeline is put together from."""


def near(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """``did you mean 'x'?`` for the nearest name, or nothing."""
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return f"did you mean {found[0]!r}?" if found else ""


def with_bases(top: Table, problems: list[Problem], origin: Path | None = None) -> Table:
    """``top`` laid over the file that it extends, and over what that one extends.

    Mappings are merged, everything else is replaced; every value keeps the place where it was written.

    Raises:
        PipelineInvalid: a base cannot be read, a file extends itself, or there are too many.
    """
    layers, values = [top], sum(1 for _ in leaves(top))
    seen: dict[Path, str] = {origin.resolve(): str(origin)} if origin else {}
    while (node := layers[-1].entries.get("extends")) is not None:
        layers[-1] = layers[-1].without("extends")
        path, named = _base(node, problems)
        if path in seen:
            cycle = " -> ".join([*list(seen.values())[list(seen).index(path) :], str(named)])
            fault = node.place.problem(f"files extend one another in a circle: {cycle}", ("extends",))
            raise PipelineInvalid([*problems, fault])
        seen[path] = str(named)
        layers.append(read(named, problems))
        values += sum(1 for _ in leaves(layers[-1]))
        if len(layers) > MAX_FILES or values > MAX_NODES:
            what = f"more than {MAX_FILES} files, or {MAX_NODES} values in them, extend one another"
            raise PipelineInvalid([*problems, node.place.problem(what, ("extends",))])
    merged = layers.pop()
    while layers:
        merged = _merged(merged, layers.pop())
    return merged


def _base(node: Node, problems: list[Problem]) -> tuple[Path, Path]:
    """The file that an ``extends`` names, resolved, and as a person would name it."""
    if not isinstance(node, Scalar) or not node.text or "${" in node.text:
        hint = "one base only; a base may extend another" if isinstance(node, Items) else ""
        fault = node.place.problem("extends takes the path of one pipeline file, written out", ("extends",), hint)
        raise PipelineInvalid([*problems, fault])
    try:
        path = path_from(node.place.folder, node.text)
        named = Path(os.path.normpath(Path(node.place.file).parent / node.text))
        if path.is_file():
            return path, named if named.exists() and named.samefile(path) else path
    except (OSError, ValueError):
        pass
    fault = node.place.problem(f"cannot read the base {shown(node.text)}: no such file", ("extends",))
    raise PipelineInvalid([*problems, fault])


def _merged(base: Node, over: Node) -> Table:
    assert isinstance(base, Table) and isinstance(over, Table)
    result = replace(base, place=over.place)
    for key, node in over.entries.items():
        below = base.entries.get(key)
        both = isinstance(below, Table) and isinstance(node, Table)
        result = result.having(key, _merged(below, node) if both and below else node, over.keys[key])
    return result


def override(root: Table, settings: Sequence[str], problems: list[Problem]) -> Table:
    """The tree with every ``a.b=value`` set, in order; the value is YAML."""
    for setting in settings:
        target, equals, text = setting.partition("=")
        steps = tuple(target.strip().split("."))
        place = Place(f"--set {target.strip()}", folder=root.place.folder)
        if not equals or not all(steps):
            problems.append(Place(f"--set {shown(setting)}").problem("an override is written a.b=value"))
            continue
        try:
            node = parse(text, place, problems, whole_file=False) if text.strip() else Scalar(None, place)
        except PipelineInvalid as invalid:
            problems += (p for p in invalid.problems if p not in problems)
            continue
        fault = _refusal(root, steps)
        if fault:
            problems.append(place.problem(fault[0], steps, fault[1]))
        else:
            changed = _set(root, steps, node)
            assert isinstance(changed, Table)
            root = changed
    return root


def _refusal(root: Table, steps: tuple[str, ...]) -> tuple[str, str] | None:
    """Why a place cannot be set, and a hint. A stage takes any key: its options are checked later, by its own type."""
    if len(steps) > MAX_DEPTH:
        return f"nested deeper than {MAX_DEPTH} levels", ""
    if steps[0] == "extends":
        return "extends cannot be overridden", "name another pipeline file instead"
    node: Node = root
    for at, step in enumerate(steps):
        where = ".".join(steps[:at])
        below = child(node, step)
        if isinstance(node, Scalar):
            whole = f"--set '{where}={{{step}: ...}}'"
            return f"{where} is {shown(node.text or 'null')}, which has no parts", f"to replace it, write {whole}"
        if below is None and isinstance(node, Items):
            return f"{where} is a list of {len(node.nodes)}, it has no item {shown(step)}", "items are counted from 0"
        if below is None:
            table = node.entries if isinstance(node, Table) else {}
            closed = steps[:at] == ("vars",) or (steps[:at] == ("stages",) and len(steps) > 2)
            if closed:
                what = "var" if where == "vars" else "stage"
                return f"there is no {what} {shown(step)}", near(
                    step, table
                ) or f"there is {', '.join(table) or 'none'}"
            if at == 0 and len(steps) > 1:
                return f"there is no {shown(step)} in the pipeline", near(step, table)
            return None
        node = below
    return None


def _set(node: Node | None, steps: tuple[str, ...], value: Node) -> Node:
    if not steps:
        return value
    if isinstance(node, Items):
        index = int(steps[0])
        return replace(
            node, nodes=(*node.nodes[:index], _set(node.nodes[index], steps[1:], value), *node.nodes[index + 1 :])
        )
    table = node if isinstance(node, Table) else Table({}, {}, value.place)
    fresh = steps[0] not in table.entries or len(steps) == 1
    return table.having(steps[0], _set(table.entries.get(steps[0]), steps[1:], value), value.place if fresh else None)


@dataclass(slots=True)
class Filled:
    """What filling in references gave.

    Attributes:
        root: the tree; a leaf whose reference failed is left as it was.
        failed: paths of those leaves.
    """

    root: Table
    failed: set[tuple[str, ...]]


_REFERENCE = re.compile(r"\$\$\{|\$\{([^{}]*)\}|\$\{")
_ENV = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)


def fill(root: Table, problems: list[Problem], environ: Mapping[str, str]) -> Filled:
    """The tree with ``${vars.x}``, ``${env:NAME}`` and ``${env:NAME:-default}`` replaced, and ``$${`` made ``${``.

    What is put in is never looked at again. A var may use the environment and no other var. The default is taken where
    the variable is unset or empty, as in a shell.
    """
    filling = _Filling(problems, environ)
    table = root.entries.get("vars")
    if isinstance(table, Table):
        root = root.having("vars", filling.vars_of(table))
    for key, node in root.entries.items():
        if key != "vars":
            root = root.having(key, filling.node(node, (key,)))
    for name in filling.vars.keys() - filling.used:
        if isinstance(table, Table) and not filling.unknown:
            problems.append(
                table.keys[name].problem(f"var {shown(name)} is never used", ("vars", name), severity="warning")
            )
    return Filled(root, filling.failed)


class _Filling:
    def __init__(self, problems: list[Problem], environ: Mapping[str, str]) -> None:
        self.problems, self.environ = problems, environ
        self.vars: dict[str, str | None] = {}
        self.within_vars = False
        self.used: set[str] = set()
        self.unknown = False
        self.failed: set[tuple[str, ...]] = set()

    def vars_of(self, table: Table) -> Table:
        self.within_vars = True
        for name, node in table.entries.items():
            at, path = table.keys[name], ("vars", name)
            self.vars[name] = None
            if not isinstance(node, Scalar) or node.text is None:
                self.problems.append(at.problem("a var is one text or number", path, "write lists and mappings out"))
                self.failed.add(path)
                continue
            filled = self.node(node, path)
            assert isinstance(filled, Scalar)
            table = table.having(name, filled)
            self.vars[name] = None if path in self.failed else filled.text
        self.within_vars = False
        return table

    def node(self, node: Node, path: tuple[str, ...]) -> Node:
        if isinstance(node, Table):
            return replace(node, entries={k: self.node(v, (*path, k)) for k, v in node.entries.items()})
        if isinstance(node, Items):
            return replace(node, nodes=tuple(self.node(v, (*path, str(i))) for i, v in enumerate(node.nodes)))
        if node.text is None or "${" not in node.text:
            return node
        text = node.text

        def put_in(match: re.Match[str]) -> str:
            if match[0] == "$${":
                return "${"
            value, message, hint = self._value(match[1])
            if message:
                self.problems.append(node.place.problem(message, path, hint))
            if value is None:
                self.failed.add(path)
            return value or ""

        filled = _REFERENCE.sub(put_in, text)
        if fault := unusable(filled):
            self.problems.append(node.place.problem(f"filled in, the text holds {fault}", path))
            self.failed.add(path)
        return node if path in self.failed else replace(node, text=filled)

    def _value(self, inside: str | None) -> tuple[str | None, str, str]:
        """The value of a reference, or what is wrong with it and a hint."""
        if inside is None:
            return None, "a reference is not closed, or holds another", "write ${vars.x}; write $${ for a plain ${"
        if inside.startswith("vars."):
            return self._var(inside.removeprefix("vars."))
        found = _ENV.fullmatch(inside)
        if found is None:
            hint = "write ${vars.x}, ${env:NAME} or ${env:NAME:-default}; write $${ for a plain ${"
            return None, f"unknown reference {shown('${' + inside + '}')}", hint
        value = self.environ.get(found[1])
        if found[2] is not None and not value:
            return found[2], "", ""
        if value is None:
            hint = f"set it, or give a default: ${{env:{found[1]}:-...}}"
            return None, f"environment variable {found[1]} is not set", hint
        if fault := unusable(value):
            return None, f"environment variable {found[1]} holds {fault}", ""
        if len(value) < MIN_CHARS and is_secret(found[1]):
            text = f"environment variable {found[1]} is named like a secret, and too short to be kept out of logs"
            return None, text, f"if it is none, give it another name; a secret has {MIN_CHARS} characters or more"
        return value, "", ""

    def _var(self, name: str) -> tuple[str | None, str, str]:
        if self.within_vars:
            return None, "a var cannot use another var", "write the value out; ${env:NAME} is allowed"
        if name not in self.vars:
            self.unknown = True
            known = ", ".join(self.vars) or "none"
            return None, f"there is no var {shown(name)}", near(name, self.vars) or f"vars has {known}"
        self.used.add(name)
        return self.vars[name], "", ""
