"""From a graph to channels, dispatchers and threads, and the two ways to shut them: fail, or retire."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from queue import SimpleQueue
from typing import Any

from flowdflash.errors import PipelineInvalid, Problem, StageFailed
from flowdflash.graph import Edge, Graph, Node
from flowdflash.items import BatchInfo, Checkpoint, StepRecord
from flowdflash.runtime.channel import Channel, OrderedChannel
from flowdflash.runtime.collate import collate
from flowdflash.runtime.dispatch import Dispatch
from flowdflash.runtime.feeding import DispatchWork, PlanWork
from flowdflash.runtime.ledger import NOTHING, Ledger
from flowdflash.runtime.observers import Observers, Tally
from flowdflash.runtime.outlets import Outlet
from flowdflash.runtime.plan import PlanStages, build, plan_window, window_of
from flowdflash.runtime.resume import Resume
from flowdflash.runtime.stop import StopRequest
from flowdflash.runtime.turns import Turns
from flowdflash.runtime.worker import Worker
from flowdflash.runtime.works import DraftWork, ForwardWork, SinkWork
from flowdflash.stage import Dispatcher, Drafter, Generator, PlanSummary, Report, Sink, Stage, TargetForward

PLANNING = ("source", "bucketer", "interleaver")
FEEDING = (*PLANNING, "dispatcher", "target-forward", "generator")
REPLICATED = ("target-forward", "generator")


class Wiring:
    """Everything that a run is made of.

    Attributes:
        workers: the threads, in the order in which they open.
        plan: what the plan came to, set before the data plane opens.
        failures: what has failed, the first first.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        seed: int,
        ordering: str,
        replies: SimpleQueue[Any],
        stop: StopRequest,
        report: Report,
        observers: Observers,
        resume: Resume | None = None,
    ) -> None:
        if ordering not in ("plan", "arrival"):
            raise PipelineInvalid([Problem(f"ordering must be plan or arrival, got {ordering!r}", path="ordering")])
        _check_shape(graph)
        self.resume, self._ledger = resume, resume.ledger if resume else NOTHING
        self.graph, self.replies, self.stop, self.report, self.observers = graph, replies, stop, report, observers
        self.plan = PlanSummary(0, 0, 0)
        self.failures: list[StageFailed] = []
        self.tally = Tally()
        self.tally.steps = resume.step if resume else 0
        self._lock = threading.Lock()
        self._retired: set[str] = set()
        self._ordered = ordering == "plan"
        self.plan_stages = PlanStages.build(graph)
        self.planner = self.plan_stages.planner(seed, plan_window(graph), self._ledger)
        self._built: dict[str, list[Stage]] = {}
        self.channels: dict[str, list[Channel[Any]]] = {}
        self._turns = Turns()
        self._inboxes: dict[str, list[Channel[Any]]] = {}
        self._dispatches: dict[str, Dispatch] = {}
        self._data_nodes = [node for node in graph.nodes.values() if node.kind not in PLANNING]
        for node in self._data_nodes:
            self._built[node.name] = [build(node) for _ in range(replicas_of(node))]
            self._inboxes[node.name] = self._make_inboxes(node)
        self._held: dict[str, set[int]] = {node.name: set() for node in self._data_nodes}
        self.workers: list[Worker] = []
        self._start_threads()

    def checkpoint_due(self, name: str, step: int, reason: str) -> bool:
        """Some sink wants a checkpoint of this drafter there."""
        return any(o.wants(step, reason) for o in self._outlets(name) if issubclass(Checkpoint, o.payload))

    def checkpoints_in_use(self) -> set[int]:
        """Steps of the checkpoints that sinks which look at them were given and are not done with."""
        sinks = ((name, stage) for name, (stage, *_) in self._built.items() if isinstance(stage, Sink))
        return set().union(*(self._held[name].copy() for name, sink in sinks if not sink.saves))

    def leave_out(self, done: Ledger) -> None:
        """Before the run: batches that need not be run again."""
        self._ledger = self.planner.skip = done

    def waits(self) -> Mapping[str, float]:
        """Per edge, seconds that its readers have waited for input."""
        return {name: sum(c.stats().get_wait_secs for c in group) for name, group in self.channels.items()}

    def fail(self, failure: StageFailed) -> None:
        """Note a failure; the first one ends the run. From any thread."""
        with self._lock:
            self.failures.append(failure)
            first = len(self.failures) == 1
        if first:
            self.abort(failure, drain=True)
        failure.locate(self.plan_stages.source.describe)

    def abort(self, error: BaseException, *, drain: bool = False) -> None:
        """Wake every thread with an error; with ``drain``, sinks that keep things first write what they were given."""
        for name, group in self._inboxes.items():
            keeps = any(isinstance(stage, Sink) and stage.saves for stage in self._built[name])
            for channel in group:
                channel.abort(error, drain=drain and keeps)
        for dispatch in self._dispatches.values():
            dispatch.abort(error)
        self._turns.abort(error)

    def retire(self, name: str) -> None:
        """A stage reads no more; neither does any stage whose readers have all retired."""
        with self._lock:
            waiting = [name]
            while waiting:
                here = waiting.pop()
                if here in self._retired:
                    continue
                self._retired.add(here)
                for channel in self._inboxes.get(here, ()):
                    channel.cancel()
                if here in self._dispatches:
                    self._dispatches[here].cancel()
                for edge in self.graph.nodes[here].inputs:
                    if all(reader.target in self._retired for reader in self.graph.outputs(edge.source)):
                        waiting.append(edge.source)

    def retire_feeders(self) -> None:
        """Everything before the drafters and sinks reads no more."""
        for node in self.graph.nodes.values():
            if node.kind in FEEDING:
                self.retire(node.name)

    def interrupt_drafters(self) -> None:
        """A drafter that waits for input stops waiting."""
        for node in self.graph.of_kind("drafter"):
            for channel in self._inboxes[node.name]:
                channel.interrupt()

    def _make_inboxes(self, node: Node) -> list[Channel[Any]]:
        """One channel per replica of a reader; several edges into a sink share one."""
        name = " + ".join(edge.name for edge in node.inputs)
        capacity = sum(edge.capacity for edge in node.inputs)
        limits = [edge.capacity_bytes for edge in node.inputs]
        limit = sum(limits) if all(limits) else 0
        producers = sum(self._threads_of(self.graph.nodes[edge.source]) for edge in node.inputs)
        feeder = self.graph.nodes[node.inputs[0].source]
        free = window_of(self.graph, node.name) if node.kind == "drafter" else 0
        kind: type[Channel[Any]] = Channel
        if feeder.kind == "dispatcher":
            kind = OrderedChannel
        elif feeder.kind in REPLICATED and len(node.inputs) == 1 and self._ordered:
            kind = OrderedChannel
            # One replica delivers in order by itself; several get a reorder buffer that none of them can outrun.
            capacity = max(capacity, 4 * producers) if producers > 1 else capacity
        made = [kind(name, capacity, limit, producers=producers, free_items=free) for _ in range(replicas_of(node))]
        self.channels[name] = made
        return made

    def _threads_of(self, node: Node) -> int:
        if node.kind in PLANNING:
            return 1
        return dispatch_threads(node) if node.kind == "dispatcher" else replicas_of(node)

    def _outlets(self, name: str) -> list[Outlet]:
        outlets = []
        for edge in self.graph.outputs(name):
            reader = self.graph.nodes[edge.target]
            stage = self._built[edge.target][0] if reader.kind == "sink" else None
            sink = stage if isinstance(stage, Sink) else None
            # Whatever the edge's class says, what leaves the planning plane is headers.
            payload = BatchInfo if self.graph.nodes[name].kind in PLANNING else edge.payload
            outlets.append(Outlet(payload, self._inboxes[edge.target][0], edge.target, sink, self._held[edge.target]))
        return outlets

    def _start_threads(self) -> None:
        names = self.plan_stages.names
        last = names.interleaver or names.bucketer
        plan_work = PlanWork(last, self.planner, self._outlets(last))
        self.workers.append(Worker(plan_work, self.plan_stages.stages(), self.replies, feeds=True))
        for node in self._data_nodes:
            if node.kind == "dispatcher":
                self._start_dispatcher(node)
            else:
                for replica, stage in enumerate(self._built[node.name]):
                    work = self._work(node, replica, stage)
                    self.workers.append(Worker(work, [(node.name, stage)], self.replies, feeds=False))

    def _start_dispatcher(self, node: Node) -> None:
        (edge,) = self.graph.outputs(node.name)
        (policy,) = self._built[node.name]
        assert isinstance(policy, Dispatcher)
        channels = self._inboxes[edge.target]
        (plan,) = self._inboxes[node.name]
        dispatch = Dispatch(policy, node.name, plan, len(channels), edge.capacity + 1)
        self._dispatches[node.name] = dispatch
        source = self.plan_stages.source
        fill = partial(
            collate,
            fetch=source.tokens,
            source=self.plan_stages.names.source,
            pad_id=int(node.facts.get("pad_token_id") or 0),
            fetch_row=source.row if self.graph.nodes[edge.target].kind == "generator" else None,
        )
        for number in range(dispatch_threads(node)):
            work = DispatchWork(node.name, number, dispatch, fill, channels)
            # The policy is opened and closed once, on the first of its threads.
            self.workers.append(Worker(work, [(node.name, policy)] if number == 0 else [], self.replies, feeds=True))

    def _work(self, node: Node, replica: int, stage: Stage) -> ForwardWork | DraftWork | SinkWork:
        inbox, name = self._inboxes[node.name][replica], node.name
        if isinstance(stage, TargetForward | Generator):
            counted = None if self.graph.of_kind("drafter") else self._count_batch
            settled = self._dispatches[node.inputs[0].source].settle
            return ForwardWork(
                name,
                replica,
                stage,
                inbox,
                self._outlets(name),
                settled,
                counted,
                lambda seq: self._ledger.place(seq),
                self._turns,
            )
        if isinstance(stage, Drafter):
            return DraftWork(
                name,
                stage,
                inbox,
                self._outlets(name),
                stopping=lambda: self.stop.requested,
                retire=lambda: self.retire(name),
                recorded=lambda record: self._count_step(name, record),
                turns=self._turns,
                place=lambda seq: self._ledger.place(seq),
                shares=lambda: self.plan.bucket_shares,
                resume=self.resume,
            )
        assert isinstance(stage, Sink)
        return SinkWork(name, stage, inbox, self._held[name], self._saved, self.report.warn, self._turns)

    def _saved(self, checkpoint: Checkpoint) -> None:
        self.observers.tell("flowdflash_checkpoint_saved", checkpoint=checkpoint)

    def _count_step(self, name: str, record: StepRecord) -> None:
        if name == self.graph.of_kind("drafter")[0].name:
            self.tally.add_record(record)
        self.observers.tell("flowdflash_step", record=record)

    def _count_batch(self, info: BatchInfo) -> None:
        self.report.progress("batches", len(self._ledger) + self.tally.add_batch(info), self.plan.batches)


def replicas_of(node: Node) -> int:
    """Copies of a stage that run at once."""
    return int(getattr(node.config, "replicas", 1)) if node.kind in REPLICATED else 1


def dispatch_threads(node: Node) -> int:
    """Threads that fetch tokens for a dispatcher."""
    return int(getattr(node.config, "workers", 1))


def _check_shape(graph: Graph) -> None:
    """What the runtime can run, beyond what the types of the edges already say.

    Raises:
        PipelineInvalid: it cannot run this graph.
    """
    problems: list[Problem] = []

    def refuse(node: Node, message: str, hint: str = "") -> None:
        problems.append(Problem(message, path=f"stages.{node.name}", hint=hint))

    for node in graph.nodes.values():
        edges: tuple[Edge, ...] = graph.outputs(node.name)
        readers = [graph.nodes[edge.target].kind for edge in edges]
        if node.kind != "source" and not node.inputs:
            refuse(node, f"a {node.kind} needs an input")
        if node.kind != "sink" and len(node.inputs) > 1:
            refuse(node, f"a {node.kind} reads one input, this one has {len(node.inputs)}")
        if node.kind == "dispatcher" and (len(readers) != 1 or readers[0] not in REPLICATED):
            refuse(node, "a dispatcher feeds exactly one target-forward or generator stage")
        if node.kind in ("source", "bucketer") and "sink" in readers:
            refuse(node, f"a sink cannot read a {node.kind}", "read the interleaver instead")
        if node.kind in ("drafter", "sink") and int(getattr(node.config, "replicas", 1)) != 1:
            refuse(node, f"a {node.kind} runs as one replica")
    if problems:
        raise PipelineInvalid(problems)
