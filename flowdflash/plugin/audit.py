"""What is wrong with the hooks of a plugin. To pluggy an unknown or unmarked hook is no fault, only a silent no-op."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from flowdflash.plugin import hookspecs
from flowdflash.plugin.hookspecs import PREFIX, PROJECT

HOOKS: Mapping[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(function).parameters)
    for name, function in vars(hookspecs).items()
    if inspect.isfunction(function) and hasattr(function, f"{PROJECT}_spec")
}
"""Every hook and its arguments."""


def hooks_of(plugin: object) -> dict[str, Any]:
    """The hooks that a plugin implements, by name."""
    return {marks["specname"] or name: function for name, function, marks in _routines(plugin) if marks}


def hook_faults(plugin: object) -> list[str]:
    """Every fault in the hooks of a plugin, each with what to do about it."""
    faults = []
    for name, function, marks in _routines(plugin):
        if marks:
            faults += _marked_faults(marks["specname"] or name, function, marks)
        elif name.startswith(PREFIX) and not hasattr(function, f"{PROJECT}_spec"):
            what = "looks like a hook but is not marked"
            cure = "put `@hookimpl` above it, or give it a name that does not start with " + PREFIX
            faults.append(f"{name} {what}{'' if name in HOOKS else _nearest(name)}; {cure}")
    if not faults and not hooks_of(plugin):
        faults.append(
            "it implements no hook; a plugin that adds a stage needs `@hookimpl def flowdflash_register(registry): "
            "registry.register(MyStage)`"
        )
    return faults


def _routines(plugin: object) -> list[tuple[str, Any, dict[str, Any] | None]]:
    found = ((name, inspect.getattr_static(plugin, name), getattr(plugin, name, None)) for name in dir(plugin))
    return [(name, f, getattr(f, f"{PROJECT}_impl", None)) for name, _, f in found if inspect.isroutine(f)]


def _marked_faults(hook: str, function: Any, marks: Mapping[str, Any]) -> list[str]:
    if hook not in HOOKS:
        return [f"{hook} is not a hook of flowdflash{_nearest(hook)}; the hooks are {', '.join(HOOKS)}"]
    faults = []
    takes = HOOKS[hook]
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            faults.append(
                f"{hook} must name its arguments instead of *{parameter.name}; it may take {', '.join(takes)}"
            )
        elif parameter.name not in takes and parameter.default is parameter.empty:
            near = _nearest(parameter.name, takes)
            faults.append(f"{hook} asks for an argument {parameter.name!r}{near}; it may take {', '.join(takes)}")
    if marks.get("wrapper") or marks.get("hookwrapper"):
        faults.append(f"{hook} is marked as a wrapper; hooks of flowdflash cannot be wrapped")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        faults.append(f"{hook} must be a plain function, neither async nor a generator")
    return faults


def _nearest(name: str, names: object = None) -> str:
    near = difflib.get_close_matches(name, list(names or HOOKS), n=1, cutoff=0.5)  # type: ignore[call-overload]
    return f" (did you mean {near[0]}?)" if near else ""
