"""For authors of stages: samples and records to test with, and checks that a stage keeps the contract of its kind.

Each ``assert_*_contract`` builds ``cls`` with the options given and raises ``AssertionError`` with what is broken.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowdflash.data.lengths import BRIEF_EDGES
from flowdflash.stage import SilentReport
from flowdflash.testing.contracts import (
    assert_bucketer_contract,
    assert_dispatcher_contract,
    assert_interleaver_contract,
    assert_sink_contract,
)
from flowdflash.testing.made import (
    BRIEF_BUDGET,
    brief_samples,
    make_batches,
    make_checkpoint,
    make_records,
    make_samples,
    open_context,
)

if TYPE_CHECKING:
    from flowdflash.plugin.loader import Plugins
    from flowdflash.runtime.outcome import RunOutcome

__all__ = [
    "BRIEF_BUDGET",
    "BRIEF_EDGES",
    "assert_bucketer_contract",
    "assert_dispatcher_contract",
    "assert_interleaver_contract",
    "assert_sink_contract",
    "brief_samples",
    "make_batches",
    "make_checkpoint",
    "make_records",
    "make_samples",
    "open_context",
    "run_pipeline",
]


def run_pipeline(tree: Mapping[str, Any], *, run_dir: Path, plugins: Plugins | None = None) -> RunOutcome:
    """Check and run a pipeline given as a mapping, as ``flowdflash run`` would run it from a file.

    Paths start from the current folder; caches stay inside ``run_dir``, which must be new or empty. ``plugins`` are the
    built-in and the installed ones by default.

    Raises:
        PipelineInvalid: with every problem.
    """
    from flowdflash import stages
    from flowdflash.config.check import load_mapping
    from flowdflash.plugin.loader import load_plugins
    from flowdflash.runtime.executor import execute
    from flowdflash.runtime.rundir import RunDir

    loaded = plugins or load_plugins(builtin=[stages])
    pipeline = load_mapping(tree, loaded, Path.cwd())
    with RunDir.create(run_dir, pipeline.name) as run:
        return execute(pipeline, loaded, run, report=SilentReport(), cache_dir=run.path / "cache")
