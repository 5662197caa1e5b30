"""Batches, from their header to what a target made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from flowdflash.items.tables import BatchTable, IntArray


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
