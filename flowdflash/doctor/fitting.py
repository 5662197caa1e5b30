"""How well weights fit rows, read in this way or in that."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flowdflash.dflash.anchors import draw_anchors
from flowdflash.dflash.config import DraftConfig
from flowdflash.dflash.head import Head, head_loss
from flowdflash.dflash.loss import auto_gamma, block_labels, leading_runs, slot_decay
from flowdflash.dflash.mask import AttentionMask, block_mask
from flowdflash.dflash.model import DFlashDraft
from flowdflash.dflash.slots import TargetView
from flowdflash.dflash.training import training_step_inputs
from flowdflash.doctor.rows import Row

ANCHORS_PER_ROW = 8

Visible = Callable[[Tensor, int], Tensor]
"""Changes who sees whom, ``[b, 1, A*B, S + A*B]``, given S."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to read the weights of a draft.

    Attributes:
        config: of the draft.
        layers: whose states are the features, in this order.
        reach: context tokens that a block sees from its anchor on.
        visible: who else sees whom.
        shift: labels are so many places later.
    """

    config: DraftConfig
    layers: tuple[int, ...]
    reach: int = 0
    visible: Visible | None = None
    shift: int = 0

    def mask(self, context: int, anchors: Tensor, keep: Tensor) -> AttentionMask:
        """Who sees whom, over ``context`` tokens."""
        size = self.config.block_size
        mask = block_mask(anchors + self.reach, keep, context=context, block_size=size, backend="sdpa")
        if self.visible is None or mask.visible is None:
            return mask
        return AttentionMask("sdpa", visible=self.visible(mask.visible, context))


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """How a reading fits: ``loss [n]`` per block, ``right`` and ``valid [n, B-1]`` per slot."""

    loss: Tensor
    right: Tensor
    valid: Tensor

    @property
    def per_slot(self) -> list[float]:
        """Share of right slots 1..B-1."""
        return (self.right.sum(dim=0) / self.valid.sum(dim=0).clamp(min=1)).tolist()

    @property
    def eal(self) -> float:
        """Teacher-forced acceptance length over blocks with a label in every slot; nan without any."""
        full = self.valid.all(dim=1)
        return 1.0 + float(leading_runs(self.right)[full].double().mean())


class Fitting:
    """A draft on some rows, with the target's states there.

    Args:
        draft, target, head: on one device, in fp32.
        rows: samples.
        layers: whose states are kept.
        seed: of the anchors.
    """

    @torch.inference_mode()
    def __init__(
        self, draft: DFlashDraft, target: Any, head: Head, rows: Sequence[Row], *, layers: Sequence[int], seed: int
    ) -> None:
        view = TargetView(target, layers)
        self.draft, self.head, self.embedding = draft, head, view.embedding
        self.rows: list[tuple[tuple[Tensor, Tensor, Tensor], dict[int, Tensor], Tensor, Tensor]] = []
        for number, row in enumerate(rows):
            ids, mask, lengths = row.tensors(view.embedding.device)
            n = len(row.ids)
            places = torch.arange(n, device=ids.device)[None]
            states = view.forward(ids, places, view.new_cache(n), n, only=places[:, -1])[1].chunk(len(layers), dim=-1)
            found = draw_anchors(row.mask[None], [n], [number], num_anchors=ANCHORS_PER_ROW, seed=seed, epoch=0)
            anchors, keep = (part.to(ids.device) for part in found)
            self.rows.append(((ids, mask, lengths), dict(zip(layers, states, strict=True)), anchors, keep))

    @torch.inference_mode()
    def fit(self, reading: Reading) -> Fit:
        """How a reading fits the blocks of all rows."""
        config, found = reading.config, []
        draft = copy.copy(self.draft)
        draft.config = config
        B = config.block_size
        weights = slot_decay(B, auto_gamma(B))[1:].to(self.embedding.device)
        for (ids, loss_mask, lengths), states, anchors, keep in self.rows:
            features = torch.cat([states[layer] for layer in reading.layers], dim=-1)
            block_ids, positions, _ = training_step_inputs(config, ids, anchors, keep)
            mask = reading.mask(ids.shape[1], anchors, keep)
            hidden = draft(nn.functional.embedding(block_ids, self.embedding), features, positions, mask)
            labels, _ = block_labels(ids.roll(-reading.shift), loss_mask, lengths, anchors, keep, block_size=B)
            _, valid = block_labels(ids, loss_mask, lengths, anchors, keep, block_size=B)
            _, ce, correct = head_loss(hidden.view(*anchors.shape, B, -1)[:, :, 1:][valid], self.head, labels[valid])
            loss = torch.zeros(valid.shape, device=ce.device).masked_scatter(valid, ce)
            right = torch.zeros_like(valid).masked_scatter(valid, correct)
            mean = (loss * weights).sum(dim=-1) / (valid * weights).sum(dim=-1)
            found.append((mean[0], right[0], valid[0]))
        return Fit(*(torch.cat(parts).cpu() for parts in zip(*found, strict=True)))
