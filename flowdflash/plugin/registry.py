"""The registry: which stage class answers to which ``kind`` and ``type``, and which plugin it came from."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from flowdflash.errors import PluginBroken
from flowdflash.stage import (
    KINDS,
    Bucketer,
    Dispatcher,
    Drafter,
    Generator,
    Interleaver,
    Kind,
    Sink,
    Source,
    Stage,
    StageConfig,
    TargetForward,
)

KIND_CLASSES: Mapping[Kind, type[Stage]] = {
    cls.kind: cls for cls in (Source, Bucketer, Interleaver, Dispatcher, TargetForward, Generator, Drafter, Sink)
}

METHODS: Mapping[Kind, tuple[str, ...]] = {
    "source": ("epochs", "tokens"),
    "bucketer": ("batches",),
    "interleaver": ("order",),
    "dispatcher": ("route",),
    "target-forward": ("forward",),
    "generator": ("generate",),
    "drafter": ("step", "finish"),
    "sink": ("write",),
}
"""What the author of each kind has to write."""

RESERVED_OPTIONS = ("kind", "type", "inputs")
"""Keys of a stage in a pipeline file that are not options of the stage."""

StageClass = TypeVar("StageClass", bound=type[Stage])

_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Registered:
    """One stage class in the registry.

    Attributes:
        cls: the class.
        kind, type: what a pipeline file calls it.
        owner: the plugin that registered it.
        summary: first line of its docstring.
    """

    cls: type[Stage]
    kind: Kind
    type: str
    owner: str
    summary: str


class Registry:
    """Stage classes by kind and type. Refuses duplicates and classes that would fail later."""

    def __init__(self) -> None:
        self._stages: dict[tuple[Kind, str], Registered] = {}
        self._owner = ""

    @contextmanager
    def owned_by(self, owner: str) -> Iterator[None]:
        """Within the block, what is registered belongs to ``owner``; if the block raises, it is taken back."""
        before, outer = dict(self._stages), self._owner
        self._owner = owner
        try:
            yield
        except BaseException:
            self._stages = before
            raise
        finally:
            self._owner = outer

    def register(self, cls: StageClass) -> StageClass:
        """Add a stage class; returns it, so that this can be used as a decorator.

        Raises:
            PluginBroken: the class breaks the contract of a stage (every fault is listed), or its name is taken.
        """
        owner = self._owner or getattr(cls, "__module__", "?")
        if faults := stage_faults(cls):
            name = getattr(cls, "__qualname__", repr(cls))
            raise PluginBroken(owner, f"stage class {name} cannot be registered: " + "; ".join(faults))
        known = self._stages.get((cls.kind, cls.type))
        if known is not None and known.cls is not cls:
            first = f"{known.cls.__module__}.{known.cls.__qualname__}"
            raise PluginBroken(
                owner,
                f"{cls.__qualname__} wants the name of {cls.kind} {cls.type!r}, which plugin {known.owner!r} "
                f"has registered already ({first}); rename one, or disable one plugin",
            )
        summary = (inspect.getdoc(cls) or "").strip().splitlines()[0]
        self._stages.setdefault((cls.kind, cls.type), Registered(cls, cls.kind, cls.type, owner, summary))
        return cls

    def get(self, kind: str, type: str) -> type[Stage] | None:
        """The class for a kind and a type, or None."""
        found = self._stages.get((kind, type))  # type: ignore[arg-type]
        return found.cls if found else None

    def types(self, kind: str | None = None) -> list[Registered]:
        """What is registered, of one kind or of all: kinds in the order of a pipeline, types by name."""
        chosen = (r for r in self._stages.values() if kind is None or r.kind == kind)
        return sorted(chosen, key=lambda r: (KINDS.index(r.kind), r.type))


def stage_faults(cls: object) -> list[str]:
    """What is wrong with a class that wants to be a stage, each fault with what to do about it."""
    if not isinstance(cls, type):
        return [f"{cls!r} is not a class; pass the class itself, not an instance"]
    if not issubclass(cls, Stage):
        return ["it does not derive from a kind of stage; derive from one of " + _kind_names()]
    bases = [base for base in KIND_CLASSES.values() if base in cls.__bases__]
    if len(bases) != 1:
        return [f"it must derive directly from exactly one of {_kind_names()}"]
    faults = []
    if cls.kind != bases[0].kind:
        faults.append(f"it derives from {bases[0].__name__} but says kind {cls.kind!r}; remove the line")
    name = cls.__dict__.get("type")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        faults.append(
            f"its `type` is {name!r}; set it to the name that a pipeline file will use, "
            "lower case letters, digits and underscores"
        )
    if not (cls.__dict__.get("__doc__") or "").strip():
        faults.append("it has no docstring; the first line is what `flowdflash stages` shows")
    return faults + _method_faults(cls, bases[0]) + _config_faults(cls) + _port_faults(cls)


def _kind_names() -> str:
    return ", ".join(base.__name__ for base in KIND_CLASSES.values())


def _method_faults(cls: type[Stage], base: type[Stage]) -> list[str]:
    faults = []
    for name in METHODS[base.kind]:
        wanted = list(inspect.signature(getattr(base, name)).parameters)
        shown = f"{name}({', '.join(wanted)})"
        if getattr(cls, name) is getattr(base, name):
            faults.append(f"it does not define `{shown}`")
        elif not _takes(getattr(cls, name), len(wanted)):
            faults.append(f"its `{name}` cannot be called as `{shown}`")
    if not _takes(cls.__init__, 2):
        faults.append("its `__init__` must take the config and nothing else; take hold of resources in `open`")
    return faults


def _takes(function: object, positional: int) -> bool:
    try:
        inspect.signature(function).bind(*range(positional))  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def _config_faults(cls: type[Stage]) -> list[str]:
    config = cls.Config
    if not (isinstance(config, type) and issubclass(config, StageConfig)):
        return ["its `Config` does not derive from StageConfig"]
    faults = []
    if config.model_config.get("extra") != "forbid" or not config.model_config.get("frozen"):
        faults.append("its `Config` must stay frozen and refuse unknown keys; do not change `model_config`")
    for name, field in config.model_fields.items():
        if not (field.description or "").strip():
            faults.append(f"option `{name}` has no description; write `Field(..., description=...)` with its unit")
        if name in RESERVED_OPTIONS:
            faults.append(f"option `{name}` has a name that every stage uses already; rename it")
    return faults


def _port_faults(cls: type[Stage]) -> list[str]:
    faults = []
    if not all(isinstance(payload, type) for payload in (*cls.reads, *cls.writes.values())):
        faults.append("`reads` and `writes` must hold classes")
    if cls.kind == "sink" and not cls.reads:
        faults.append("a sink must say what it takes, such as `reads = (StepRecord,)`")
    return faults
