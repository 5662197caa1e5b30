"""A resolved pipeline as plain values and as YAML that reads back the same."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from flowdflash.config.tree import Items, Node, Scalar, Table
from flowdflash.graph import Graph
from flowdflash.secrets import hidden
from flowdflash.stage import path_from


def resolved(root: Table, name: str, graph: Graph) -> dict[str, Any]:
    """The tree as dicts, lists, texts and None, fit to be loaded again from the folder of ``root``.

    Vars are gone, since every reference is filled in; a ``${`` that is left is escaped. A secret of the environment is
    a reference, however it got there. A path that was written in a
    file of another folder is written anew, relative to the folder of ``root``.
    """
    folder = root.place.folder
    tree: dict[str, Any] = {"version": "", "name": _escaped(name)}
    for key, node in root.without("vars", "stages").entries.items():
        is_path = key == "plugins"
        tree[key] = _plain(node, _paths_of(node) if is_path else None, folder)
    stages = root.entries["stages"]
    assert isinstance(stages, Table)
    tree["stages"] = {key: _plain(node, graph.nodes[key].config, folder) for key, node in stages.entries.items()}
    return tree


def _paths_of(node: Node) -> list[Path]:
    return [absolute(item) for item in node.nodes if isinstance(item, Scalar)] if isinstance(node, Items) else []


def absolute(leaf: Scalar) -> Path:
    """The path that is written in a leaf.

    Raises:
        ValueError: it is none.
    """
    return path_from(leaf.place.folder, leaf.text or "")


def _plain(node: Node, value: Any, folder: Path) -> Any:
    """A tree as plain values; ``value`` is what validation made of it, as far as known."""
    if isinstance(node, Table):
        return {key: _plain(below, _part(value, key), folder) for key, below in node.entries.items()}
    if isinstance(node, Items):
        return [_plain(below, _part(value, index), folder) for index, below in enumerate(node.nodes)]
    if node.text is None:
        return None
    text = node.text
    if node.place.folder != folder and isinstance(value, (str, Path)) and text != str(value) == str(absolute(node)):
        relative = os.path.relpath(value, folder)
        text = relative if relative.startswith(".") else f"./{relative}"
    return _escaped(text)


def _part(value: Any, key: str | int) -> Any:
    if isinstance(value, BaseModel):
        names = {info.alias or name: name for name, info in type(value).model_fields.items()}
        return getattr(value, names[str(key)], None) if key in names else None
    if isinstance(value, Mapping):
        return value.get(key)
    if isinstance(value, (list, tuple)) and isinstance(key, int) and key < len(value):
        return value[key]
    return None


def _escaped(text: str) -> str:
    def spelt(value: str) -> str:
        return value.replace("${", "$${")

    return hidden(spelt(text), spelt)


_PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./+-]*|-[0-9.]+")
_NOT_TEXT = re.compile(r"(?i)null|\.\.\.|---|yes|no|on|off|y|n|[+-]?\.(inf|nan)|0[xob]\w+|\d+-\d+-\d+.*")


def as_yaml(tree: Mapping[str, Any]) -> str:
    """YAML of dicts, lists, texts and None; quotes only what needs it."""
    return "".join(f"{line}\n" for line in _lines(tree, 0))


def _lines(tree: Mapping[str, Any], depth: int) -> Iterable[str]:
    for key, value in tree.items():
        head = f"{'  ' * depth}{_scalar(key)}:"
        if isinstance(value, Mapping) and value and depth < 2:
            yield head
            yield from _lines(value, depth + 1)
        else:
            yield f"{head} {_flow(value)}"


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_scalar(k)}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return "null" if value is None else _scalar(value)


def _reads_back(text: str) -> bool:
    """Any YAML reader, of numbers and truth values too, gives a value that is written like this text."""
    if text.lower() in ("true", "false"):
        return text.islower()
    try:
        number = float(text)
    except ValueError:
        return not _NOT_TEXT.fullmatch(text) and not text.replace("_", "").isdigit()
    return text in (str(int(number)) if number.is_integer() and abs(number) < 1e15 else "", repr(number))


def _scalar(text: str) -> str:
    if _PLAIN.fullmatch(text) and _reads_back(text):
        return text
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
    return '"' + "".join(escapes.get(ch) or (ch if ch.isprintable() else f"\\U{ord(ch):08X}") for ch in text) + '"'
