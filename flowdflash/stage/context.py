"""What a stage is given: the check phase, the context that it opens with, and where it reports."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from flowdflash.errors import Problem
from flowdflash.items import IntArray


@dataclass(slots=True)
class Check:
    """What a stage sees in the check phase, and where it reports.

    Attributes:
        stage: name of the stage in the pipeline.
        facts: facts of everything upstream, merged. Names in use: ``files`` (that samples come from, absolute),
            ``tokenizer`` and ``model`` (model references), ``max_length`` (tokens), ``epochs``, ``buckets`` (count),
            ``cost_budget`` (of a batch, where there is one), ``packed`` (samples share a row), ``hidden_size``,
            ``num_layers`` (decoder layers of the target), ``layers`` (tapped layers), ``num_features`` (how many),
            ``vocab_size``, ``mask_token_id``, ``dtype``, ``replicas``, ``last_hidden`` (the target's last states are
            carried), ``block_size``, ``span`` (of a block: its anchor and drafts), ``num_anchors`` (most per sample),
            ``window`` (micro-batches per optimizer step). What cannot be known without opening a model is absent.
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
        checkpoints_in_use: steps of the checkpoints that sinks which look at them were given and are not done with.
            Whoever keeps checkpoints must not delete these: a run that is killed and resumed shows them again.
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
    checkpoints_in_use: Callable[[], Collection[int]] = tuple
    waits: Callable[[], Mapping[str, float]] = dict
    resumed_at_step: int | None = None
    made_from: Mapping[str, Any] = field(default_factory=dict)
    stopping: Callable[[], bool] = lambda: False
