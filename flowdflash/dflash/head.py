"""The target's output head under a loss, a chunk of rows at a time: cross-entropy, or distillation from the target."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from flowdflash.errors import ModelInvalid


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The target's output head, frozen, over the whole vocabulary or over chosen rows of it.

    The head is applied in the dtype of its weight; the cross-entropy is computed in fp32.

    Attributes:
        weight: ``[n, D]`` rows of the target's head.
        ids: ``[n]`` sorted token ids of those rows; None for the whole vocabulary.
        softcap: where the target bounds its logits: ``softcap * tanh(logits / softcap)``.
    """

    weight: Tensor
    ids: Tensor | None = None
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Of normed states ``[n, D]``, in fp32 (fp64 under an fp64 head)."""
        raw = nn.functional.linear(hidden.to(self.weight.dtype), self.weight)
        raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
        return raw if self.softcap is None else self.softcap * torch.tanh(raw / self.softcap)

    def restricted(self, ids: Tensor) -> Head:
        """This head over some token ids only: a much faster softmax to train with, never to evaluate with."""
        if self.ids is not None:
            raise ModelInvalid("the head is restricted already; restrict the whole head")
        chosen = torch.unique(ids.to(self.weight.device))
        if not len(chosen) or chosen[0] < 0 or chosen[-1] >= len(self.weight):
            raise ModelInvalid(
                f"training vocabulary must be ids in 0..{len(self.weight) - 1}, got {ids.tolist()[:8]} ..."
            )
        return replace(self, weight=self.weight[chosen].detach().contiguous(), ids=chosen)

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


def _losses(logits: Tensor, label: Tensor, taught: Tensor | None, kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, cross-entropy and rightness of each row, and the slope of its loss in the logits, which are overwritten."""
    top, best = logits.max(dim=-1, keepdim=True)
    correct = (best == label)[:, 0]
    if taught is None:
        label_logit = logits.gather(1, label)
        q = logits.sub_(top).exp_()
        total = q.sum(dim=-1, keepdim=True)
        ce = (total.log() + top - label_logit)[:, 0]
        return ce, ce, correct, q.div_(total).scatter_add_(1, label, torch.full_like(top, -1.0))
    log_q, log_p = logits.log_softmax(dim=-1), taught.log_softmax(dim=-1)
    ce, p, q = -log_q.gather(1, label)[:, 0], log_p.exp(), log_q.exp()
    if kind == "kl":
        return (p * (log_p - log_q)).sum(dim=-1), ce, correct, q - p
    sign = (q - p).sign()
    distance = (q - p).abs().sum(dim=-1) / 2
    return distance, ce, correct, q * (sign - (sign * q).sum(dim=-1, keepdim=True)) / 2


class _HeadLoss(torch.autograd.Function):
    """Head and loss in one, a chunk of rows at a time: logits never exist for more than one chunk.

    The head is frozen, so each row's gradient is known as soon as its logits are: it is kept in place of the logits,
    and the backward pass neither recomputes nor stores them. Rows are independent, so chunking changes nothing.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Head, rows: Tensor, taught: Tensor | None, kind: str, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        weight, cap = head.weight, head.softcap
        with torch.autocast(hidden.device.type, enabled=False):
            want_grad = ctx.needs_input_grad[0]
            grad = torch.empty_like(hidden) if want_grad else None
            loss = torch.empty(
                len(hidden), dtype=torch.promote_types(weight.dtype, torch.float32), device=hidden.device
            )
            ce, correct = torch.empty_like(loss), torch.empty_like(loss, dtype=torch.bool)
            for at in range(0, len(hidden), chunk or max(len(hidden), 1)):
                part = slice(at, at + (chunk or len(hidden)))
                logits = head.logits(hidden[part])
                bend = None if cap is None else 1 - (logits / cap).square()
                teacher = None if taught is None else head.logits(taught[part])
                loss[part], ce[part], correct[part], slope = _losses(logits, rows[part, None], teacher, kind)
                if grad is not None:
                    slope = slope if bend is None else slope.mul_(bend)
                    grad[part] = (slope.to(weight.dtype) @ weight).to(grad.dtype)
        ctx.mark_non_differentiable(ce, correct)
        if grad is not None:
            ctx.save_for_backward(grad)
        return loss, ce, correct

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * grads[0][:, None].to(grad.dtype), None, None, None, None, None


def head_loss(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    *,
    taught: Tensor | None = None,
    kind: str = "ce",
    chunk_slots: int = 1024,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and cross-entropy of each row under a frozen head, and whether the label is its most likely token.

    Args:
        hidden: ``[n, D]`` normed draft states.
        head: no gradient flows into it.
        labels: ``[n]`` token ids.
        taught: ``[n, D]`` normed states from which the target itself chooses the label; for ``kl`` and ``tv``.
        kind: ``ce`` against the label; ``kl`` or ``tv`` (half the summed difference: the chance of a rejection)
            from the target's distribution to the draft's, over the rows of the head.
        chunk_slots: rows whose logits exist at once, 0 for all; loss and gradient do not depend on it.

    Returns:
        ``loss [n]`` in fp32, differentiable in ``hidden``, ``ce [n]`` without gradient, and ``correct [n]`` bool.

    Raises:
        ModelInvalid: the head is trainable, a label is not among its rows, or there is nothing to distil from.
    """
    if head.weight.requires_grad:
        raise ModelInvalid("the target's head must be frozen (requires_grad is set on it)")
    if kind not in ("ce", "kl", "tv"):
        raise ModelInvalid(f"loss {kind!r} is none of ce, kl and tv")
    if (kind == "ce") != (taught is None):
        raise ModelInvalid(
            f"loss {kind} {'takes no' if kind == 'ce' else 'needs the'} last hidden states of the target"
        )
    rows = head.rows_of(labels)
    out: Any = _HeadLoss.apply(hidden, head, rows, taught, kind, chunk_slots)  # type: ignore[no-untyped-call]
    loss, ce, correct = out
    return loss, ce, correct
