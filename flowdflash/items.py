"""What travels between stages: frozen records of numpy columns and, after the dispatcher, tensors.

Two planes. On the planning plane a ``SampleTable`` and a ``BatchTable`` describe samples and batches as columns of
numbers; nothing there holds a token. On the data plane a ``TokenBatch`` and a ``FeatureBatch`` hold tensors. A
``BatchInfo`` rides with its batch from the plan to the optimizer step, so that loss, norm and latency can be told per
bucket without a counter on the side.

Standard library and numpy only: tensors are typed ``Any`` so that planning never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class SampleTable:
    """A block of samples of one epoch, as columns of equal length n. No tokens.

    Attributes:
        epoch: 0-based pass over the data.
        ids: ``[n]`` sample ids; ``Source.tokens(id)`` fetches the tokens. Unique within an epoch.
        lengths: ``[n]`` tokens per sample, after truncation.
        supervised: ``[n]`` tokens that carry a loss.
        last: no further block follows in this epoch. A map-style source gives one block per epoch.
        anchor_cost: ``[n]`` cost of the draft's anchors of each sample, in target tokens, put in by the runtime; None
            where they cost nothing.
    """

    epoch: int
    ids: IntArray
    lengths: IntArray
    supervised: IntArray
    last: bool = True
    anchor_cost: FloatArray | None = None

    def __post_init__(self) -> None:
        if not (self.ids.shape == self.lengths.shape == self.supervised.shape and self.ids.ndim == 1):
            raise ValueError(
                f"columns of a SampleTable must be one-dimensional and of one length, got ids {self.ids.shape}, "
                f"lengths {self.lengths.shape}, supervised {self.supervised.shape}"
            )

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    def take(self, rows: IntArray) -> SampleTable:
        """The rows at the given positions, in that order."""
        cost = None if self.anchor_cost is None else self.anchor_cost[rows]
        return replace(
            self, ids=self.ids[rows], lengths=self.lengths[rows], supervised=self.supervised[rows], anchor_cost=cost
        )

    def joined(self, other: SampleTable) -> SampleTable:
        """This table followed by ``other``, without ``anchor_cost``; epoch and ``last`` are those of ``other``."""
        join = np.concatenate
        return SampleTable(
            other.epoch,
            join([self.ids, other.ids]),
            join([self.lengths, other.lengths]),
            join([self.supervised, other.supervised]),
            other.last,
        )


@dataclass(frozen=True, slots=True, eq=False)
class BatchTable:
    """Batches over one ``SampleTable``, as columns of length B (number of batches), in no particular order.

    Attributes:
        samples: the table that ``members`` points into.
        members: ``[m]`` positions in ``samples``, batch after batch.
        offsets: ``[B + 1]`` batch i holds ``members[offsets[i]:offsets[i + 1]]``.
        bucket: ``[B]`` bucket of each batch, 0-based; -1 where batches have no bucket.
        sizes, tokens, padded_tokens, supervised, min_length, max_length: ``[B]`` derived by ``build``.
        mean_length: ``[B]`` float.
        cost: ``[B]`` float, cost of the batch in target tokens; by default its padded tokens and its anchors, of which
            each row has as many as the one with most.
        packed: the samples of a batch share one row, end to end, without padding; else each has a row of its own.
    """

    samples: SampleTable
    members: IntArray
    offsets: IntArray
    bucket: IntArray
    sizes: IntArray
    tokens: IntArray
    padded_tokens: IntArray
    supervised: IntArray
    min_length: IntArray
    max_length: IntArray
    mean_length: FloatArray
    cost: FloatArray
    packed: bool = False

    @classmethod
    def build(
        cls,
        samples: SampleTable,
        groups: Sequence[IntArray],
        bucket: Sequence[int] | IntArray,
        cost: FloatArray | None = None,
        *,
        packed: bool = False,
    ) -> BatchTable:
        """A table from one array of positions in ``samples`` per batch. Padding is to the longest of the batch, if any.

        Raises:
            ValueError: a batch is empty, a position is out of range, or ``bucket`` has another length than ``groups``.
        """
        buckets = np.asarray(bucket, dtype=np.int64).reshape(-1)
        if len(buckets) != len(groups):
            raise ValueError(f"{len(groups)} batches but {len(buckets)} bucket ids")
        sizes = np.fromiter(map(len, groups), np.int64, len(groups))
        if (sizes == 0).any():
            raise ValueError(f"batch {int(np.flatnonzero(sizes == 0)[0])} has no samples")
        members = np.concatenate([*groups]).astype(np.int64) if len(groups) else np.zeros(0, np.int64)
        if len(members) and (members.min() < 0 or members.max() >= len(samples)):
            raise ValueError(f"batches point outside their table of {len(samples)} samples")
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        starts = offsets[:-1]
        lengths, supervised = samples.lengths[members], samples.supervised[members]
        empty = np.zeros(0, np.int64)
        tokens = np.add.reduceat(lengths, starts) if len(groups) else empty
        longest = np.maximum.reduceat(lengths, starts) if len(groups) else empty
        padded = tokens if packed else longest * sizes
        if cost is None:
            cost = padded.astype(np.float64)
            if samples.anchor_cost is not None and len(groups):
                each = samples.anchor_cost[members]
                cost += np.add.reduceat(each, starts) if packed else np.maximum.reduceat(each, starts) * sizes
        return cls(
            samples,
            members,
            offsets,
            buckets,
            sizes,
            tokens,
            padded,
            np.add.reduceat(supervised, starts) if len(groups) else empty,
            np.minimum.reduceat(lengths, starts) if len(groups) else empty,
            longest,
            tokens / np.maximum(sizes, 1),
            np.asarray(cost, dtype=np.float64),
            packed,
        )

    def __len__(self) -> int:
        return int(self.bucket.shape[0])

    def positions(self, batch: int) -> IntArray:
        """Positions in ``samples`` of the samples of one batch."""
        return self.members[self.offsets[batch] : self.offsets[batch + 1]]


Columns = TypeVar("Columns", SampleTable, BatchTable)


def read_only(table: Columns) -> Columns:
    """The same table with columns that cannot be written to; whoever made the table still can."""
    views: dict[str, Any] = {}
    for entry in fields(table):
        column = getattr(table, entry.name)
        if isinstance(column, np.ndarray):
            views[entry.name] = column.view()
            views[entry.name].flags.writeable = False
        elif isinstance(column, SampleTable):
            views[entry.name] = read_only(column)
    return replace(table, **views)


@dataclass(frozen=True, slots=True, eq=False)
class BatchInfo:
    """What is known of one batch; rides with it from the plan to the optimizer step. Holds no tensor.

    Attributes:
        seq: number of the batch in the run, from 0, in planned order.
        epoch: 0-based epoch.
        index: position in the epoch's plan, from 0.
        bucket: bucket id, -1 for none.
        sample_ids, lengths, supervised: one entry per sample.
        tokens, padded_tokens: real and padded token counts.
        cost: in target tokens, see ``BatchTable``.
        last_of_epoch: an accumulation window ends with this batch, whatever its size.
        packed: its samples share one row.
        version: version of the draft that made this batch, where one did; reserved for on-policy stages.
        stamps: ``time.monotonic()`` seconds at which each stage finished with the batch, by stage name.
    """

    seq: int
    epoch: int
    index: int
    bucket: int
    sample_ids: tuple[int, ...]
    lengths: tuple[int, ...]
    supervised: tuple[int, ...]
    tokens: int
    padded_tokens: int
    cost: float
    last_of_epoch: bool = False
    packed: bool = False
    version: int = 0
    stamps: Mapping[str, float] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.sample_ids)

    @property
    def places(self) -> tuple[tuple[int, slice], ...]:
        """Row and columns of each sample in the arrays of the batch."""
        if not self.packed:
            return tuple((row, slice(0, length)) for row, length in enumerate(self.lengths))
        stops = accumulate(self.lengths)
        return tuple((0, slice(stop - length, stop)) for length, stop in zip(self.lengths, stops, strict=True))

    def stamped(self, stage: str, at_secs: float) -> BatchInfo:
        """The same record with one more time stamp."""
        return replace(self, stamps={**self.stamps, stage: at_secs})


def batch_info(table: BatchTable, batch: int, *, seq: int, index: int, last_of_epoch: bool) -> BatchInfo:
    """The header of batch number ``batch`` of a table, at place ``index`` of its epoch and ``seq`` of the run."""
    where = table.positions(batch)
    samples = table.samples
    return BatchInfo(
        seq=seq,
        epoch=samples.epoch,
        index=index,
        bucket=int(table.bucket[batch]),
        sample_ids=tuple(samples.ids[where].tolist()),
        lengths=tuple(samples.lengths[where].tolist()),
        supervised=tuple(samples.supervised[where].tolist()),
        tokens=int(table.tokens[batch]),
        padded_tokens=int(table.padded_tokens[batch]),
        cost=float(table.cost[batch]),
        last_of_epoch=last_of_epoch,
        packed=table.packed,
    )


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """A batch of tokens on the host: a row per sample, right-padded, or all samples end to end in one row.

    Attributes:
        info: header of the batch; ``info.places`` says where each sample is.
        input_ids: ``[b, S]`` int64 numpy array.
        loss_mask: ``[b, S]`` bool, True where a token carries a loss; False on padding.
        lengths: ``[n]`` int64, tokens per sample; n is b unless the batch is packed.
        rows: what ``Source.row`` gives for each sample, where a generator reads; else empty.
    """

    info: BatchInfo
    input_ids: IntArray
    loss_mask: NDArray[np.bool_]
    lengths: IntArray
    rows: tuple[Mapping[str, Any], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes held by the arrays."""
        return int(self.input_ids.nbytes + self.loss_mask.nbytes + self.lengths.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class HeadProbe:
    """A few positions of the target's own output, for checking that a borrowed head is the target's (pitfall W1).

    Attributes:
        hidden: ``[n, D]`` fp32 tensor, after the target's final norm.
        logits: ``[n, V]`` fp32 tensor, the target's own logits there.
    """

    hidden: Any
    logits: Any


@dataclass(frozen=True, slots=True, eq=False)
class FeatureBatch:
    """A batch of tokens with the target's hidden states.

    Attributes:
        tokens: the batch of tokens.
        features: ``[b, S, K * D]`` tensor, outputs of the tapped layers in the order of ``layers``; no gradient.
        layers: the tapped decoder layers, 0-based, "output of layer l".
        probe: on the first batch of a replica, a sample of the target's own logits; None later.
        last_hidden: ``[b, S, D]`` tensor, the target's states after its final norm, where they are carried; else None.
    """

    tokens: TokenBatch
    features: Any
    layers: tuple[int, ...]
    probe: HeadProbe | None = None
    last_hidden: Any = None

    @property
    def info(self) -> BatchInfo:
        """Header of the batch."""
        return self.tokens.info

    @property
    def nbytes(self) -> int:
        """Bytes held by tokens and states."""
        held = [self.features] if self.last_hidden is None else [self.features, self.last_hidden]
        return int(self.tokens.nbytes + sum(t.numel() * t.element_size() for t in held))


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of a generator.

    Attributes:
        text: decoded, without the end-of-turn token.
        tokens: generated tokens, the end-of-turn token included.
        finish_reason: ``stop`` (end-of-turn token) or ``length``.
        reasoning: what was thought before the text, where a server gives it apart.
        rejected: why there is no answer, one of few reasons; empty if there is one.
        detail: what exactly was found then.
    """

    text: str
    tokens: int
    finish_reason: Literal["stop", "length"] = "stop"
    reasoning: str = ""
    rejected: str = ""
    detail: str = ""

    @property
    def complete(self) -> bool:
        """It says something and came to its own end."""
        return not self.rejected and self.finish_reason == "stop" and bool(self.text.strip())


@dataclass(frozen=True, slots=True, eq=False)
class GeneratedBatch:
    """Answers that a generator wrote for a batch of prompts.

    Attributes:
        info: header of the batch of prompts.
        answers: per sample, its answers turn by turn; one at least.
        rows: the rows of the prompts, as in ``TokenBatch``.
    """

    info: BatchInfo
    answers: tuple[tuple[Answer, ...], ...]
    rows: tuple[Mapping[str, Any], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes held by the texts."""
        return sum(len(text.encode()) for turns in self.answers for a in turns for text in (a.text, a.reasoning))


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step. Sums and counts are over the whole accumulation window, never means of means.

    Attributes:
        step: optimizer steps taken so far, this one included; from 1.
        epoch: 0-based epoch of the window.
        loss: weighted loss over the window, divided by the window's summed weights.
        loss_per_bucket: the same, per bucket of the window.
        grad_norm: gradient norm before clipping.
        grad_norm_clipped: gradient norm after clipping.
        lr: learning rate used in this step.
        batches, samples, tokens, padded_tokens: counts over the window.
        terms: loss terms (supervised draft slots) in the window.
        anchors: anchors drawn in the window.
        buckets: batches of the window per bucket id (as text, for JSON).
        length_mean, length_max: tokens per sample over the window.
        padding: share of padded tokens that hold no real token.
        accuracy: share of right draft tokens over all terms.
        accuracy_per_slot: the same per slot 1..B-1.
        step_secs: wall time of the window on the drafter's thread, waits for input excluded.
        checkpoint_pause_secs: time the drafter's thread spent copying state for a checkpoint since the last record.
        waits_secs: per edge (``from->to``), seconds its consumer waited for input since the last record.
        seqs: batch numbers of the window.
        skipped: reason if no optimizer step was taken for this window (non-finite loss or gradient), else empty.
        window_distinct: buckets in the window. This and what follows is put in by the runtime.
        window_kl: divergence of the window's mix of buckets from that of the plan, in bits; None if there is no plan.
        order_distance: most places by which a batch of the window came before or after its place in the plan.
    """

    step: int
    epoch: int
    loss: float
    loss_per_bucket: Mapping[str, float]
    grad_norm: float
    grad_norm_clipped: float
    lr: float
    batches: int
    samples: int
    tokens: int
    padded_tokens: int
    terms: int
    anchors: int
    buckets: Mapping[str, int]
    length_mean: float
    length_max: int
    padding: float
    accuracy: float
    accuracy_per_slot: tuple[float, ...]
    step_secs: float
    checkpoint_pause_secs: float
    waits_secs: Mapping[str, float]
    seqs: tuple[int, ...]
    skipped: str = ""
    window_distinct: int = 0
    window_kl: float | None = None
    order_distance: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            k: dict(v) if isinstance(v, Mapping) else list(v) if isinstance(v, tuple) else v for k, v in plain.items()
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> StepRecord:
        """The record that ``as_dict`` gave.

        Raises:
            TypeError: an entry is missing or unknown.
        """
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}
        return cls(**values)


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A snapshot of training, already copied: no tensor in it is shared with the live model.

    Attributes:
        step: optimizer steps taken when the copy was made.
        epoch: 0-based epoch.
        reason: why it was taken.
        draft_config: the exportable ``config.json`` of the draft.
        draft_tensors: tensors of the draft by name, CPU.
        state: everything else that a resume needs (optimizer, schedule, counters): tensors and plain values only.
        ledger: batch numbers that the optimizer has consumed, as ``{"prefix": n, "extras": [...]}``.
        pause_secs: time that the training thread was stopped for the copy.
        records: the last optimizer steps before it, which a sink of records may not have written yet when a run is
            killed; the runtime puts them in.
    """

    step: int
    epoch: int
    reason: Literal["start", "every", "final", "interrupted"]
    draft_config: Mapping[str, Any]
    draft_tensors: Mapping[str, Any]
    state: Mapping[str, Any]
    ledger: Mapping[str, Any]
    pause_secs: float = 0.0
    records: tuple[StepRecord, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes held by its tensors."""
        return _tensor_bytes(self.draft_tensors) + _tensor_bytes(self.state)


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, Mapping | list | tuple):
        return sum(map(_tensor_bytes, value.values() if isinstance(value, Mapping) else value))
    return int(value.numel() * value.element_size()) if hasattr(value, "element_size") else 0
