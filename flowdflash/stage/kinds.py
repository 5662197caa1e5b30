"""The kinds of stages, each with the one method that its author writes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from flowdflash.items import (
    BatchInfo,
    BatchTable,
    Checkpoint,
    FeatureBatch,
    GeneratedBatch,
    IntArray,
    SampleTable,
    StepRecord,
    TokenBatch,
)
from flowdflash.stage.context import Check, OpenContext, Vocabulary
from flowdflash.stage.options import StageConfig

Kind = Literal["source", "bucketer", "interleaver", "dispatcher", "target-forward", "generator", "drafter", "sink"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_Class = type
"""A stage has an attribute of its own named ``type``."""


class Stage:
    """Base of all stages. Authors derive from one of the kinds below, never from this.

    Attributes:
        kind: which of the kinds it is.
        type: name in the registry; what ``type:`` in a pipeline says.
        reads: payload class of the input.
        writes: payload class per output port; the port named ``""`` is what a bare ``inputs: name`` reads.
        safe_to_change: options that may have another value when a run is resumed, since no weight depends on them.
    """

    kind: ClassVar[Kind]
    type: ClassVar[str]
    reads: ClassVar[tuple[_Class, ...]] = ()
    writes: ClassVar[Mapping[str, _Class]] = {}
    safe_to_change: ClassVar[frozenset[str]] = frozenset()

    class Config(StageConfig):
        """No options."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def replicas(self) -> int:
        """How many copies of this stage run at once, each on its own thread."""
        return int(getattr(self.config, "replicas", 1))

    @property
    def on_cpu(self) -> bool:
        """Asked after ``open``: does it compute on the CPU, with all cores? Such stages take turns."""
        return False

    def check(self, check: Check) -> Mapping[str, Any]:
        """Look at config and upstream facts, report problems, return facts for the stages downstream."""
        return {}

    def open(self, ctx: OpenContext) -> None:
        """Take hold of devices, files and models."""

    def close(self) -> None:
        """Let go of everything. Called once after ``open`` was tried, whatever happened since."""

    def state(self) -> Mapping[str, Any]:
        """Progress worth keeping: tensors and plain values only."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up progress that ``state`` gave."""

    def summary(self) -> Mapping[str, Any]:
        """What a person wants to read of this stage when the run has ended; plain values, units in names."""
        return {}


class Source(Stage):
    """Knows how many samples there are and how long each is; fetches tokens on demand."""

    kind = "source"
    writes: ClassVar[Mapping[str, type]] = {"": SampleTable}
    streaming: ClassVar[bool] = False
    """True if the number of samples is not known before they have been read."""

    def epochs(self) -> Iterator[SampleTable]:
        """One table per block, epoch after epoch; the last block of an epoch says so."""
        raise NotImplementedError

    def tokens(self, sample_id: int) -> tuple[IntArray, np.ndarray[Any, Any]]:
        """``input_ids [n]`` and ``loss_mask [n]`` (bool) of one sample. Called from several threads at once."""
        raise NotImplementedError

    def row(self, sample_id: int) -> Mapping[str, Any] | None:
        """What a person wrote: ``messages`` of a prompt, and what else its row holds; None where there is no such row.

        Travels with batches to a generator, so that a response can be written down next to its prompt. Called from
        several threads at once.
        """
        return None

    def describe(self, sample_id: int) -> str:
        """Where a sample comes from, for a person."""
        return f"sample {sample_id}"

    def vocabulary(self) -> Vocabulary | None:
        """Which token ids occur in the data, or None where that is not known before all of it has been read."""
        return None


class Bucketer(Stage):
    """Groups samples into batches: a pure function on columns."""

    kind = "bucketer"
    reads = (SampleTable,)
    writes: ClassVar[Mapping[str, type]] = {"": BatchTable}
    leftover_reason: ClassVar[str] = "no full batch at the end of the epoch"
    """Why samples that are left over at the end of an epoch are not trained on; they are counted under it."""

    def batches(self, samples: SampleTable, rng: np.random.Generator) -> tuple[BatchTable, SampleTable | None]:
        """Batches over ``samples``, and the samples to hold back for the next block.

        Every sample is in exactly one batch or in the leftover; the runtime checks it. What is left over from the last
        block of an epoch is counted as dropped.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """What an interleaver may know besides the batches.

    Attributes:
        window: micro-batches per optimizer step.
        buckets: ``[t]`` buckets of the batches already ordered in this epoch.
    """

    window: int = 1
    buckets: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))


class Interleaver(Stage):
    """Puts batches into order: a pure function on columns."""

    kind = "interleaver"
    reads = (BatchTable,)
    writes: ClassVar[Mapping[str, type]] = {"": BatchInfo}

    def order(self, batches: BatchTable, history: History, rng: np.random.Generator) -> Iterable[int]:
        """Indices into ``batches``, each exactly once; an array or a generator. The runtime checks it."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What a dispatcher may know of one replica.

    Attributes:
        replica: its number.
        outstanding: batches handed to it and not finished, the one in work included.
        outstanding_cost: their summed cost.
        capacity: most batches it may have outstanding.
        dispatched: batches handed to it so far.
    """

    replica: int
    outstanding: int
    outstanding_cost: float
    capacity: int
    dispatched: int

    @property
    def full(self) -> bool:
        """It can take no batch now."""
        return self.outstanding >= self.capacity


class Dispatcher(Stage):
    """Decides which replica gets the next batch. Called under one lock: a policy cannot race."""

    kind = "dispatcher"
    reads = (BatchInfo, BatchTable)
    writes: ClassVar[Mapping[str, type]] = {"": TokenBatch}

    def route(self, loads: Sequence[ReplicaLoad], batch: BatchInfo) -> int | None:
        """The replica for ``batch``, or None to be asked again when a load has changed.

        If the replica named is full, the batch, and all behind it, wait for it.
        """
        raise NotImplementedError


class TargetForward(Stage):
    """Runs the frozen target over a batch and keeps the outputs of the tapped layers."""

    kind = "target-forward"
    reads = (TokenBatch,)
    writes: ClassVar[Mapping[str, type]] = {"": FeatureBatch}

    def forward(self, batch: TokenBatch) -> FeatureBatch:
        """Features of a batch. Gradients are off on the calling thread."""
        raise NotImplementedError


class Generator(Stage):
    """Lets the target answer a batch of prompts."""

    kind = "generator"
    reads = (TokenBatch,)
    writes: ClassVar[Mapping[str, type]] = {"": GeneratedBatch}

    def generate(self, batch: TokenBatch) -> GeneratedBatch:
        """Responses to a batch of prompts."""
        raise NotImplementedError


class Drafter(Stage):
    """Owns draft, optimizer, schedule and accumulation window."""

    kind = "drafter"
    reads = (FeatureBatch,)
    writes: ClassVar[Mapping[str, type]] = {"records": StepRecord, "checkpoints": Checkpoint}

    def begin(self) -> Iterable[StepRecord | Checkpoint]:
        """Called once before the first batch: a checkpoint of the untrained draft, if some sink wants one."""
        return ()

    def step(self, batch: FeatureBatch) -> Iterable[StepRecord | Checkpoint]:
        """Take in one micro-batch; a record when it completes an optimizer step, a checkpoint where one is due."""
        raise NotImplementedError

    def finish(self, reason: Literal["final", "interrupted"]) -> Iterable[StepRecord | Checkpoint]:
        """The end of the run. ``final`` closes an open window; ``interrupted`` drops it, as if never seen."""
        raise NotImplementedError

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint of this drafter, as if training had never stopped. Called once, after ``begin``.

        What comes next is the plan without the batches of the checkpoint's ledger.
        """
        raise NotImplementedError(f"drafter {self.type!r} cannot resume a run")

    @property
    def done(self) -> bool:
        """No further batch is wanted (a step limit is reached)."""
        return False


class Sink(Stage):
    """Takes items and writes them somewhere."""

    kind = "sink"
    saves: ClassVar[bool] = True
    """Of a sink for checkpoints: one is on disk when ``write`` returns. False of a sink that only looks at them."""

    def write(self, item: Any) -> Iterator[None] | None:
        """Take one item. What takes long may be a generator: at each ``yield`` other stages on the CPU get their turn.

        Such a sink does not save checkpoints. It should end early once the context says ``stopping``.
        """
        raise NotImplementedError

    @property
    def last_step(self) -> int | None:
        """Of a sink for records in a run that is resumed: the last step that it has; None if it cannot tell.

        Records that a killed run had not brought to it before the checkpoint are given to it first.
        """
        return None

    @property
    def batches_done(self) -> Collection[int]:
        """In a pipeline without a drafter, asked after ``open``: numbers of batches that it has from an earlier run.

        What all sinks have is not run again. A pipeline whose sinks say so can be resumed.
        """
        return ()

    def wants(self, step: int, reason: str) -> bool:
        """Of a sink for checkpoints: is one wanted at this step?

        ``reason`` is ``start``, ``every``, ``final`` or ``interrupted``. Asked more than once about a step.
        """
        return True
