"""Validation of one mapping against one pydantic model, with every error placed and put in plain words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from flowdflash.config.resolve import near
from flowdflash.config.tree import Node, Scalar, Table, child, leaves, locate, plain, shown
from flowdflash.errors import Problem

Model = TypeVar("Model", bound=BaseModel)
Steps = tuple[str, ...]
"""Keys and list positions that lead to a place in a pipeline."""


@dataclass(slots=True)
class Found:
    """The tree being checked and the problems found in it so far.

    Attributes:
        root: the whole tree.
        problems: in the order found.
        failed: leaves that have a problem already, and whose text means nothing.
    """

    root: Table
    problems: list[Problem]
    failed: set[Steps] = field(default_factory=set)

    def add(
        self,
        path: Sequence[str],
        message: str,
        hint: str = "",
        *,
        key: bool = False,
        severity: Literal["error", "warning"] = "error",
    ) -> None:
        """Add a problem at the place that a path leads to, or as near to it as the file has something."""
        self.problems.append(locate(self.root, path, key=key)[1].problem(message, path, hint, severity))

    @property
    def errors(self) -> bool:
        """Something is wrong, beyond warnings."""
        return any(problem.severity == "error" for problem in self.problems)

    def broken(self, path: Steps) -> bool:
        """A leaf at or under this path has a problem already."""
        return any(leaf[: len(path)] == path for leaf in self.failed)


def validate(
    model: type[Model],
    node: Table,
    path: Steps,
    found: Found,
    elsewhere: Callable[[str], str] = lambda key: "",
    registry: Any = None,
) -> Model | None:
    """The model with the options of a mapping, or None with problems added.

    Paths in it start from the folder of the file they are written in. Where a mapping was put together from files in
    several folders it is validated once per folder, and each option is taken from the folder it was written in.

    Args:
        model: what the mapping has to be.
        node: the mapping.
        path: its place in the pipeline.
        found: where problems go.
        elsewhere: a hint on where an unknown option may belong.
        registry: known stages, for an option that holds stages itself.
    """
    by_folder: dict[Path, Model] = {}
    for folder in [node.place.folder, *(leaf.place.folder for leaf in leaves(node))]:
        if folder in by_folder:
            continue
        try:
            by_folder[folder] = _validated(model, node, {"base": folder, "registry": registry})
        except ValidationError as error:
            _report(error, model, node, path, found, elsewhere, registry)
            return None
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            found.add(path, f"the options cannot be checked: {type(error).__name__}: {error}", key=True)
            return None
    if found.broken(path):
        return None
    if len(by_folder) == 1:
        return by_folder[node.place.folder]
    chosen = _from_own_folder(node, by_folder)
    assert isinstance(chosen, model)
    return chosen


def _from_own_folder(node: Node, by_folder: Mapping[Path, Any]) -> Any:
    values = list(by_folder.values())
    if isinstance(node, Table) and isinstance(values[0], BaseModel):
        names = {info.alias or name: name for name, info in type(values[0]).model_fields.items()}
        update = {
            names[key]: _from_own_folder(below, {f: getattr(v, names[key]) for f, v in by_folder.items()})
            for key, below in node.entries.items()
            if key in names
        }
        return values[0].model_copy(update=update)
    if isinstance(node, Table) and isinstance(values[0], dict) and set(values[0]) == set(node.entries):
        return {
            key: _from_own_folder(below, {f: v[key] for f, v in by_folder.items()})
            for key, below in node.entries.items()
        }
    return by_folder[next((leaf.place.folder for leaf in leaves(node)), node.place.folder)]


def _validated(model: type[Model], node: Table, context: Mapping[str, Any]) -> Model:
    raw = plain(node)
    try:
        return model.model_validate(raw, context=context)
    except ValidationError as error:
        if not sum(_literal(detail, node, raw) for detail in error.errors(include_url=False)):
            raise
    return model.model_validate(raw, context=context)


def _literal(detail: ErrorDetails, node: Table, raw: Any) -> bool:
    """Turn a text into the number or truth value that a ``Literal`` of such asks for; pydantic does not."""
    text = detail["input"]
    if detail["type"] != "literal_error" or not isinstance(text, str):
        return False
    allowed = re.split(r", | or ", str(detail.get("ctx", {}).get("expected", "")))
    truth = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    for convert in (int, float, lambda word: truth[word.lower()]):
        try:
            value = convert(text)
        except (ValueError, KeyError, OverflowError):
            continue
        if repr(value) in allowed:
            *steps, last = locate(node, detail["loc"])[0]
            for step in steps:
                raw = raw[int(step)] if isinstance(raw, list) else raw[step]
            raw[int(last) if isinstance(raw, list) else last] = value
            return True
    return False


@dataclass(frozen=True, slots=True)
class _Fault:
    detail: ErrorDetails
    taken: Steps
    in_union: bool


def _report(
    error: ValidationError,
    model: type[BaseModel],
    node: Table,
    path: Steps,
    found: Found,
    elsewhere: Callable[[str], str],
    registry: Any,
) -> None:
    faults = []
    for detail in error.errors(include_url=False):
        taken = locate(node, detail["loc"])[0]
        extra = len(detail["loc"]) - len(taken) - (detail["type"] == "missing") - ("[key]" in detail["loc"])
        faults.append(_Fault(detail, taken, extra > 0))
    together: dict[Steps, list[ErrorDetails]] = {}
    for fault in faults:
        full = (*path, *fault.taken)
        # Of a union, what is told of the branch that somebody meant is what lies deepest.
        if found.broken(full) or (
            fault.in_union and any(f.in_union and f.taken[: len(fault.taken)] == fault.taken != f.taken for f in faults)
        ):
            continue
        if fault.detail["type"] == "missing":
            name = str(fault.detail["loc"][-1])
            info = _fields_at(model, fault.taken, node, registry).get(name)
            found.add(full, f"{name} is missing", f"{name}: {info.description}" if info else "", key=True)
        elif fault.detail["type"] == "extra_forbidden":
            *above, name = fault.taken
            hint = _where_to(model, tuple(above), name, elsewhere, _fields_at(model, above, node, registry))
            found.add(full, f"unknown option {shown(name)}", hint, key=True)
        else:
            together.setdefault(full, []).append(fault.detail)
    for full, details in together.items():
        messages = list(dict.fromkeys(_message(detail) for detail in details))
        key = any("[key]" in detail["loc"] for detail in details) or full == path
        hints = filter(None, map(_hint, details))
        found.add(
            full,
            " or ".join([messages[0], *(m.removeprefix("input should be ") for m in messages[1:])]),
            next(hints, ""),
            key=key,
        )


_WORDS = {
    "list_type": "input should be a list",
    "tuple_type": "input should be a list",
    "set_type": "input should be a list",
    "frozen_set_type": "input should be a list",
    "dict_type": "input should be a mapping",
    "model_type": "input should be a mapping",
    "model_attributes_type": "input should be a mapping",
    "path_type": "input should be a path",
    "string_type": "input should be one text or number",
}


def _message(detail: ErrorDetails) -> str:
    if detail["input"] is None:
        return "a value is needed here, this is empty (null)"
    if detail["type"] == "float_parsing" and str(detail["input"]).strip("+-. ").lower() in ("inf", "nan"):
        return "input should be a finite number"
    text = _WORDS.get(detail["type"]) or detail["msg"]
    text = text.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    text = text.split(", unable to parse")[0].split(" after validation, not")[0].replace("Dictionary", "Mapping")
    text = " ".join(text.split()).rstrip(".")
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


def _hint(detail: ErrorDetails) -> str:
    text = detail["input"]
    if not isinstance(text, str):
        return ""
    if detail["type"] in ("literal_error", "enum"):
        allowed = re.findall(r"'([^']*)'", str(detail.get("ctx", {}).get("expected", "")))
        return near(text, allowed)
    if detail["type"] == "int_parsing":
        try:
            number = float(text)
        except ValueError:
            return ""
        return f"write {int(number)}" if number.is_integer() and abs(number) < 1e15 else ""
    return ""


def fields_of(model: type[BaseModel] | None) -> dict[str, Any]:
    """Options of a model by the name that a file uses."""
    return {info.alias or name: info for name, info in model.model_fields.items()} if model else {}


def model_at(model: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    """The model nested in another at a path, where there is one."""
    here: type[BaseModel] | None = model
    for step in path:
        info = fields_of(here).get(step)
        if info is not None:
            here = next(_models(info.annotation), None)
    return here


def _fields_at(model: type[BaseModel], path: Sequence[str], node: Node, registry: Any) -> dict[str, Any]:
    """Options at a path; where a source stands there, those of its type too."""
    fields = fields_of(model_at(model, path))
    for step in path:
        node = child(node, step) or node
    named = node.entries.get("type") if isinstance(node, Table) and "type" in fields else None
    if registry and isinstance(named, Scalar) and named.text and (cls := registry.get("source", named.text)):
        fields |= fields_of(cls.Config)
    return fields


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _where_to(
    model: type[BaseModel], above: Steps, name: str, elsewhere: Callable[[str], str], here: Mapping[str, Any]
) -> str:
    """What an unknown option may have been meant to be: a near name, or an option of something else."""
    hints = [near(name, here)]
    inner = [key for key, info in here.items() for m in _models(info.annotation) if name in fields_of(m)]
    if inner:
        hints.append(f"it belongs under {inner[0]!r}")
    if above and name in fields_of(model):
        hints.append(f"it belongs one level up, beside {above[0]!r}")
    hints.append(elsewhere(name))
    known = ", ".join(here) or ("" if above else "none")
    return "; ".join(filter(None, hints)) or (f"options here: {known}" if known else "see `flowdflash stages`")
