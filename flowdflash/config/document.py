"""YAML text to a tree in which every key and value knows its file, line and column.

The tree is built from parser events, one at a time, so that hostile input (deep nesting, aliases that multiply, huge
files) is refused while it is read and not after.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)
from ruamel.yaml.reader import ReaderError

from flowdflash.config.tree import MAX_DEPTH, Items, Node, Place, Scalar, Table, shown, unusable, usable
from flowdflash.errors import PipelineInvalid, Problem

MAX_BYTES = 256 * 1024
"""Largest pipeline file. A pipeline of 80 stages has about 10 kB."""
MAX_NODES = 5_000
"""Most values in a document, with aliases counted as often as they are used."""


def read(path: Path, problems: list[Problem]) -> Table:
    """The tree of a file. Mistakes that leave a tree standing are added to ``problems``.

    Raises:
        PipelineInvalid: there is no tree: no such file, not text, not YAML.
    """
    place = Place(str(path), folder=path.absolute().parent)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PipelineInvalid([*problems, place.problem(f"cannot read the file: {reason}")]) from None
    if len(data) > MAX_BYTES:
        raise PipelineInvalid([*problems, place.problem(f"the file is larger than {MAX_BYTES // 1024} KiB")])
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problem = replace(place, line=line, column=1).problem(
            f"the file is not UTF-8 text: {error.reason} at byte {error.start}", hint="save it as UTF-8"
        )
        raise PipelineInvalid([*problems, problem]) from None
    node = parse(text, place, problems)
    if not isinstance(node, Table):
        raise PipelineInvalid([*problems, node.place.problem("a pipeline file is a mapping of keys to values")])
    return node


def parse(text: str, origin: Place, problems: list[Problem], *, whole_file: bool = True) -> Node:
    """The tree of a YAML text. With ``whole_file`` off every place is ``origin`` itself.

    Raises:
        PipelineInvalid: there is no tree.
    """
    reader = _Composer(origin, problems, whole_file)
    try:
        return reader.document(YAML(typ="safe", pure=True).parse(text))
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - (text.rfind("\n", 0, error.position) + 1) + 1
        message = f"character U+{int(error.character):04X} is not allowed in YAML"
        fault = reader.place(line, column).problem(message, hint="in a quoted text write it as an escape")
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = " ".join(str(error.problem or error.context or "cannot be read").split())
        context = f" ({' '.join(str(error.context).split())})" if error.problem and error.context else ""
        hint = "indent with spaces, never with tabs" if "\\t" in message else ""
        if "cannot start any token" in message and not hint:
            hint = "put the text in quotes"
        where = reader.place(mark.line + 1, mark.column + 1) if mark else origin
        if mark and re.search(r"""[^"']\$\{""", "".join(text.splitlines()[mark.line : mark.line + 1])):
            hint = hint or 'within {...} or [...] put a reference in quotes: "${vars.x}"'
        fault = where.problem(f"not valid YAML: {message}{context}", hint=hint)
    except (YAMLError, ValueError, OverflowError, NotImplementedError, AttributeError, TypeError) as error:
        # ruamel lets plain Python errors out on a few malformed escapes and directives.
        fault = origin.problem(f"not valid YAML: {' '.join(str(error).split()) or type(error).__name__}")
    raise PipelineInvalid([*problems, fault])


class _Composer:
    """Builds the tree from parser events, within limits."""

    def __init__(self, origin: Place, problems: list[Problem], whole_file: bool) -> None:
        self.origin, self.problems, self.whole_file = origin, problems, whole_file
        self.anchors: dict[str, tuple[Node, int]] = {}
        self.count = 0

    def place(self, line: int, column: int) -> Place:
        return replace(self.origin, line=line, column=column) if self.whole_file else self.origin

    def document(self, events: Iterator[Event]) -> Node:
        self.events = events
        root: Node | None = None
        for event in events:
            if isinstance(event, DocumentStartEvent):
                if root is not None:
                    raise self._refused(self._at(event), "a second document starts here; a file holds one pipeline")
                root = self._node(next(events), 0)
        if root is None:
            raise self._refused(self.origin, "the file is empty" if self.whole_file else "there is no value")
        return root

    def _at(self, event: Event) -> Place:
        return self.place(event.start_mark.line + 1, event.start_mark.column + 1)

    def _refused(self, place: Place, message: str, hint: str = "") -> PipelineInvalid:
        return PipelineInvalid([*self.problems, place.problem(message, hint=hint)])

    def _node(self, event: Event, depth: int) -> Node:
        place, before = self._at(event), self.count
        self.count += 1
        if self.count > MAX_NODES:
            raise self._refused(place, f"more than {MAX_NODES} values, aliases counted as often as they are used")
        if depth > MAX_DEPTH:
            raise self._refused(place, f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(event, AliasEvent):
            return self._alias(event, place)
        if (tag := getattr(event, "tag", None)) is not None:
            message = f"tags such as {str(tag).replace('tag:yaml.org,2002:', '!!')} are not used in pipelines"
            self.problems.append(place.problem(message, hint="delete the tag"))
        if isinstance(event, ScalarEvent):
            node: Node = self._scalar(event, place)
        elif isinstance(event, SequenceStartEvent):
            node = self._items(place, depth)
        else:
            node = self._table(place, depth)
        if (anchor := getattr(event, "anchor", None)) is not None:
            self.anchors[anchor] = (node, self.count - before)
        return node

    def _alias(self, event: AliasEvent, place: Place) -> Node:
        if event.anchor not in self.anchors:
            raise self._refused(
                place, f"alias *{event.anchor} has no anchor before it", "quote the text if it is no alias"
            )
        node, size = self.anchors[event.anchor]
        self.count += size - 1
        if self.count > MAX_NODES:
            raise self._refused(place, f"more than {MAX_NODES} values, aliases counted as often as they are used")
        return node

    def _scalar(self, event: ScalarEvent, place: Place) -> Scalar:
        text = str(event.value)
        if fault := unusable(text):
            self.problems.append(place.problem(f"the text holds {fault}"))
            text = usable(text)
        is_null = not event.style and text in ("", "~", "null", "Null", "NULL")
        return Scalar(None if is_null else text, place)

    def _items(self, place: Place, depth: int) -> Items:
        nodes = []
        while not isinstance(event := next(self.events), SequenceEndEvent):
            nodes.append(self._node(event, depth + 1))
        return Items(tuple(nodes), place)

    def _table(self, place: Place, depth: int) -> Table:
        entries: dict[str, Node] = {}
        keys: dict[str, Place] = {}
        while not isinstance(event := next(self.events), MappingEndEvent):
            at = self._at(event)
            key = self._node(event, depth + 1)
            value = self._node(next(self.events), depth + 1)
            if not isinstance(key, Scalar) or key.text is None:
                self.problems.append(at.problem("a key has to be a text"))
            elif key.text == "<<" and not getattr(event, "style", None):
                hint = "write the keys out, or put them in a file of their own and name it in 'extends'"
                self.problems.append(at.problem("merge keys (<<) are not used in pipelines", hint=hint))
            elif key.text in entries:
                first = keys[key.text]
                seen = f", first in line {first.line}" if first.line else ""
                self.problems.append(
                    at.problem(f"key {shown(key.text)} is written twice{seen}", hint="keep one of the two")
                )
            else:
                entries[key.text], keys[key.text] = value, at
        return Table(entries, keys, place)
