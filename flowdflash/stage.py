"""The contract of a stage: what an author writes, and what the runtime gives in return.

A stage is a class with a nested pydantic ``Config``; it is built from its config and nothing else, so class and config
can cross a process border while the object never does. A stage never sees a thread, a queue or a lock. Its life has
three phases: ``check`` (no torch; facts from configs alone), ``open`` (devices, files, models; on the thread that will
run it, one stage at a time) and run (the one method of its kind), then ``close``, called once whatever happened.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema

from flowdflash.errors import Problem
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

Kind = Literal["source", "bucketer", "interleaver", "dispatcher", "target-forward", "generator", "drafter", "sink"]
KINDS: tuple[Kind, ...] = (
    "source",
    "bucketer",
    "interleaver",
    "dispatcher",
    "target-forward",
    "generator",
    "drafter",
    "sink",
)


def path_from(folder: Path, written: str | Path) -> Path:
    """A path that is written in a file of ``folder``, absolute.

    Raises:
        ValueError: it starts with the home of nobody, or goes through a link to itself.
    """
    try:
        return (folder / Path(written).expanduser()).resolve()
    except (RuntimeError, OSError) as error:
        reason = "there is no such user" if "home" in str(error) else str(error)
        raise ValueError(f"input should be a path: {reason}") from error


def _against_base(path: Path, info: ValidationInfo) -> Path:
    base = (info.context or {}).get("base")
    return path.expanduser() if path.is_absolute() or base is None else path_from(Path(base), path)


PipelinePath = Annotated[Path, AfterValidator(_against_base)]
"""A path in a pipeline file: relative to the folder of the file that it is written in."""


def _model_ref(text: str, info: ValidationInfo) -> str:
    if text.startswith((".", "~", "/")):
        return str(_against_base(Path(text), info))
    return text


ModelRef = Annotated[str, AfterValidator(_model_ref)]
"""A model: a local folder (starts with ``.``, ``/`` or ``~``), one that flowdflash can fetch, or a Hugging Face id."""


_UNITS = {"": 1, "b": 1} | {
    f"{p}{i}b": (1024 if i else 1000) ** (n + 1) for n, p in enumerate("kmgt") for i in ("", "i")
}


def _bytes(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]{0,3})\s*", value, re.ASCII)
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError("input should be a size such as 512MB, 1.5 GiB or a number of bytes")
    return round(Fraction(found[1]) * _UNITS[found[2].lower()])


_BYTES_SCHEMA = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}], "examples": ["512MB", "4GiB"]}

Bytes = Annotated[int, BeforeValidator(_bytes), Field(ge=0), WithJsonSchema(_BYTES_SCHEMA)]
"""A number of bytes, written as ``4GiB`` (1024s), ``512MB`` (1000s), ``1.5 GiB`` or a plain number."""


class StageConfig(BaseModel):
    """Base of every ``Config``: frozen, unknown keys refused, NaN and infinity refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, protected_namespaces=()
    )


@dataclass(slots=True)
class Check:
    """What a stage sees in the check phase, and where it reports.

    Attributes:
        stage: name of the stage in the pipeline.
        facts: facts of everything upstream, merged. Names in use: ``tokenizer`` and ``model`` (model references),
            ``max_length`` (tokens), ``epochs``, ``buckets`` (count), ``cost_budget`` (of a batch, where there is one),
            ``packed`` (samples share a row), ``hidden_size``, ``num_layers`` (decoder layers of the target), ``layers``
            (tapped layers), ``num_features`` (how many), ``vocab_size``, ``mask_token_id``, ``dtype``, ``replicas``,
            ``last_hidden`` (the target's last states are carried), ``block_size``, ``span`` (of a block: its
            anchor and drafts), ``num_anchors`` (most per sample), ``window`` (micro-batches per optimizer step). What
            cannot be known without opening a model is absent.
        problems: what has been reported; ``path`` is relative to the stage.
        complete: False where a stage upstream is at fault itself, so that a fact may be missing for that reason.
    """

    stage: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    complete: bool = True

    def refuse(self, option: str, message: str, hint: str = "") -> None:
        """Report an error at an option of this stage (``""`` for the stage itself)."""
        self.problems.append(Problem(message, path=option, hint=hint))

    def warn(self, option: str, message: str, hint: str = "") -> None:
        """Report something that does not stop a run."""
        self.problems.append(Problem(message, path=option, hint=hint, severity="warning"))


class Report(Protocol):
    """Where a stage tells a person what it is doing. Safe to call from any thread."""

    def info(self, text: str) -> None:
        """One line."""

    def warn(self, text: str) -> None:
        """One line that a person should see."""

    def progress(self, what: str, done: int, total: int) -> None:
        """Long work: ``done`` of ``total``; a bar on a terminal, a line per interval elsewhere."""


class SilentReport:
    """A report that keeps its lines and prints nothing."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, text: str) -> None:
        """Keep the line."""
        self.lines.append(text)

    def warn(self, text: str) -> None:
        """Keep the line, marked."""
        self.lines.append(f"warning: {text}")

    def progress(self, what: str, done: int, total: int) -> None:
        """Drop it."""


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """Token ids that occur in a source's data: sorted, unique.

    Attributes:
        token_ids: ``[n]`` every id.
        supervised_token_ids: ``[m]`` ids that occur where a token carries a loss.
    """

    token_ids: IntArray
    supervised_token_ids: IntArray


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """What is known of a run before it starts.

    Attributes:
        epochs: passes over the data.
        batches: batches in the whole run; 0 if the source is streaming.
        steps: optimizer steps in the whole run (windows do not cross epochs); 0 if unknown.
        samples_per_epoch, tokens_per_epoch: over one epoch.
        bucket_shares: share of all batches by bucket id, as text; empty if the source is streaming.
        vocabulary: which token ids the data holds; None if the source cannot tell.
    """

    epochs: int
    batches: int
    steps: int
    samples_per_epoch: int = 0
    tokens_per_epoch: int = 0
    vocabulary: Vocabulary | None = None
    bucket_shares: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OpenContext:
    """What a stage is given when it opens.

    Attributes:
        stage: name of the stage in the pipeline.
        run_dir: folder of this run; the stage may write there under names that start with its own.
        cache_dir: the user's cache, shared between runs.
        seed: seed of the pipeline.
        facts: facts of everything upstream, as in ``Check``.
        report: where to tell a person something.
        replica, replicas: which copy of the stage this is.
        plan: known before the data plane opens; None on the planning plane.
        checkpoint_due: ``checkpoint_due(step, reason)`` is True if some sink wants a checkpoint there.
        waits: seconds that each edge's consumer has waited for input, by ``from->to``, since the run began.
        resumed_at_step: optimizer steps taken by the run that this one goes on with; None where a run begins. What a
            sink wrote of later steps in ``run_dir`` is void, since these steps come again.
        stopping: somebody has asked the run to stop.
        made_from: in a pipeline without a drafter, what decides the batches that a sink reads, and their numbers: plan,
            data, seed, and the stages that it reads from; plain values. Empty where that is not known beforehand.
    """

    stage: str
    run_dir: Path
    cache_dir: Path
    seed: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    report: Report = field(default_factory=SilentReport)
    replica: int = 0
    replicas: int = 1
    plan: PlanSummary | None = None
    checkpoint_due: Callable[[int, str], bool] = lambda step, reason: False
    waits: Callable[[], Mapping[str, float]] = dict
    resumed_at_step: int | None = None
    made_from: Mapping[str, Any] = field(default_factory=dict)
    stopping: Callable[[], bool] = lambda: False


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
        """Of a sink for checkpoints: is one wanted at this step? ``reason`` is ``start``, ``every`` or ``final``."""
        return True
