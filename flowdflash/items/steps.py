"""What a drafter gives: a record of each optimizer step, and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal


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
