"""Labels, weights and the cross-entropy of block slots, as sums that add up over micro-batches and ranks.

The label of slot k of the block at anchor a is the token at a + k: the same place, no shift. Slot 0 is the anchor
itself, known and without loss. All functions here return or take tensors over the slots 1..B-1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowdflash.errors import ModelInvalid

LabelGap = Literal["cut", "keep"]
BlockWeights = Callable[[Tensor, Tensor], Tensor]
"""``(ce [b, A, B-1] detached, valid [b, A, B-1]) -> weights [b, A, B-1]``; block-local, so that no block's weight
depends on which others share its batch."""


def auto_gamma(block_size: int) -> float:
    """The decay constant published for this block size: 4 up to 8 slots, 5 up to 10, 7 beyond."""
    return 4.0 if block_size <= 8 else 5.0 if block_size <= 10 else 7.0


def slot_decay(block_size: int, gamma: float | None) -> Tensor:
    """``[B]`` weight of each slot: 0 for the anchor, 1 for slot 1, then falling by ``exp(-1 / gamma)`` per slot.

    ``gamma`` None gives all drafted slots the weight 1.
    """
    slot = torch.arange(block_size, dtype=torch.float32)
    decay = torch.ones(block_size) if gamma is None else torch.exp(-(slot - 1) / gamma)
    return decay * (slot > 0)


def decay_weights(block_size: int, gamma: float | None) -> BlockWeights:
    """Weights that depend on the slot alone."""
    decay = slot_decay(block_size, gamma)[1:]
    return lambda ce, valid: decay.to(ce.device) * valid


def block_labels(
    input_ids: Tensor,
    loss_mask: Tensor,
    lengths: Tensor,
    anchors: Tensor,
    keep: Tensor,
    *,
    block_size: int,
    label_gap: LabelGap = "cut",
) -> tuple[Tensor, Tensor]:
    """Labels ``[b, A, B-1]`` and whether each counts.

    A slot counts if its block is kept, its token is real, and the token is supervised. With ``label_gap`` ``cut`` a
    block ends at its first unsupervised token: what follows a user's turn can never be drafted from before it.
    """
    b, S = input_ids.shape
    place = anchors[..., None] + torch.arange(1, block_size, device=anchors.device)
    inside = place < lengths.to(anchors.device)[:, None, None]
    flat = place.clamp(max=S - 1).view(b, -1)
    labels = input_ids.gather(1, flat).view_as(place)
    valid = keep[..., None] & inside & loss_mask.gather(1, flat).view_as(place)
    if label_gap == "cut":
        valid = valid.long().cumprod(dim=-1).bool()
    return labels, valid


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The target's output head, frozen, over the whole vocabulary or over chosen rows of it.

    The head is applied in the dtype of its weight; the cross-entropy is computed in fp32.

    Attributes:
        weight: ``[n, D]`` rows of the target's head.
        ids: ``[n]`` sorted token ids of those rows; None for the whole vocabulary.
    """

    weight: Tensor
    ids: Tensor | None = None

    def restricted(self, ids: Tensor) -> Head:
        """This head over some token ids only: a much faster softmax to train with, never to evaluate with."""
        if self.ids is not None:
            raise ModelInvalid("the head is restricted already; restrict the whole head")
        chosen = torch.unique(ids.to(self.weight.device))
        if not len(chosen) or chosen[0] < 0 or chosen[-1] >= len(self.weight):
            raise ModelInvalid(
                f"training vocabulary must be ids in 0..{len(self.weight) - 1}, got {ids.tolist()[:8]} ..."
            )
        return Head(self.weight[chosen].detach().contiguous(), chosen)

    def rows_of(self, labels: Tensor) -> Tensor:
        """Row of each label.

        Raises:
            ModelInvalid: a label is outside the training vocabulary.
        """
        if self.ids is None:
            return labels
        rows = torch.searchsorted(self.ids, labels).clamp(max=len(self.ids) - 1)
        missing = labels[self.ids[rows] != labels]
        if len(missing):
            raise ModelInvalid(
                f"token {int(missing[0])} is a label but not in the training vocabulary of {len(self.ids)} tokens; "
                "build the vocabulary from all supervised tokens of the data"
            )
        return rows


class _HeadCrossEntropy(torch.autograd.Function):
    """Head and cross-entropy in one, a chunk of rows at a time: logits never exist for more than one chunk.

    The head is frozen, so each row's gradient is known as soon as its logits are: it is kept in place of the logits,
    and the backward pass neither recomputes nor stores them. Rows are independent, so chunking changes nothing.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, rows: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        with torch.autocast(hidden.device.type, enabled=False):
            want_grad = ctx.needs_input_grad[0]
            grad = torch.empty_like(hidden) if want_grad else None
            ce = torch.empty(len(hidden), dtype=torch.promote_types(weight.dtype, torch.float32), device=hidden.device)
            correct = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
            for at in range(0, len(hidden), chunk or max(len(hidden), 1)):
                part = slice(at, at + (chunk or len(hidden)))
                label = rows[part, None]
                logits = nn.functional.linear(hidden[part].to(weight.dtype), weight).to(ce.dtype)
                top, best = logits.max(dim=-1, keepdim=True)
                correct[part] = (best == label)[:, 0]
                label_logit = logits.gather(1, label)
                logits.sub_(top).exp_()
                total = logits.sum(dim=-1, keepdim=True)
                ce[part] = (total.log() + top - label_logit)[:, 0]
                if grad is not None:
                    probability = logits.div_(total)
                    probability.scatter_add_(1, label, torch.full_like(top, -1.0))
                    grad[part] = (probability.to(weight.dtype) @ weight).to(grad.dtype)
        ctx.mark_non_differentiable(correct)
        if grad is not None:
            ctx.save_for_backward(grad)
        return ce, correct

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * grads[0][:, None].to(grad.dtype), None, None, None


def head_cross_entropy(hidden: Tensor, head: Head, labels: Tensor, *, chunk_slots: int = 1024) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each row under a frozen head, and whether the label is its most likely token.

    Args:
        hidden: ``[n, D]`` normed draft states.
        head: no gradient flows into it.
        labels: ``[n]`` token ids.
        chunk_slots: rows whose logits exist at once, 0 for all; loss and gradient do not depend on it.

    Returns:
        ``ce [n]`` in fp32, differentiable in ``hidden``, and ``correct [n]`` bool.
    """
    if head.weight.requires_grad:
        raise ModelInvalid("the target's head must be frozen (requires_grad is set on it)")
    out: Any = _HeadCrossEntropy.apply(hidden, head.weight, head.rows_of(labels), chunk_slots)  # type: ignore[no-untyped-call]
    ce, correct = out
    return ce, correct


@dataclass(frozen=True, slots=True, eq=False)
class LossSums:
    """Sums over the slots of one or several micro-batches; never means, so that they add up.

    The loss of a window is ``num / den`` over the whole window, and so is its gradient: call ``num.backward()`` per
    micro-batch and divide the gradients by the summed ``den`` before the step (``optim.scale_gradients``).

    Attributes:
        num: weighted cross-entropy, with its graph.
        den: summed weights.
        terms: supervised slots.
        correct_per_slot, terms_per_slot: ``[B-1]`` slots whose most likely token is the label, and all that count.
        anchors: kept blocks.
        full_blocks: blocks with a label in every slot.
        run_tokens: leading right slots, summed over the full blocks.
    """

    num: Tensor
    den: Tensor
    terms: Tensor
    correct_per_slot: Tensor
    terms_per_slot: Tensor
    anchors: Tensor
    full_blocks: Tensor
    run_tokens: Tensor

    def row(self) -> Tensor:
        """What may be kept for logging, without the graph and on the same device: ``[4 + 2 (B - 1)]`` fp64.

        ``num``, ``den``, ``terms``, ``anchors``, then ``correct_per_slot``, then ``terms_per_slot``.
        """
        plain = torch.stack([self.num.detach(), self.den, self.terms, self.anchors]).double()
        return torch.cat([plain, self.correct_per_slot, self.terms_per_slot])

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})

    @property
    def loss(self) -> float:
        """Weighted mean cross-entropy; 0 where nothing is supervised."""
        return float(self.num.detach()) / float(self.den) if float(self.den) else 0.0

    @property
    def accuracy(self) -> float:
        """Share of right slots among all that count; 0 where there are none."""
        return float(self.correct_per_slot.sum()) / max(int(self.terms), 1)

    @property
    def accuracy_per_slot(self) -> tuple[float, ...]:
        """The same for each slot 1..B-1."""
        return tuple((self.correct_per_slot / self.terms_per_slot.clamp(min=1)).tolist())

    @property
    def eal(self) -> float:
        """Expected acceptance length, teacher forced: 1 + mean leading run over full blocks; nan without any.

        The product of accuracies per slot is not this number: it is biased whenever slots are correlated.
        """
        return 1.0 + float(self.run_tokens) / int(self.full_blocks) if int(self.full_blocks) else float("nan")


def leading_runs(correct: Tensor) -> Tensor:
    """Number of leading True along the last dimension: the drafts that a target would accept."""
    return correct.long().cumprod(dim=-1).sum(dim=-1)


def loss_sums(ce: Tensor, correct: Tensor, valid: Tensor, keep: Tensor, weights: BlockWeights) -> LossSums:
    """Weigh and sum the slots ``[b, A, B-1]`` of a micro-batch. Slots that do not count are 0 in ``ce``.

    Weights are taken as constants: no gradient flows through them.
    """
    with torch.no_grad():
        w = weights(ce.detach(), valid) * valid
        right = correct & valid
        full = valid.all(dim=-1) & keep
        runs = leading_runs(right)
    return LossSums(
        num=(w * ce).sum(),
        den=w.sum(),
        terms=valid.sum(),
        correct_per_slot=right.sum(dim=(0, 1)),
        terms_per_slot=valid.sum(dim=(0, 1)),
        anchors=keep.sum(),
        full_blocks=full.sum(),
        run_tokens=(runs * full).sum(),
    )
