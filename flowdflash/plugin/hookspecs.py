"""The six hooks of flowdflash. A plugin marks a function of the same name with ``hookimpl``.

Hooks run once per optimizer step at most, never per sample. A plugin may leave out arguments that it does not need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from flowdflash.errors import Problem
    from flowdflash.graph import Graph
    from flowdflash.items import Checkpoint, StepRecord
    from flowdflash.plugin.registry import Registry

PROJECT = "flowdflash"
"""Entry-point group and pluggy project name."""

PREFIX = "flowdflash_"
"""What the name of every hook starts with."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def flowdflash_register(registry: Registry) -> None:
    """Add stages: ``registry.register(MyInterleaver)``."""


@hookspec
def flowdflash_check(graph: Graph) -> Sequence[Problem] | None:
    """Look at a checked pipeline and return problems, if any; an error among them stops the run before it starts."""


@hookspec
def flowdflash_run_started(run: Any) -> None:
    """A run is about to train: every stage is open. ``run.path`` is its folder, ``run.name`` its pipeline."""


@hookspec
def flowdflash_step(record: StepRecord) -> None:
    """The optimizer has taken a step."""


@hookspec
def flowdflash_checkpoint_saved(checkpoint: Checkpoint) -> None:
    """A checkpoint has reached the disk."""


@hookspec
def flowdflash_run_finished(run: Any, outcome: Any) -> None:
    """A run has ended, well or not; ``outcome.status``, ``outcome.steps`` and the like say how."""
