"""From a pipeline file, or a mapping, to a checked pipeline with its graph; or to every problem there is in it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from flowdflash.config.document import parse, read
from flowdflash.config.dump import absolute, as_yaml, resolved
from flowdflash.config.facts import with_facts
from flowdflash.config.options import Found, validate
from flowdflash.config.resolve import fill, override, with_bases
from flowdflash.config.spec import VERSION, PipelineSpec, Plugins
from flowdflash.config.stages import declare, elsewhere
from flowdflash.config.tree import Items, Place, Problems, Scalar, Table, from_python
from flowdflash.config.wiring import wire
from flowdflash.errors import PipelineInvalid, PluginBroken, Problem
from flowdflash.graph import Graph


@dataclass(frozen=True)
class Pipeline:
    """A checked pipeline.

    Attributes:
        path: the file, as the user named it; for a mapping or a text, one in the folder that its paths start from.
        name, seed, ordering, stall_secs: as in the file.
        graph: the stages and what flows between them.
        resolved: the whole pipeline as nested dicts and lists of texts, with ``extends``, references and overrides
            worked in. It is a valid pipeline itself; its paths are relative to the folder of ``path``.
        warnings: what does not stop a run.
    """

    path: Path
    name: str
    seed: int
    ordering: str
    stall_secs: float
    graph: Graph
    resolved: dict[str, Any]
    warnings: tuple[Problem, ...] = ()

    @property
    def text(self) -> str:
        """``resolved`` as YAML."""
        return as_yaml(self.resolved)


def load(path: Path, plugins: Plugins, *, overrides: Sequence[str] = (), strict: bool = False) -> Pipeline:
    """Read and check a pipeline file.

    Args:
        path: the file.
        plugins: what supplies the stages; plugins that the file names are loaded into it.
        overrides: ``a.b=value`` each, set after ``extends`` and before references are filled in.
        strict: take warnings for errors.

    Raises:
        PipelineInvalid: something is wrong; carries every problem found.
    """
    path = Path(path)
    problems = Problems()
    root = with_bases(read(path, problems), problems, path)
    return _load(root, path, path.stem, plugins, problems, overrides, strict)


def load_mapping(
    tree: Mapping[str, Any],
    plugins: Plugins,
    base: Path,
    *,
    overrides: Sequence[str] = (),
    strict: bool = False,
) -> Pipeline:
    """Check a pipeline given as Python dicts. ``version`` may be left out; paths start from ``base``.

    Raises:
        PipelineInvalid: something is wrong; carries every problem found.
    """
    problems = Problems()
    place = Place(folder=Path(base).absolute())
    root = from_python(tree, place, problems)
    if not isinstance(root, Table):
        raise PipelineInvalid([*problems, place.problem("a pipeline is a mapping of keys to values")])
    if "version" not in root.entries:
        root = root.having("version", Scalar(str(VERSION), place))
    return _load(
        with_bases(root, problems), Path(base) / "pipeline.yaml", "pipeline", plugins, problems, overrides, strict
    )


def load_text(text: str, plugins: Plugins, base: Path) -> Pipeline:
    """Check a pipeline given as YAML, such as the ``text`` of one that ran; paths start from ``base``.

    Raises:
        PipelineInvalid: something is wrong; carries every problem found.
    """
    problems = Problems()
    place = Place(folder=Path(base).absolute())
    root = parse(text, place, problems)
    if not isinstance(root, Table):
        raise PipelineInvalid([*problems, place.problem("a pipeline is a mapping of keys to values")])
    root = with_bases(root, problems)
    return _load(root, Path(base) / "pipeline.yaml", "pipeline", plugins, problems, (), False)


def _load(
    root: Table,
    path: Path,
    name: str,
    plugins: Plugins,
    problems: list[Problem],
    overrides: Sequence[str],
    strict: bool,
) -> Pipeline:
    filled = fill(override(root, overrides, problems), problems, os.environ)
    found = Found(filled.root, problems, filled.failed)
    spec = validate(PipelineSpec, filled.root, (), found, partial(elsewhere, root=filled.root, plugins=plugins))
    _load_plugins(filled.root, plugins, found)
    stages = declare(found, plugins)
    graph = with_facts(stages, wire(stages, found), found)
    if not found.errors:
        _ask_plugins(graph, plugins, found)
    told = [replace(p, severity="error") for p in problems] if strict else problems
    if spec is None or any(problem.severity == "error" for problem in told):
        raise PipelineInvalid(told)
    name = spec.name if "name" in filled.root.entries else name
    return Pipeline(
        path=path,
        name=name,
        seed=spec.seed,
        ordering=spec.ordering,
        stall_secs=spec.stall_secs,
        graph=graph,
        resolved=resolved(filled.root, name, graph),
        warnings=PipelineInvalid(told).problems,
    )


def _load_plugins(root: Table, plugins: Plugins, found: Found) -> None:
    """Load the plugins that the pipeline names; anything but a list of texts has been refused before."""
    node = root.entries.get("plugins")
    for index, item in enumerate(node.nodes if isinstance(node, Items) else ()):
        path = ("plugins", str(index))
        if not isinstance(item, Scalar) or not item.text or path in found.failed:
            continue
        try:
            file = absolute(item)
        except ValueError:  # no path; its validation has said so
            continue
        try:
            plugins.load_file(file)
        except PluginBroken as error:
            found.add(path, str(error))
        except Exception as error:
            found.add(path, f"cannot load the plugin: {type(error).__name__}: {error}")


def _ask_plugins(graph: Graph, plugins: Plugins, found: Found) -> None:
    """Place what the plugins say against a pipeline that is sound otherwise."""
    for problem in plugins.check(graph):
        if problem.file:
            found.problems.append(problem)
        else:
            path = [step for step in problem.path.split(".") if step]
            whole = len(path) == 2 and path[0] == "stages"
            found.add(path, problem.message, problem.hint, key=whole, severity=problem.severity)
