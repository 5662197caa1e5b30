"""Small stages and pipelines for the tests of the runtime: no torch, no files, no randomness of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from flowdflash.graph import Edge, Graph, Node
from flowdflash.items import (
    Answer,
    BatchInfo,
    BatchTable,
    Checkpoint,
    FeatureBatch,
    GeneratedBatch,
    SampleTable,
    StepRecord,
    TokenBatch,
)
from flowdflash.runtime.executor import execute
from flowdflash.runtime.outcome import RunOutcome
from flowdflash.runtime.plan import PlanStages, plan_window
from flowdflash.runtime.rundir import RunDir
from flowdflash.runtime.stop import StopRequest
from flowdflash.stage import (
    Bucketer,
    Drafter,
    Generator,
    Interleaver,
    OpenContext,
    SilentReport,
    Sink,
    Source,
    Stage,
    TargetForward,
)
from flowdflash.stages.pull import Pull


class Journal:
    """What the stages of one run did, in order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.entries: list[tuple[Any, ...]] = []

    def note(self, *entry: Any) -> None:
        with self._lock:
            self.entries.append(entry)

    def of(self, what: str) -> list[tuple[Any, ...]]:
        with self._lock:
            return [entry[1:] for entry in self.entries if entry[0] == what]


class Faults:
    """Raises when the n-th call of a method of a stage is due."""

    def __init__(self) -> None:
        self.planned: dict[tuple[str, str, int], BaseException] = {}
        self._counts: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()

    def at(self, stage: str, method: str, call: int, error: BaseException) -> None:
        self.planned[stage, method, call] = error

    def pass_by(self, stage: str, method: str) -> None:
        with self._lock:
            call = self._counts.get((stage, method), 0)
            self._counts[stage, method] = call + 1
        error = self.planned.get((stage, method, call))
        if error is not None:
            raise error


class Faulty(Stage):
    """Notes its life, and fails where it was told to."""

    def call(self, method: str) -> None:
        self.config.faults.pass_by(self.config.name, method)

    def open(self, ctx: Any) -> None:
        self.ctx = ctx
        self.config.journal.note("open", self.config.name, ctx.replica, threading.current_thread().name)
        self.call("open")

    def close(self) -> None:
        self.config.journal.note("close", self.config.name, threading.current_thread().name)
        self.call("close")

    def summary(self) -> dict[str, Any]:
        return {"name": self.config.name}


class FakeSource(Faulty, Source):
    type = "fake_source"

    def epochs(self) -> Iterator[SampleTable]:
        for epoch in range(self.config.epochs):
            self.call("epochs")
            lengths = np.asarray(self.config.lengths, np.int64)
            yield SampleTable(epoch, np.arange(len(lengths)), lengths, lengths)

    def tokens(self, sample_id: int) -> tuple[Any, Any]:
        self.call("tokens")
        length = self.config.lengths[sample_id]
        return np.full(length, sample_id, np.int64), np.ones(length, bool)


class FakeBucketer(Faulty, Bucketer):
    """Batches of ``batch`` neighbours; the bucket is the batch's number modulo 3."""

    type = "fake_bucketer"
    leftover_reason = "last batch not full"

    def batches(self, samples: SampleTable, rng: np.random.Generator) -> tuple[BatchTable, SampleTable | None]:
        self.call("batches")
        size, rows = self.config.batch, np.arange(len(samples))
        groups = [rows[i : i + size] for i in range(0, len(rows), size)]
        leftover = None
        if self.config.drop_last and groups and len(groups[-1]) < size:
            leftover = samples.take(groups.pop())
        return BatchTable.build(samples, groups, [i % 3 for i in range(len(groups))]), leftover


class FakeInterleaver(Faulty, Interleaver):
    type = "fake_interleaver"

    def order(self, batches: BatchTable, history: Any, rng: np.random.Generator) -> Iterator[int]:
        self.call("order")
        yield from rng.permutation(len(batches))


class FakePull(Faulty, Pull):
    def route(self, loads: Any, batch: BatchInfo) -> int | None:
        chosen = super().route(loads, batch)
        if chosen is not None:  # a batch may be asked for again and again while all replicas are full
            self.call("route")
        return chosen


@dataclass
class FakeFeatures:
    """Stands for a tensor of features."""

    bytes: int = 100
    requires_grad: bool = False

    def numel(self) -> int:
        return self.bytes

    def element_size(self) -> int:
        return 1


class FakeTarget(Faulty, TargetForward):
    type = "fake_target"

    def forward(self, batch: TokenBatch) -> FeatureBatch:
        self.call("forward")
        self.config.before(self.ctx.replica, batch)
        self.config.journal.note("forward", batch.info.seq, self.ctx.replica)
        return FeatureBatch(batch, FakeFeatures(), (0,))


class FakeGenerator(Faulty, Generator):
    type = "fake_generator"

    def generate(self, batch: TokenBatch) -> GeneratedBatch:
        self.call("generate")
        self.config.before(self.ctx.replica, batch)
        n = batch.info.samples
        return GeneratedBatch(batch.info, ((Answer("text", 1),),) * n)


class FakeDrafter(Faulty, Drafter):
    """A loss that depends on the order of all batches so far."""

    type = "fake_drafter"

    def open(self, ctx: Any) -> None:
        super().open(ctx)
        self.steps, self.value, self.window = 0, 0, []
        self.config.journal.note("plan", ctx.plan)

    def begin(self) -> Iterator[Any]:
        self.call("begin")
        if self.ctx.checkpoint_due(0, "start"):
            yield self.checkpoint("start")

    def step(self, batch: FeatureBatch) -> Iterator[Any]:
        self.call("step")
        self.config.before(batch)
        self.config.journal.note("step", self.config.name, batch.info.seq, batch.info.sample_ids)
        self.window.append(batch.info)
        self.value = (self.value * 31 + sum(batch.info.sample_ids) + 1) % 1_000_003
        if len(self.window) == self.config.accumulate or batch.info.last_of_epoch:
            yield self.record()
            if self.ctx.checkpoint_due(self.steps, "every"):
                yield self.checkpoint("every")

    def finish(self, reason: Any) -> Iterator[Any]:
        self.call("finish")
        self.config.journal.note("finish", self.config.name, reason)
        if reason == "final" and self.window:
            yield self.record()
        if self.ctx.checkpoint_due(self.steps, reason):
            yield self.checkpoint(reason)

    @property
    def done(self) -> bool:
        return bool(self.config.max_steps) and self.steps >= self.config.max_steps

    def record(self) -> StepRecord:
        infos, self.window = self.window, []
        self.steps += 1
        return make_record(self.steps, infos, float(self.value), dict(self.ctx.waits()))

    def checkpoint(self, reason: Any) -> Checkpoint:
        return Checkpoint(self.steps, 0, reason, {}, {}, {}, {})


class FakeSink(Faulty, Sink):
    type = "fake_sink"

    def write(self, item: Any) -> None:
        self.call("write")
        self.config.before(item)
        self.config.journal.note("write", self.config.name, item)

    def wants(self, step: int, reason: str) -> bool:
        self.call("wants")
        return reason in self.config.reasons


def make_record(step: int, infos: list[BatchInfo], loss: float, waits: dict[str, float]) -> StepRecord:
    buckets: dict[str, int] = {}
    for info in infos:
        buckets[str(info.bucket)] = buckets.get(str(info.bucket), 0) + 1
    return StepRecord(
        step=step,
        epoch=infos[-1].epoch,
        loss=loss,
        loss_per_bucket={},
        grad_norm=1.0,
        grad_norm_clipped=1.0,
        lr=0.1,
        batches=len(infos),
        samples=sum(info.samples for info in infos),
        tokens=sum(info.tokens for info in infos),
        padded_tokens=sum(info.padded_tokens for info in infos),
        terms=1,
        anchors=1,
        buckets=buckets,
        length_mean=1.0,
        length_max=1,
        padding=0.0,
        accuracy=0.5,
        accuracy_per_slot=(0.5,),
        step_secs=0.1,
        checkpoint_pause_secs=0.0,
        waits_secs=waits,
        seqs=tuple(info.seq for info in infos),
    )


def nothing(*_: Any) -> None:
    """Do nothing."""


KINDS: dict[str, tuple[Any, type[Stage]]] = {
    "source": ("source", FakeSource),
    "buckets": ("bucketer", FakeBucketer),
    "order": ("interleaver", FakeInterleaver),
    "dispatch": ("dispatcher", FakePull),
    "target": ("target-forward", FakeTarget),
    "generator": ("generator", FakeGenerator),
    "drafter": ("drafter", FakeDrafter),
    "other": ("drafter", FakeDrafter),
    "metrics": ("sink", FakeSink),
    "save": ("sink", FakeSink),
    "features": ("sink", FakeSink),
    "texts": ("sink", FakeSink),
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "source": {"lengths": [3] * 14, "epochs": 1},
    "buckets": {"batch": 2, "drop_last": False},
    "dispatch": {"workers": 1},
    "target": {"replicas": 1, "before": nothing},
    "generator": {"replicas": 1, "before": nothing},
    "drafter": {"accumulate": 1, "max_steps": 0, "before": nothing},
    "other": {"accumulate": 1, "max_steps": 0, "before": nothing},
    "metrics": {"before": nothing, "reasons": ()},
    "save": {"before": nothing, "reasons": ("final", "interrupted")},
    "features": {"before": nothing, "reasons": ()},
    "texts": {"before": nothing, "reasons": ()},
}
TRAINING = (
    ("source", "", "buckets", SampleTable),
    ("buckets", "", "order", BatchTable),
    ("order", "", "dispatch", BatchInfo),
    ("dispatch", "", "target", TokenBatch),
    ("target", "", "drafter", FeatureBatch),
    ("drafter", "records", "metrics", StepRecord),
    ("drafter", "checkpoints", "save", Checkpoint),
)
GENERATING = (
    ("source", "", "buckets", SampleTable),
    ("buckets", "", "dispatch", BatchTable),
    ("dispatch", "", "generator", TokenBatch),
    ("generator", "", "texts", GeneratedBatch),
)


@dataclass
class Pipeline:
    """A pipeline of fakes, and what is to be seen of it."""

    wires: tuple[tuple[str, str, str, type], ...] = TRAINING
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    classes: dict[str, type[Stage]] = field(default_factory=dict)
    capacities: dict[str, int] = field(default_factory=dict)
    capacity_bytes: dict[str, int] = field(default_factory=dict)
    seed: int = 7
    ordering: str = "plan"
    stall_secs: float = 0.0
    name: str = "fake"
    journal: Journal = field(default_factory=Journal)
    faults: Faults = field(default_factory=Faults)
    report: SilentReport = field(default_factory=SilentReport)

    @property
    def graph(self) -> Graph:
        edges = tuple(
            Edge(a, port, b, payload, self.capacities.get(b, 2), self.capacity_bytes.get(b, 0))
            for a, port, b, payload in self.wires
        )
        names = list(dict.fromkeys(name for a, _, b, _ in self.wires for name in (a, b)))
        nodes = {name: self._node(name, tuple(e for e in edges if e.target == name)) for name in names}
        windows = {n: {"window": self._config(n).accumulate} for n in names if KINDS[n][0] == "drafter"}
        return Graph(nodes, edges, windows)

    def _config(self, name: str) -> SimpleNamespace:
        values = {**DEFAULTS.get(name, {}), **self.options.get(name, {})}
        return SimpleNamespace(name=name, journal=self.journal, faults=self.faults, **values)

    def _node(self, name: str, inputs: tuple[Edge, ...]) -> Node:
        kind, cls = KINDS[name]
        cls = self.classes.get(name, cls)
        return Node(name, kind, cls.type, cls, self._config(name), inputs, {"pad_token_id": 9})

    def run(
        self,
        tmp_path: Path,
        *,
        plugins: Any = None,
        stop: StopRequest | None = None,
        on_plan: Callable[[Any], None] | None = None,
        grace_secs: float = 2.0,
    ) -> RunOutcome:
        with RunDir.create(tmp_path / "run", self.name) as run:
            return execute(
                self,
                plugins,
                run,
                report=self.report,
                stop=stop,
                cache_dir=tmp_path / "cache",
                on_plan=on_plan,
                grace_secs=grace_secs,
            )

    def written(self, sink: str, kind: type) -> list[Any]:
        return [item for name, item in self.journal.of("write") if name == sink and isinstance(item, kind)]

    def losses(self) -> list[float]:
        return [record.loss for record in self.written("metrics", StepRecord)]


def headers(graph: Graph, seed: int, folder: Path) -> list[BatchInfo]:
    """The headers of a run, worked out without running it."""
    chain = PlanStages.build(graph)
    for name, stage in chain.stages():
        stage.open(OpenContext(name, folder, folder, seed=seed, facts=graph.nodes[name].facts))
    return list(chain.planner(seed, plan_window(graph)).batches())


def threads_left() -> list[str]:
    """Threads of the runtime that are still alive."""
    return [t.name for t in threading.enumerate() if t.name.startswith("flowdflash-")]


def in_thread(action: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Start ``action`` on a thread; what it returned or raised is in the list when the thread has ended."""
    result: list[Any] = []

    def body() -> None:
        try:
            result.append(action())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread, result
