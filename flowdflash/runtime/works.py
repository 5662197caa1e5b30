"""What the stages that compute or write do with an item: with ``feeding``, where stages and channels meet."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import log2
from typing import Any

from flowdflash.errors import PluginBroken
from flowdflash.items import BatchInfo, Checkpoint, FeatureBatch, GeneratedBatch, StepRecord, TokenBatch
from flowdflash.runtime.channel import Channel
from flowdflash.runtime.outlets import Outlet, put_to
from flowdflash.runtime.resume import Resume, take_up
from flowdflash.runtime.turns import Turns
from flowdflash.runtime.worker import Work
from flowdflash.stage import Drafter, Generator, Sink, Stage, TargetForward

MOST_RECORDS = 256
"""Records that a checkpoint holds: a sink of records may be so far behind, in its edge and in itself, and lose none."""


class ComputeWork(Work):
    """Work of a stage that may compute on the CPU; then it takes turns with others that do."""

    def __init__(self, name: str, replica: int, stage: Stage, turns: Turns) -> None:
        super().__init__(name, replica)
        self._stage, self._turns = stage, turns

    def turn(self, waited: Callable[[], None]) -> AbstractContextManager[None]:
        """The turn of all stages on the CPU, where this is one."""
        return self._turns.turn(waited) if self._stage.on_cpu else super().turn(waited)


class ForwardWork(ComputeWork):
    """Runs the target over a batch, or lets it answer one; gradients are off."""

    def __init__(
        self,
        name: str,
        replica: int,
        stage: TargetForward | Generator,
        inbox: Channel[TokenBatch],
        outlets: Sequence[Outlet],
        settled: Callable[[int, BatchInfo], None],
        counted: Callable[[BatchInfo], None] | None,
        place: Callable[[int], int],
        turns: Turns,
    ) -> None:
        super().__init__(name, replica, stage, turns)
        self._inbox, self._outlets, self._settled, self._counted = inbox, outlets, settled, counted
        self._place = place
        self._type = stage.type
        self._call: Callable[[TokenBatch], Any] = stage.forward if isinstance(stage, TargetForward) else stage.generate
        self._expected = FeatureBatch if isinstance(stage, TargetForward) else GeneratedBatch

    def get(self) -> Any:
        """The next batch of tokens."""
        return self._inbox.get()

    def process(self, item: TokenBatch) -> Iterable[FeatureBatch | GeneratedBatch]:
        """Features or responses, checked and stamped."""
        with _gradients_off():
            made = self._call(item)
        if not isinstance(made, self._expected):
            raise PluginBroken(
                self._type, f"{self.stage!r} returned {type(made).__name__}, not {self._expected.__name__}"
            )
        if made.info.seq != item.info.seq:
            raise PluginBroken(
                self._type, f"{self.stage!r} was given batch {item.info.seq} and returned {made.info.seq}"
            )
        info = made.info.stamped(self.stage, time.monotonic())
        if isinstance(made, GeneratedBatch):
            return (replace(made, info=info),)
        if getattr(made.features, "requires_grad", False):
            raise PluginBroken(self._type, f"{self.stage!r} returned features that carry a gradient")
        return (replace(made, tokens=replace(made.tokens, info=info)),)

    def put(self, output: FeatureBatch | GeneratedBatch) -> bool:
        """Hand it on; its place is its number in what is left of the plan."""
        return put_to(self._outlets, output, self._place(output.info.seq))

    def settle(self, item: TokenBatch, wanted: bool) -> None:
        """Count it, and let the dispatcher send the next."""
        super().settle(item, wanted)
        if wanted and self._counted is not None:
            self._counted(item.info)
        self._settled(self.replica, item.info)

    def leave(self) -> None:
        """No reader gets more from this replica."""
        for outlet in self._outlets:
            outlet.finish()


class DraftWork(ComputeWork):
    """Trains, and hands records and checkpoints to the sinks."""

    def __init__(
        self,
        name: str,
        stage: Drafter,
        inbox: Channel[FeatureBatch],
        outlets: Sequence[Outlet],
        *,
        stopping: Callable[[], bool],
        retire: Callable[[], None],
        recorded: Callable[[StepRecord], None],
        turns: Turns,
        place: Callable[[int], int],
        shares: Callable[[], Mapping[str, float]],
        resume: Resume | None = None,
    ) -> None:
        super().__init__(name, 0, stage, turns)
        self._drafter, self._inbox, self._outlets, self._resume = stage, inbox, outlets, resume
        self._stopping, self._retire, self._recorded = stopping, retire, recorded
        self._place, self._shares = place, shares
        self._at_boundary = True
        self._in_records = 0
        self._recent: deque[StepRecord] = deque(maxlen=MOST_RECORDS)
        self.interrupted = self.cut_short = False

    def begin(self) -> Iterable[Any]:
        """What there is before the first batch; in a run that is resumed, the checkpoint to go on from."""
        resume, self._resume = self._resume, None
        if resume is None or resume.newest is None:
            return self._outputs(self._drafter.begin(), "begin")
        self._recent.extend(take_up(self._drafter, resume, self._outlets))
        return ()

    def turn(self, waited: Callable[[], None]) -> AbstractContextManager[None]:
        """None while a run is taken up: its sinks may need theirs before they can take what they are given."""
        return super().turn(waited) if self._resume is None else Work.turn(self, waited)

    def over(self) -> bool:
        """The drafter wants no more, or it was asked to stop and no window is open."""
        return self._drafter.done or (self._at_boundary and self._stopping())

    def get(self) -> Any:
        """The next batch of features."""
        return self._inbox.get()

    def process(self, item: FeatureBatch) -> Iterable[Any]:
        """One micro-batch."""
        self._at_boundary = False
        return self._outputs(self._drafter.step(item), "step")

    def put(self, output: StepRecord | Checkpoint) -> bool:
        """Hand it to the sinks that read it; tell the observers of a step."""
        if isinstance(output, Checkpoint):
            output = replace(output, records=tuple(self._recent))
        else:
            output = self._against_plan(output)
        wanted = put_to(self._outlets, output)
        if isinstance(output, StepRecord):
            self._at_boundary = True
            self._recent.append(output)
            self._in_records += output.batches
            self._recorded(output)
        return wanted

    def _against_plan(self, record: StepRecord) -> StepRecord:
        """The record with what the plan tells of its window: how far mix and order are from those planned."""
        shares, mix = self._shares(), {bucket: n / record.batches for bucket, n in record.buckets.items()}
        planned = bool(shares) and set(mix) <= set(shares)
        away = (abs(self._place(seq) - at) for at, seq in enumerate(record.seqs, self._in_records))
        return replace(
            record,
            window_distinct=len(mix),
            window_kl=sum(part * log2(part / shares[bucket]) for bucket, part in mix.items()) if planned else None,
            order_distance=max(away, default=0),
        )

    def settle(self, item: FeatureBatch, wanted: bool) -> None:
        """Counted at the end, when it is known which batches were trained on."""

    def finish(self) -> Iterable[Any]:
        """The end: of the data, of what the drafter wants, or at a person's request."""
        complete = self._drafter.done or self._inbox.exhausted
        self.interrupted = not complete
        self.cut_short = not self._inbox.exhausted
        if self.cut_short:
            self._retire()
        return self._outputs(self._drafter.finish("final" if complete else "interrupted"), "finish")

    def leave(self) -> None:
        """Close the books; no sink gets more."""
        self.meter.passed = self._in_records
        if self.interrupted:
            self.meter.drop("in a window that was open when the run was stopped", self.meter.taken - self._in_records)
        for outlet in self._outlets:
            outlet.finish()

    def _outputs(self, outputs: Any, method: str) -> Iterable[Any]:
        if not isinstance(outputs, Iterable):
            raise PluginBroken(self._drafter.type, f"{self.stage!r}: {method}() returned {type(outputs).__name__}")
        for output in outputs:
            if not isinstance(output, StepRecord | Checkpoint):
                raise PluginBroken(self._drafter.type, f"{self.stage!r}: {method}() gave a {type(output).__name__}")
            yield output


class SinkWork(ComputeWork):
    """Writes."""

    def __init__(
        self,
        name: str,
        stage: Sink,
        inbox: Channel[Any],
        held: set[int],
        saved: Callable[[Checkpoint], None],
        warn: Callable[[str], None],
        turns: Turns,
    ) -> None:
        super().__init__(name, 0, stage, turns)
        self._sink, self._inbox, self._held, self._saved, self._warn = stage, inbox, held, saved, warn
        self._unsaved: tuple[Checkpoint, OSError] | None = None
        self.saving = False

    @property
    def batches_done(self) -> Collection[int]:
        """As the sink says."""
        return self._sink.batches_done

    def get(self) -> Any:
        """The next item."""
        return self._inbox.get()

    def process(self, item: Any) -> Iterable[Any]:
        """Write it; tell the observers of a checkpoint."""
        self.saving = isinstance(item, Checkpoint) and self._sink.saves
        if not self.saving:
            written = self._sink.write(item)
            # What is written in pieces gives its turn up between them.
            return written if isinstance(written, Iterator) else ()
        if self._save(item):
            self._saved(item)
        return ()

    def put(self, output: None) -> bool:
        """A piece has been written; there is nothing to pass on."""
        return True

    def _save(self, item: Checkpoint) -> bool:
        """Write a checkpoint. One that cannot be written is told at once; it ends the run if it is the last."""
        if self._unsaved is not None:
            self._warn(f"{self.stage}: step {self._unsaved[0].step} was not saved; trying step {item.step}")
        try:
            if isinstance(self._sink.write(item), Iterator):
                raise PluginBroken(self._sink.type, f"{self.stage!r}: write() of a checkpoint must not be a generator")
        except OSError as error:
            self._unsaved = item, error
            self._warn(f"{self.stage}: the checkpoint of step {item.step} could not be saved: {error}")
            return False
        finally:
            self.saving = False
        self._unsaved = None
        return True

    def settle(self, item: Any, wanted: bool) -> None:
        """Count it."""
        if isinstance(item, Checkpoint):
            self._held.discard(item.step)
        if self._unsaved is not None and self._unsaved[0] is item:
            self.meter.drop("could not be saved")
        else:
            super().settle(item, wanted)

    def finish(self) -> Iterable[Any]:
        """A run whose last checkpoint could not be saved has failed."""
        if self._unsaved is not None:
            raise self._unsaved[1]
        return ()


def _gradients_off() -> AbstractContextManager[Any]:
    # Not inference_mode: its tensors may not be used by autograd, and the drafter trains on these features.
    torch = sys.modules.get("torch")
    return torch.no_grad() if torch is not None else nullcontext()
