"""From a planned batch to arrays of tokens, padded or packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowdflash.errors import DataInvalid, StageFailed
from flowdflash.items import BatchInfo, IntArray, TokenBatch

Fetch = Callable[[int], tuple[IntArray, NDArray[Any]]]
"""``fetch(sample_id)`` gives ``input_ids [n]`` and ``loss_mask [n]``."""


FetchRow = Callable[[int], Mapping[str, Any] | None]
"""``fetch_row(sample_id)`` gives what a person wrote, or None."""


def collate(
    info: BatchInfo, fetch: Fetch, *, source: str, pad_id: int = 0, fetch_row: FetchRow | None = None
) -> TokenBatch:
    """Fetch the samples of a batch; their rows too, where they are wanted.

    Samples are padded on the right to the longest; those of a packed batch are put end to end in one row.

    Raises:
        StageFailed: the source cannot give a sample, or gives another one than it announced; names source and sample.
    """
    shape = (1, sum(info.lengths)) if info.packed else (info.samples, max(info.lengths))
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    loss_mask = np.zeros(shape, dtype=np.bool_)
    rows: list[Mapping[str, Any]] = []
    for sample_id, place, length, supervised in zip(
        info.sample_ids, info.places, info.lengths, info.supervised, strict=True
    ):
        try:
            ids, mask = _checked(fetch(sample_id), sample_id, length, supervised)
            written = fetch_row(sample_id) if fetch_row is not None else None
        except BaseException as error:
            raise StageFailed(source, error, batch=info.seq, sample_ids=(sample_id,)) from error
        input_ids[place], loss_mask[place] = ids, mask
        if written is not None:
            rows.append(written)
    # A batch has a row for every sample or none at all: a reader pairs them by place.
    kept = tuple(rows) if len(rows) == info.samples else ()
    return TokenBatch(info, input_ids, loss_mask, np.asarray(info.lengths, dtype=np.int64), kept)


def _checked(
    sample: tuple[IntArray, NDArray[Any]], sample_id: int, length: int, supervised: int
) -> tuple[IntArray, NDArray[Any]]:
    ids, mask = np.asarray(sample[0]), np.asarray(sample[1]).astype(np.bool_)
    if ids.ndim != 1 or ids.shape != mask.shape:
        raise DataInvalid(f"sample {sample_id}: input_ids {ids.shape} and loss_mask {mask.shape} must be [n] and [n]")
    if ids.dtype.kind not in "iu":
        raise DataInvalid(f"sample {sample_id}: input_ids must be integers, got {ids.dtype}")
    if len(ids) != length:
        raise DataInvalid(f"sample {sample_id}: the source announced {length} tokens and gave {len(ids)}")
    if int(mask.sum()) != supervised:
        raise DataInvalid(
            f"sample {sample_id}: the source announced {supervised} supervised tokens and gave {int(mask.sum())}"
        )
    return ids, mask
