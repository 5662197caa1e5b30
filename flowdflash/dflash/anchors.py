"""Which response tokens start a block: the rule, and a draw that depends on seed, epoch and sample only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowdflash.dflash.documents import documents

AnchorSlots = Literal["tight", "fixed"]


def valid_anchors(loss_mask: NDArray[np.bool_], length: int) -> NDArray[np.int64]:
    """Positions of one sample that may be an anchor: the token and the one after it are real and supervised.

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
    """Draw up to ``num_anchors`` distinct anchors per sample, uniformly from the valid ones, in ascending order.

    The draw of a sample depends on ``(seed, epoch, sample_id)`` alone: not on its batch mates, the order of the batch,
    or which process asks. Samples with fewer valid positions use all of them.

    The documents of a packed row have together as many anchors as they would have alone, but each in proportion to its
    valid positions: otherwise the tokens of a long one would count for less.

    Args:
        loss_mask: ``[b, S]`` bool array, True on supervised tokens.
        lengths: ``[n]`` tokens per sample; n is b, or b is 1 and the row is packed.
        sample_ids: ``[n]`` non-negative sample ids.
        num_anchors: most anchors per sample, in a packed row on average.
        seed: seed of the run.
        epoch: 0-based epoch; another epoch draws other anchors.
        slots: ``fixed`` always gives ``num_anchors`` columns (no recompilation on a GPU); ``tight`` gives as many as
            the row with most anchors needs, at least one, and is the only choice for a packed row.

    Returns:
        ``anchors [b, A]`` int64 and ``keep [b, A]`` bool, on the CPU. Slots that hold no anchor are 0 and not kept.
    """
    mask, sizes = np.asarray(loss_mask, dtype=bool), np.asarray(lengths, dtype=np.int64)
    if num_anchors < 1:
        raise ValueError(f"num_anchors must be at least 1, got {num_anchors}")
    packed = mask.ndim == 2 and len(mask) == 1 < len(sizes) and sizes.sum() == mask.shape[1]
    if not (mask.ndim == 2 and len(sizes) == len(sample_ids) and (packed or len(mask) == len(sizes))):
        raise ValueError(
            f"loss_mask {mask.shape}, lengths {sizes.shape} and {len(sample_ids)} sample ids do not describe one batch"
        )
    if packed and slots == "fixed":
        raise ValueError("fixed slots cannot be had for a packed row: it has as many as its documents need")
    starts = np.cumsum(sizes) - sizes
    samples = np.split(mask[0], starts[1:]) if packed else mask
    valid = [valid_anchors(sample, int(length)) for sample, length in zip(samples, sizes, strict=True)]
    found = np.array([len(places) for places in valid])
    wanted = np.minimum(found, num_anchors)
    if packed:
        wanted = _in_proportion(int(wanted.sum()), found)
    rows = []
    for places, count, sample_id in zip(valid, wanted.tolist(), sample_ids, strict=True):
        if count < len(places):
            rng = np.random.default_rng((seed, epoch, int(sample_id)))
            places = np.sort(places[rng.choice(len(places), count, replace=False, shuffle=False)])
        rows.append(places)
    if packed:
        rows = [np.concatenate([places + start for places, start in zip(rows, starts, strict=True)])]
    columns = num_anchors if slots == "fixed" else max([1, *map(len, rows)])
    anchors = np.zeros((len(rows), columns), dtype=np.int64)
    keep = np.zeros((len(rows), columns), dtype=bool)
    for i, row in enumerate(rows):
        anchors[i, : len(row)], keep[i, : len(row)] = row, True
    return torch.from_numpy(anchors), torch.from_numpy(keep)


def without_anchor(anchors: Tensor, keep: Tensor, lengths: Any) -> int:
    """Samples that have no anchor, of a batch with ``lengths [n]``; ``anchors, keep`` as ``draw_anchors`` gives."""
    row = torch.arange(len(anchors))[:, None].expand_as(anchors)
    owner = row if len(lengths) == len(anchors) else documents(torch.as_tensor(lengths), anchors).number
    return len(lengths) - len(set(owner[keep].tolist()))


def _in_proportion(total: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """``total`` shared out in proportion to ``places``, whose sum is no less; the largest remainders are rounded up."""
    counts, rest = np.divmod(total * places, max(int(places.sum()), 1))
    counts[np.argsort(-rest, kind="stable")[: total - counts.sum()]] += 1
    return counts
