"""From a planned batch to padded arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flowdflash.errors import DataInvalid, StageFailed
from flowdflash.items import BatchInfo
from flowdflash.runtime.collate import collate

INFO = BatchInfo(5, 0, 0, 1, (10, 11), (2, 4), (1, 3), 6, 8, 8.0)
SAMPLES: dict[int, tuple[Any, Any]] = {
    10: (np.array([7, 8], np.int32), np.array([0, 1])),
    11: (np.array([1, 2, 3, 4]), np.array([False, True, True, True])),
}


def test_samples_are_padded_on_the_right_and_padding_carries_no_loss() -> None:
    batch = collate(INFO, SAMPLES.__getitem__, source="corpus", pad_id=9)
    assert batch.input_ids.tolist() == [[7, 8, 9, 9], [1, 2, 3, 4]] and batch.input_ids.dtype == np.int64
    assert batch.loss_mask.tolist() == [[False, True, False, False], [False, True, True, True]]
    assert batch.loss_mask.dtype == np.bool_ and batch.lengths.tolist() == [2, 4] and batch.info is INFO
    assert batch.rows == ()


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        ((np.array([7]), np.array([1])), "announced 2 tokens and gave 1"),
        ((np.array([7, 8]), np.array([1, 1])), "announced 1 supervised tokens and gave 2"),
        ((np.array([7, 8]), np.array([1])), "must be"),
        ((np.array([7.0, 8.0]), np.array([0, 1])), "must be integers"),
    ],
)
def test_a_source_that_gives_another_sample_than_announced_is_named(sample: Any, text: str) -> None:
    with pytest.raises(StageFailed, match=text) as caught:
        collate(INFO, {**SAMPLES, 10: sample}.__getitem__, source="corpus")
    assert (caught.value.stage, caught.value.batch, caught.value.sample_ids) == ("corpus", 5, (10,))
    assert isinstance(caught.value.cause, DataInvalid) and "sample 10" in str(caught.value)


def test_a_source_that_raises_is_named_with_the_sample() -> None:
    with pytest.raises(StageFailed) as caught:
        collate(INFO, {10: SAMPLES[10]}.__getitem__, source="corpus")
    assert caught.value.sample_ids == (11,) and isinstance(caught.value.cause, KeyError)


def test_rows_travel_only_if_every_sample_has_one() -> None:
    rows = {10: {"id": "a"}, 11: {"id": "b"}}
    batch = collate(INFO, SAMPLES.__getitem__, source="corpus", fetch_row=rows.get)
    assert batch.rows == ({"id": "a"}, {"id": "b"})
    assert collate(INFO, SAMPLES.__getitem__, source="corpus", fetch_row={10: rows[10]}.get).rows == ()
