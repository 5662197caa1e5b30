"""Why a stage type is not there: disabled, an extra not installed, a failed import, or a misspelt name."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path

from flowdflash.errors import PluginBroken
from flowdflash.plugin.registry import Registered

_MOST_FILES = 500


@dataclass(frozen=True, slots=True)
class Absent:
    """A plugin that is installed and not in use.

    Attributes:
        name, origin: as in its ``PluginInfo``.
        error: why it failed to load; None if it is disabled.
        entry_point: where it comes from, for an installed one.
        file: where it comes from, for a file.
    """

    name: str
    origin: str
    error: PluginBroken | None = None
    entry_point: EntryPoint | None = None
    file: Path | None = None

    def supplies(self, type: str) -> bool:
        """Does its source define a stage type of that name? Read as text: nothing disabled or broken is imported."""
        pattern = re.compile(rf"""^\s+type\b[^=\n]*=\s*["']{re.escape(type)}["']""", re.MULTILINE)
        return self.name == type or any(pattern.search(_text(path)) for path in self._sources())

    def _sources(self) -> list[Path]:
        if self.file is not None:
            return [self.file]
        assert self.entry_point is not None
        try:
            spec = importlib.util.find_spec(self.entry_point.module.partition(".")[0])
        except (ImportError, ValueError):
            return []
        if spec is None:
            return []
        folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
        single = [Path(spec.origin)] if spec.origin and not folders else []
        return (single + [path for folder in folders for path in sorted(folder.rglob("*.py"))])[:_MOST_FILES]


def explain(kind: str, type: str, registered: Sequence[Registered], absent: Sequence[Absent]) -> str:
    """One sentence or two on why no stage of that kind and type is there, and what to do."""
    what = f"{kind} {type!r}"
    for plugin in absent:
        if not plugin.supplies(type):
            continue
        if plugin.error is None:
            return f"{what} comes from plugin {plugin.name!r} ({plugin.origin}), which is disabled; enable it to use it"
        cause = plugin.error.__cause__
        if isinstance(cause, ModuleNotFoundError) and not _own(plugin, cause):
            return (
                f"{what} comes from plugin {plugin.name!r} ({plugin.origin}), which needs the module {cause.name!r} "
                f"that is not installed; {_cure(plugin, cause.name or '')}"
            )
        return f"{what} comes from plugin {plugin.name!r} ({plugin.origin}), which could not be loaded: {plugin.error}"
    return _nearest(kind, type, registered) + "".join(
        f"; plugin {plugin.name!r} could not be loaded and may supply it: {plugin.error}"
        for plugin in absent
        if plugin.error is not None
    )


def _nearest(kind: str, type: str, registered: Sequence[Registered]) -> str:
    if ":" in type or "." in type or "/" in type:
        return (
            f"{type!r} is not the name of a {kind}: a type is a name that a plugin registers, never an import path; "
            "list the file under `plugins:` and use the name that it registers"
        )
    names = [r.type for r in registered if r.kind == kind]
    near = difflib.get_close_matches(type, names, n=1, cutoff=0.5)
    if near:
        return f"there is no {kind} called {type!r}; did you mean {near[0]!r}?"
    other = [r.kind for r in registered if r.type == type]
    if other:
        return f"there is no {kind} called {type!r}, but there is a {other[0]} of that name; check `kind`"
    return f"there is no {kind} called {type!r}; there is {', '.join(names) or 'none'}"


def _own(plugin: Absent, cause: ModuleNotFoundError) -> bool:
    own = plugin.entry_point.module.partition(".")[0] if plugin.entry_point else ""
    return (cause.name or "").partition(".")[0] == own


def _cure(plugin: Absent, module: str) -> str:
    point = plugin.entry_point
    if point is not None and point.dist is not None:
        wanted = normal(module.partition(".")[0])
        for requirement in point.dist.requires or ():
            match = re.match(r"""([\w.\-]+).*extra\s*==\s*["']([^"']+)["']""", requirement)
            if match and normal(match[1]) == wanted:
                return f"install the extra: pip install '{point.dist.name}[{match[2]}]'"
        if point.extras:
            return f"install the extra: pip install '{point.dist.name}[{','.join(point.extras)}]'"
    return f"install it, usually with: pip install {module.partition('.')[0]}"


def normal(name: str) -> str:
    """A name as packages compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
