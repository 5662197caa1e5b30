"""Stages that look on while a pipeline runs, and the plugin that registers them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from pydantic import Field

from flowdflash.items import Checkpoint, FeatureBatch, StepRecord, TokenBatch
from flowdflash.plugin import hookimpl
from flowdflash.stage import Check, Sink, StageConfig, TargetForward


class Seen:
    """What the stages of one run have seen. There is one at a time: a stage is built from its config alone."""

    now: ClassVar[Seen]

    def __init__(self, meet: Callable[[], Any] = lambda: None) -> None:
        self.meet = meet
        self.lock = threading.Lock()
        self.forwarded: dict[int, int] = {}
        self.trained: list[TokenBatch] = []
        self.records: list[StepRecord] = []
        self.saved: list[Checkpoint] = []
        self.threads: dict[str, str] = {}
        self.step_reached = threading.Condition()
        self.steps_during_save: tuple[int, int] = (0, 0)
        Seen.now = self


class Features:
    """Stands for a tensor."""

    requires_grad = False

    def numel(self) -> int:
        return 1

    def element_size(self) -> int:
        return 1


class LookingTarget(TargetForward):
    """Computes nothing; notes which replica had which batch."""

    type = "looking"

    class Config(StageConfig):
        replicas: int = Field(1, description="Copies.")

    def check(self, check: Check) -> Mapping[str, Any]:
        return {"replicas": self.config.replicas}

    def open(self, ctx: Any) -> None:
        self.replica = ctx.replica

    def forward(self, batch: TokenBatch) -> FeatureBatch:
        with Seen.now.lock:
            Seen.now.forwarded[batch.info.seq] = self.replica
        Seen.now.meet()
        return FeatureBatch(batch, Features(), (0,))


class LookingMetrics(Sink):
    """Keeps records, and tells when they come."""

    type = "looking"
    reads = (StepRecord,)

    def write(self, item: StepRecord) -> None:
        with Seen.now.step_reached:
            Seen.now.records.append(item)
            Seen.now.step_reached.notify_all()


class SlowSave(Sink):
    """Wants one checkpoint, and is not done with it before training has gone on for three steps."""

    type = "slow"
    reads = (Checkpoint,)

    def wants(self, step: int, reason: str) -> bool:
        return reason == "every" and step == 2

    def write(self, item: Checkpoint) -> None:
        seen = Seen.now
        seen.threads["save"] = threading.current_thread().name
        seen.saved.append(item)
        with seen.step_reached:
            began = len(seen.records)
            seen.step_reached.wait_for(lambda: len(seen.records) >= item.step + 3, timeout=30)
            seen.steps_during_save = (began, len(seen.records))


class LookingCount(Sink):
    """Counts the batches of a pipeline without a drafter."""

    type = "counting"
    reads = (FeatureBatch,)

    def write(self, item: Any) -> None:
        """Nothing to keep."""


@hookimpl
def flowdflash_register(registry: Any) -> None:
    for cls in (LookingTarget, LookingMetrics, SlowSave, LookingCount):
        registry.register(cls)
