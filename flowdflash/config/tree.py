"""The tree of a pipeline: mappings, lists and texts, each with the place where it is written.

Every scalar stays text: what it means is decided later by the type that the option declares, so ``1e-4``, ``1_000``,
``no`` and ``1.10`` mean the same in a file, an environment variable and an override.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from flowdflash.errors import PipelineInvalid, Problem
from flowdflash.secrets import hidden

MAX_DEPTH = 24
"""Deepest nesting of a pipeline."""
MAX_CHARS = 10_000
"""Longest text in a pipeline."""
MAX_PROBLEMS = 100
"""More are not looked for: nobody reads them, and hostile files would have them by the thousand."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where something is written.

    Attributes:
        file: the file as the user named it, ``--set a.b`` for an override, empty for a Python mapping.
        line, column: 1-based, 0 if there is none.
        folder: relative paths written here start from it.
    """

    file: str = ""
    line: int = 0
    column: int = 0
    folder: Path = field(default_factory=Path)

    def problem(
        self,
        message: str,
        path: Sequence[str | int] = (),
        hint: str = "",
        severity: Literal["error", "warning"] = "error",
    ) -> Problem:
        """A problem at this place."""
        where = ".".join(map(str, path))
        return Problem(hidden(message), where, self.file, self.line, self.column, hidden(hint), severity)


@dataclass(frozen=True, slots=True)
class Scalar:
    """A leaf: its text, or None for ``null``, ``~`` and nothing at all."""

    text: str | None
    place: Place


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    nodes: tuple[Node, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class Table:
    """A mapping: values and places of keys, by key, in the order written."""

    entries: Mapping[str, Node]
    keys: Mapping[str, Place]
    place: Place

    def having(self, key: str, node: Node, place: Place | None = None) -> Table:
        """The same table with one entry set; a new key is placed at ``place`` or at its value."""
        keys = self.keys if key in self.keys and place is None else {**self.keys, key: place or node.place}
        return replace(self, entries={**self.entries, key: node}, keys=keys)

    def without(self, *names: str) -> Table:
        """The same table lacking some keys."""
        return replace(
            self,
            entries={k: v for k, v in self.entries.items() if k not in names},
            keys={k: v for k, v in self.keys.items() if k not in names},
        )


Node = Scalar | Items | Table


class Problems(list[Problem]):
    """The problems found so far; appending one too many raises ``PipelineInvalid`` with them all."""

    def append(self, problem: Problem) -> None:
        """Add one."""
        super().append(problem)
        if len(self) > MAX_PROBLEMS:
            fault = Problem(f"more than {MAX_PROBLEMS} problems, no more are looked for", file=problem.file)
            raise PipelineInvalid([*self, fault])


def plain(node: Node) -> Any:
    """The tree as dicts, lists, texts and None."""
    if isinstance(node, Scalar):
        return node.text
    if isinstance(node, Items):
        return [plain(item) for item in node.nodes]
    return {key: plain(value) for key, value in node.entries.items()}


def leaves(node: Node) -> Iterator[Scalar]:
    """Every leaf of a tree."""
    if isinstance(node, Scalar):
        yield node
    else:
        for below in node.nodes if isinstance(node, Items) else node.entries.values():
            yield from leaves(below)


def child(node: Node, step: str | int) -> Node | None:
    """The entry or item named by one step of a path, if there is one."""
    if isinstance(node, Table):
        return node.entries.get(str(step))
    if isinstance(node, Items) and str(step).isascii() and str(step).isdigit() and int(step) < len(node.nodes):
        return node.nodes[int(step)]
    return None


def locate(node: Node, path: Sequence[str | int], *, key: bool = False) -> tuple[tuple[str, ...], Place]:
    """How far a path leads, and the place of what it leads to (of its key, if asked for or if the value is empty).

    Steps that lead nowhere are passed over: pydantic puts names of union branches between the keys.
    """
    taken: list[str] = []
    place = node.place
    for step in path:
        below = child(node, step)
        if below is None:
            continue
        named = isinstance(node, Table) and (key or (isinstance(below, Scalar) and below.text is None))
        place = node.keys[str(step)] if named and isinstance(node, Table) else below.place
        taken.append(str(step))
        node = below
    return tuple(taken), place


def shown(text: str, limit: int = 60) -> str:
    """A text fit for a message: quoted, on one line, not too long."""
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")


def unusable(text: str) -> str:
    """What in a text no file name, log or report could carry; empty if nothing."""
    if "\0" in text:
        return "a NUL character"
    if len(text) > MAX_CHARS:
        return f"more than {MAX_CHARS:,} characters"
    return "half of a surrogate pair" if any("\ud800" <= ch <= "\udfff" for ch in text) else ""


def usable(text: str) -> str:
    """What is left of a text without that."""
    return "".join(ch for ch in text[:MAX_CHARS] if not unusable(ch))


def from_python(value: Any, origin: Place, problems: list[Problem], path: tuple[str, ...] = ()) -> Node:
    """The tree of a pipeline given as Python dicts, lists and plain values.

    Raises:
        PipelineInvalid: nested too deeply, or into itself.
    """
    if len(path) > MAX_DEPTH:
        raise PipelineInvalid([*problems, origin.problem(f"nested deeper than {MAX_DEPTH} levels", path[:4])])
    if value is None:
        return Scalar(None, origin)
    if isinstance(value, bool):
        return Scalar(str(value).lower(), origin)
    if isinstance(value, Mapping):
        entries = {str(k): from_python(v, origin, problems, (*path, str(k))) for k, v in value.items()}
        return Table(entries, dict.fromkeys(entries, origin), origin)
    if isinstance(value, (list, tuple)):
        return Items(tuple(from_python(v, origin, problems, (*path, str(i))) for i, v in enumerate(value)), origin)
    if not isinstance(value, (str, int, float, Path)):
        problems.append(origin.problem(f"a value of type {type(value).__name__} cannot stand in a pipeline", path))
        return Scalar("", origin)
    text = str(value)
    if fault := unusable(text):
        problems.append(origin.problem(f"the text holds {fault}", path))
        text = usable(text)
    return Scalar(text, origin)
