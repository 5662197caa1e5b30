"""The contract of a stage: what an author writes, and what the runtime gives in return.

A stage is a class with a nested pydantic ``Config``; it is built from its config and nothing else, so class and config
can cross a process border while the object never does. A stage never sees a thread, a queue or a lock. Its life has
three phases: ``check`` (no torch; facts from configs alone), ``open`` (devices, files, models; on the thread that will
run it, one stage at a time) and run (the one method of its kind), then ``close``, called once whatever happened.
"""

from flowdflash.stage.context import Check, OpenContext, PlanSummary, Report, SilentReport, Vocabulary
from flowdflash.stage.kinds import (
    KINDS,
    Bucketer,
    Dispatcher,
    Drafter,
    Generator,
    History,
    Interleaver,
    Kind,
    ReplicaLoad,
    Sink,
    Source,
    Stage,
    TargetForward,
)
from flowdflash.stage.options import Bytes, ModelRef, PipelinePath, StageConfig, path_from

__all__ = [
    "KINDS",
    "Bucketer",
    "Bytes",
    "Check",
    "Dispatcher",
    "Drafter",
    "Generator",
    "History",
    "Interleaver",
    "Kind",
    "ModelRef",
    "OpenContext",
    "PipelinePath",
    "PlanSummary",
    "ReplicaLoad",
    "Report",
    "SilentReport",
    "Sink",
    "Source",
    "Stage",
    "StageConfig",
    "TargetForward",
    "Vocabulary",
    "path_from",
]
