"""Writes a new plugin: a package with one working stage, its entry point and a test that passes."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template

from flowdflash import items, stage
from flowdflash.errors import FlowdflashError

USAGE: Mapping[str, str] = {
    "interleaver": "stages:\n  order: {kind: interleaver, type: $name, inputs: buckets, first: long}",
    "bucketer": "stages:\n  buckets: {kind: bucketer, type: $name, inputs: corpus, token_budget: 8192}",
    "sink": "stages:\n  table: {kind: sink, type: $name, inputs: drafter.records, columns: [step, loss, lr]}",
    "dispatcher": "stages:\n  dispatch: {kind: dispatcher, type: $name, inputs: order, shift: 1}",
}
"""The kinds there is a template for, and how a pipeline uses each."""


def new_plugin(name: str, kind: str, into: Path) -> list[Path]:
    """Write a plugin called ``name`` to a new folder of that name in ``into``; returns the files written.

    Raises:
        FlowdflashError: the name or the kind cannot be used, or the folder is there already.
    """
    if kind not in USAGE:
        raise FlowdflashError(f"there is no template for a {kind!r}; there is one for each of {', '.join(USAGE)}")
    _refuse_name(name, _template(f"{kind}.py"))
    folder = Path(into) / name
    if folder.exists():
        raise FlowdflashError(f"{folder} exists already; choose another name, or remove it")
    words = {
        "name": name,
        "kind": kind,
        "distribution": name.replace("_", "-"),
        "class_name": _class_name(name),
        "usage": Template(USAGE[kind]).substitute(name=name),
    }
    sources = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        f"{name}.py": f"{kind}.py",
        f"tests/test_{name}.py": f"{kind}_test.py",
    }
    # All texts before the first file: a fault leaves nothing behind.
    texts = {target: Template(_template(source)).substitute(words) for target, source in sources.items()}
    written = []
    for target, text in texts.items():
        path = folder / target
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def _template(source: str) -> str:
    return (files("flowdflash.plugin") / "templates" / f"{source}.txt").read_text(encoding="utf-8")


def _class_name(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def _refuse_name(name: str, template: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise FlowdflashError(f"{name!r} cannot be a plugin's name; use lower case letters, digits and underscores")
    imported = " ".join(re.findall("^from .* import (.*)", template, re.MULTILINE)).replace(",", "").split()
    if _class_name(name) in {*stage.__all__, *items.__all__, *imported}:
        raise FlowdflashError(f"{name!r} would give a class of a name that flowdflash uses itself; choose another")
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise FlowdflashError(f"{name!r} is the name of a module that is installed already; choose another")
