"""Labels and weights of block slots, and their loss as sums that add up over micro-batches and ranks.

The label of slot k of the block at anchor a is the token at a + k: the same place, no shift. Slot 0 is the anchor
itself, known and without loss. All functions here return or take tensors over the slots 1..B-1, and so over the drafts
1..B-1 of any block: where its anchor's slot drafts too, B is one more than its slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowdflash.dflash.documents import documents

LabelGap = Literal["cut", "keep"]
BlockWeights = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(ce, correct, valid) -> weights``, all ``[b, A, B-1]``, ``ce`` detached; block-local, so that no block's weight
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
    return lambda ce, correct, valid: decay.to(ce.device) * valid


def dpace_weights(alpha: float = 0.5) -> BlockWeights:
    """D-PACE: what the expected length of the accepted run gains by a slot, as the draft stands now.

    With ``q`` the draft's probability of the label, ``s = (1 - alpha) q + alpha`` and ``C_k`` the product of ``s`` up
    to slot k, slot k weighs the sum of ``C`` from k on. Slots that do not count neither shorten a run nor add to it.
    """

    def weights(ce: Tensor, correct: Tensor, valid: Tensor) -> Tensor:
        kept = ((1 - alpha) * torch.exp(-ce) + alpha).masked_fill(~valid, 1.0).cumprod(dim=-1) * valid
        return kept.flip(-1).cumsum(dim=-1).flip(-1) * valid

    return weights


def auf_weights(ce: Tensor, correct: Tensor, valid: Tensor) -> Tensor:
    """AUF: all slots up to the first that the draft gets wrong now, that one included, weigh 1; the rest nothing."""
    wrong = (valid & ~correct).long()
    return ((wrong.cumsum(dim=-1) - wrong == 0) & valid).to(ce.dtype)


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

    A slot counts if its block is kept, its token is real and of the anchor's sample, and supervised. With ``label_gap``
    ``cut`` a block ends at its first unsupervised token: what follows a user's turn cannot be drafted from before it.
    """
    b, S = input_ids.shape
    place = anchors[..., None] + torch.arange(1, block_size, device=anchors.device)
    lengths = lengths.to(anchors.device)
    ends = lengths[:, None] if len(lengths) == b else documents(lengths, anchors).end
    inside = place < ends[..., None]
    flat = place.clamp(max=S - 1).view(b, -1)
    labels = input_ids.gather(1, flat).view_as(place)
    valid = keep[..., None] & inside & loss_mask.gather(1, flat).view_as(place)
    if label_gap == "cut":
        valid = valid.long().cumprod(dim=-1).bool()
    return labels, valid


@dataclass(frozen=True, slots=True, eq=False)
class LossSums:
    """Sums over the slots of one or several micro-batches; never means, so that they add up.

    The loss of a window is ``num / den`` over the whole window, and so is its gradient: call ``num.backward()`` per
    micro-batch and divide the gradients by the summed ``den`` before the step (``optim.scale_gradients``).

    Attributes:
        num: weighted loss, with its graph.
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
        """Weighted mean loss; 0 where nothing is supervised."""
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


def loss_sums(
    loss: Tensor, ce: Tensor, correct: Tensor, valid: Tensor, keep: Tensor, weights: BlockWeights
) -> LossSums:
    """Weigh and sum the slots ``[b, A, B-1]`` of a micro-batch. Slots that do not count are 0 in ``loss`` and ``ce``.

    Weights are taken as constants: no gradient flows through them.
    """
    with torch.no_grad():
        w = weights(ce.detach(), correct, valid) * valid
        right = correct & valid
        full = valid.all(dim=-1) & keep
        runs = leading_runs(right)
    return LossSums(
        num=(w * loss).sum(),
        den=w.sum(),
        terms=valid.sum(),
        correct_per_slot=right.sum(dim=(0, 1)),
        terms_per_slot=valid.sum(dim=(0, 1)),
        anchors=keep.sum(),
        full_blocks=full.sum(),
        run_tokens=(runs * full).sum(),
    )
