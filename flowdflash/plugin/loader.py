"""Finds and loads plugins one by one, so that one broken plugin never stops the program."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import EntryPoint
from importlib.metadata import entry_points as installed
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

import pluggy

from flowdflash import __version__
from flowdflash.errors import PluginBroken, Problem
from flowdflash.plugin import hookspecs
from flowdflash.plugin.audit import HOOKS, hook_faults, hooks_of
from flowdflash.plugin.hookspecs import PROJECT
from flowdflash.plugin.info import PluginInfo
from flowdflash.plugin.missing import Absent, explain, normal
from flowdflash.plugin.registry import Registry

if TYPE_CHECKING:
    from flowdflash.graph import Graph


SLOW_IMPORT_SECS = 3.0
"""A plugin that takes longer to import delays every command, and a person is told which it is."""


class Plugins:
    """The loaded plugins: passed down to whoever needs them, never a global.

    Attributes:
        registry: the stages that they registered.
        infos: every plugin that was found, working or not, in the order of loading.
        warnings: one line for each thing a person should hear of, to be read after the word "plugin".
    """

    def __init__(self) -> None:
        self.registry = Registry()
        self.infos: list[PluginInfo] = []
        self.warnings: list[str] = []
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._broken: dict[str, PluginBroken] = {}
        self._absent: list[Absent] = []
        self._files: dict[Path, PluginBroken | None] = {}
        self._silenced: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    @property
    def hook(self) -> Any:
        """The relay of pluggy: calls a hook of every plugin. Observers are called through ``notify``."""
        return self._manager.hook

    @property
    def broken(self) -> Mapping[str, PluginBroken]:
        """Plugins that failed to load, and why; the ``__cause__`` is the original error."""
        return MappingProxyType(self._broken)

    def load_module(self, module: ModuleType) -> None:
        """Load a module that is part of the program.

        Raises:
            PluginBroken: a fault in it is a fault in the program.
        """
        error = self._load(PluginInfo(module.__name__, "built-in", __version__), lambda: module)
        if error is not None:
            raise error

    def load_entry_point(self, point: EntryPoint) -> None:
        """Load an installed plugin; a fault is recorded in ``broken``."""
        info = PluginInfo.of(point)
        error = self._load(info, point.load)
        if error is not None:
            self._absent.append(Absent(info.name, info.origin, error, entry_point=point))

    def load_file(self, path: Path) -> None:
        """Load one Python file. Loading it again does nothing.

        Raises:
            PluginBroken: the file is not there, fails to import, or breaks the contract; also recorded in ``broken``.
        """
        path = Path(path).expanduser().resolve()
        if path not in self._files:
            info = PluginInfo(path.stem, f"file {path}")
            error = self._load(info, lambda: _import_file(path))
            self._files[path] = error
            if error is not None:
                self._absent.append(Absent(path.stem, info.origin, error, file=path))
        known = self._files[path]
        if known is not None:
            raise known

    def skip(self, point: EntryPoint) -> None:
        """Leave an installed plugin out because somebody disabled it."""
        info = PluginInfo.of(point, disabled=True)
        self.infos.append(info)
        self._absent.append(Absent(info.name, info.origin, entry_point=point))

    def check(self, graph: Graph) -> list[Problem]:
        """What the plugins say against a pipeline. A plugin that fails while it looks is a problem itself."""
        problems: list[Problem] = []
        for impl in self.hook.flowdflash_check.get_hookimpls():
            try:
                found = list(_call(impl, {"graph": graph}) or ())
                if not all(isinstance(problem, Problem) for problem in found):
                    raise TypeError(f"it must return a list of Problem or None, it returned {found!r}")
                problems += found
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                text = f"plugin {impl.plugin_name!r}: flowdflash_check failed: {_one_line(error)}"
                problems.append(Problem(text, hint="correct or disable the plugin"))
        return problems

    def notify(self, hook: str, /, **arguments: Any) -> list[str]:
        """Tell every plugin that observes ``hook``; may be called from any thread.

        An observer cannot stop training: one that raises is not called on that hook again, and its failure is one line
        in what is returned.
        """
        if set(arguments) != set(HOOKS[hook]):
            raise TypeError(f"{hook} takes {', '.join(HOOKS[hook])}, not {', '.join(arguments)}")
        texts = []
        for impl in getattr(self.hook, hook).get_hookimpls():
            key = (impl.plugin_name, hook)
            with self._lock:
                if key in self._silenced:
                    continue
            try:
                _call(impl, arguments)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                with self._lock:
                    self._silenced.add(key)
                texts.append(
                    f"plugin {impl.plugin_name!r}: {hook} failed and will not be called again: {_one_line(error)}"
                )
        return texts

    def explain_missing(self, kind: str, type: str) -> str | None:
        """Why there is no such stage, and what to do about it; None if there is one."""
        if self.registry.get(kind, type) is not None:
            return None
        return explain(kind, type, self.registry.types(), self._absent)

    def _load(self, info: PluginInfo, get: Callable[[], Any]) -> PluginBroken | None:
        started = time.perf_counter()
        import_secs, plugin, registered = 0.0, None, False
        try:
            plugin = get()
            import_secs = time.perf_counter() - started
            if self._manager.is_registered(plugin):
                return None
            self._refuse_duplicate(info)
            if faults := hook_faults(plugin):
                raise PluginBroken(info.name, "; ".join(faults))
            self._manager.register(plugin, info.name)
            registered = True
            with self.registry.owned_by(info.name):
                for impl in self.hook.flowdflash_register.get_hookimpls():
                    if impl.plugin is plugin:
                        _call(impl, {"registry": self.registry})
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin may call sys.exit while it is imported
            if registered:
                self._manager.unregister(plugin)
            broken = error if isinstance(error, PluginBroken) else _broken(info.name, error)
            self._note(info, import_secs or time.perf_counter() - started, error=broken)
            return broken
        self._note(info, import_secs, plugin=plugin)
        if import_secs > SLOW_IMPORT_SECS:
            took = f"took {import_secs:.1f} s to import; --disable-plugin {info.name} leaves it out"
            self.warnings.append(f"{info.name!r} ({info.origin}) {took}")
        return None

    def _note(
        self, info: PluginInfo, import_secs: float, *, plugin: Any = None, error: PluginBroken | None = None
    ) -> None:
        stages = () if error else tuple(r for r in self.registry.types() if r.owner == info.name)
        hooks = () if error else tuple(sorted(hooks_of(plugin)))
        text = _one_line(error) if error else ""
        self.infos.append(PluginInfo(info.name, info.origin, info.version, import_secs, stages, hooks, text))
        if error is not None:
            taken = info.name in self._broken or self._manager.has_plugin(info.name)
            self._broken[f"{info.name} ({info.origin})" if taken else info.name] = error
            why = text.removeprefix(f"plugin {info.name!r}: ")
            self.warnings.append(f"{info.name!r} ({info.origin}) is left out: {why}")

    def _refuse_duplicate(self, info: PluginInfo) -> None:
        if self._manager.has_plugin(info.name):
            first = next(i.origin for i in self.infos if i.name == info.name and not i.error)
            raise PluginBroken(
                info.name, f"{info.origin} and {first} both have a plugin of this name; rename or disable one"
            )


def load_plugins(
    *,
    builtin: Sequence[ModuleType],
    entry_points: bool = True,
    plugins_dir: Path | None = None,
    disabled: Collection[str] = (),
) -> Plugins:
    """Load the built-in stages, then what is installed, then every ``*.py`` of a folder.

    Args:
        builtin: modules of the program; a fault in one is raised.
        entry_points: look for installed distributions with entry points in the group ``flowdflash``.
        plugins_dir: a folder of single-file plugins; names that start with ``_`` are left alone.
        disabled: entry points or distributions to leave out, by name.
    """
    plugins = Plugins()
    for module in builtin:
        plugins.load_module(module)
    unmatched = {normal(name): name for name in disabled}
    wanted = set(unmatched)
    for point in sorted(installed(group=PROJECT), key=lambda p: (p.name, p.value)) if entry_points else ():
        names = {normal(point.name), normal(point.dist.name) if point.dist else ""}
        if names & wanted:
            plugins.skip(point)
        else:
            plugins.load_entry_point(point)
        for name in names:
            unmatched.pop(name, None)
    plugins.warnings += [f"{name!r} is not installed, so there was nothing to disable" for name in unmatched.values()]
    if plugins_dir is not None:
        _load_folder(plugins, Path(plugins_dir))
    return plugins


def _load_folder(plugins: Plugins, folder: Path) -> None:
    if not folder.expanduser().is_dir():
        raise PluginBroken(str(folder), "there is no such folder to load plugins from")
    for path in sorted(folder.expanduser().glob("*.py")):
        if path.name.startswith("_"):
            continue
        try:
            plugins.load_file(path)
        except PluginBroken:
            continue  # recorded; the pipeline may not need it


def _import_file(path: Path) -> ModuleType:
    if path.suffix != ".py" or not path.is_file():
        raise PluginBroken(path.stem, f"{path} is not a Python file")
    # Unique, so that two files of one name do not replace each other and none hides an installed module.
    name = f"{PROJECT}_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _call(impl: Any, arguments: Mapping[str, Any]) -> Any:
    """One implementation of a hook, with the arguments that it asks for."""
    asked = inspect.signature(impl.function).parameters
    return impl.function(**{name: arguments[name] for name in asked if name in arguments})


def _broken(name: str, error: BaseException) -> PluginBroken:
    broken = PluginBroken(name, f"failed to load: {_one_line(error)}")
    broken.__cause__ = error
    return broken


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, PluginBroken) else f"{type(error).__name__}: {text}".rstrip(": ")
