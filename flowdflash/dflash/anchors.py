"""Which response tokens start a block: the rule, and a draw that depends on seed, epoch and sample only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

AnchorSlots = Literal["tight", "fixed"]


def valid_anchors(loss_mask: NDArray[np.bool_], length: int) -> NDArray[np.int64]:
    """Positions of one row that may be an anchor: the token and the one after it are real and supervised.

    Blocks that reach past the end are allowed; their missing slots carry no label.
    """
    mask = loss_mask[:length].astype(bool)
    return np.flatnonzero(mask[:-1] & mask[1:]).astype(np.int64)


def draw_anchors(
    loss_mask: Any,
    lengths: Any,
    sample_ids: Sequence[int],
    *,
    num_anchors: int,
    seed: int,
    epoch: int,
    slots: AnchorSlots = "tight",
) -> tuple[Tensor, Tensor]:
    """Draw up to ``num_anchors`` distinct anchors per row, uniformly from the valid ones, in ascending order.

    The draw of a row depends on ``(seed, epoch, sample_id)`` alone: not on its batch mates, the order of the batch, or
    which process asks. Rows with fewer valid positions use all of them.

    Args:
        loss_mask: ``[b, S]`` bool array, True on supervised tokens.
        lengths: ``[b]`` real tokens per row.
        sample_ids: ``[b]`` non-negative sample ids.
        num_anchors: most anchors per row.
        seed: seed of the run.
        epoch: 0-based epoch; another epoch draws other anchors.
        slots: ``fixed`` always gives ``num_anchors`` columns (no recompilation on a GPU); ``tight`` gives as many as
            the row with most anchors needs, at least one.

    Returns:
        ``anchors [b, A]`` int64 and ``keep [b, A]`` bool, on the CPU. Slots that hold no anchor are 0 and not kept.
    """
    mask, sizes = np.asarray(loss_mask, dtype=bool), np.asarray(lengths, dtype=np.int64)
    if num_anchors < 1:
        raise ValueError(f"num_anchors must be at least 1, got {num_anchors}")
    if not (mask.ndim == 2 and len(mask) == len(sizes) == len(sample_ids)):
        raise ValueError(
            f"loss_mask {mask.shape}, lengths {sizes.shape} and {len(sample_ids)} sample ids do not describe one batch"
        )
    rows = []
    for row, length, sample_id in zip(mask, sizes, sample_ids, strict=True):
        valid = valid_anchors(row, int(length))
        if len(valid) > num_anchors:
            rng = np.random.default_rng((seed, epoch, int(sample_id)))
            valid = np.sort(valid[rng.choice(len(valid), num_anchors, replace=False, shuffle=False)])
        rows.append(valid)
    columns = num_anchors if slots == "fixed" else max([1, *map(len, rows)])
    anchors = np.zeros((len(rows), columns), dtype=np.int64)
    keep = np.zeros((len(rows), columns), dtype=bool)
    for i, row in enumerate(rows):
        anchors[i, : len(row)], keep[i, : len(row)] = row, True
    return torch.from_numpy(anchors), torch.from_numpy(keep)
