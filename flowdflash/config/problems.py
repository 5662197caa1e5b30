"""Problems for a person, for a program, and for the annotations of a GitHub check."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from flowdflash.errors import Problem

_LINE_ENDS = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
_WIDEST = 160


def as_text(problems: Iterable[Problem]) -> str:
    """One paragraph per problem: place, message, the line with a caret under the column, hint."""
    lines: dict[str, list[str]] = {}
    return "\n".join(_one(problem, lines) for problem in problems)


def _one(problem: Problem, files: dict[str, list[str]]) -> str:
    warning = "warning" if problem.severity == "warning" else ""
    told = [": ".join(_flat(part) for part in (problem.place, warning, problem.path, problem.message) if part)]
    if problem.line and problem.file not in files:
        files[problem.file] = _lines_of(problem.file)
    lines = files.get(problem.file, [])
    if 0 < problem.line <= len(lines):
        line, column = _window(lines[problem.line - 1].rstrip(), max(problem.column, 1))
        told.append(f"{problem.line:>6} | {line}")
        told.append(f"       | {_blank(line[: column - 1])}^")
    if problem.hint:
        told.append(f"       hint: {_flat(problem.hint)}")
    return "\n".join(told)


def _lines_of(file: str) -> list[str]:
    try:
        return _LINE_ENDS.split(Path(file).read_bytes()[: 1 << 20].decode("utf-8-sig"))
    except (OSError, ValueError):
        return []


def _window(line: str, column: int) -> tuple[str, int]:
    """The part of a long line around a column, and the column within that part."""
    if len(line) <= _WIDEST:
        return line, column
    start = max(0, min(column - _WIDEST // 2, len(line) - _WIDEST))
    cut = line[start : start + _WIDEST]
    return ("…" + cut[1:] if start else cut), column - start


def _blank(text: str) -> str:
    """White space as wide as a text on a terminal."""
    wide = {"W": "  ", "F": "  "}
    return "".join(
        ch if ch == "\t" else "" if unicodedata.combining(ch) else wide.get(unicodedata.east_asian_width(ch), " ")
        for ch in text
    )


def _flat(text: str) -> str:
    return "".join(ch if ch.isprintable() else " " if ch.isspace() else "\ufffd" for ch in text)


def as_json(problems: Iterable[Problem]) -> str:
    """A list of objects with the fields of ``Problem``."""
    return json.dumps([asdict(problem) for problem in problems], indent=2, ensure_ascii=False)


def as_github(problems: Iterable[Problem]) -> str:
    """Workflow commands that GitHub shows as annotations of the file."""
    return "\n".join(_annotation(problem) for problem in problems)


def _annotation(problem: Problem) -> str:
    """One workflow command; an override is in no file, so its place goes into the text."""
    in_file = problem.file and not problem.file.startswith("--set ")
    where: Mapping[str, str | int] = (
        {"file": problem.file, "line": problem.line, "col": problem.column} if in_file else {}
    )
    properties = ",".join(f"{key}={_escaped(str(value), ':,')}" for key, value in where.items() if value)
    place = "" if in_file else problem.file
    text = ": ".join(part for part in (place, problem.path, problem.message) if part)
    text += f" ({problem.hint})" if problem.hint else ""
    return f"::{problem.severity}{' ' if properties else ''}{properties}::{_escaped(text)}"


def _escaped(text: str, more: str = "") -> str:
    for ch in "%\r\n" + more:
        text = text.replace(ch, f"%{ord(ch):02X}")
    return text


FORMATS: Mapping[str, Callable[[Iterable[Problem]], str]] = {"text": as_text, "json": as_json, "github": as_github}
"""Formats by name."""
