"""Which tokens may start a block, and the draw."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowdflash.dflash.anchors import draw_anchors, valid_anchors


def mask_of(lengths: list[int], prompt: int, width: int | None = None) -> np.ndarray:
    place = np.arange(width or max(lengths))
    return (place >= prompt) & (place < np.array(lengths)[:, None])


def test_golden_example_allows_the_tail_block() -> None:
    mask = np.array([0, 0, 1, 1, 1, 1], dtype=bool)
    assert valid_anchors(mask, 6).tolist() == [2, 3, 4]


def test_padding_is_never_an_anchor_even_if_its_mask_is_set() -> None:
    assert valid_anchors(np.ones(10, dtype=bool), 4).tolist() == [0, 1, 2]


def test_d9_all_valid_positions_are_drawn_once_when_there_are_few() -> None:
    mask = mask_of([20], 5)
    for limit in (14, 15, 1000):
        anchors, keep = draw_anchors(mask, [20], [3], num_anchors=limit, seed=0, epoch=0)
        assert anchors[keep].tolist() == list(range(5, 19))


@pytest.mark.parametrize(("limit", "wanted"), [(1, [0, 1, 1]), (5, [0, 1, 5]), (1000, [0, 1, 9])])
def test_rows_with_no_one_and_nine_candidates(limit: int, wanted: list[int]) -> None:
    mask = np.zeros((3, 12), dtype=bool)
    mask[0, 11] = True
    mask[1, 4:6] = True
    mask[2, 2:12] = True
    anchors, keep = draw_anchors(mask, [12, 12, 12], [0, 1, 2], num_anchors=limit, seed=0, epoch=0)
    assert keep.sum(dim=1).tolist() == wanted
    assert anchors.shape == (3, max(wanted))


def test_a_batch_without_candidates_keeps_one_empty_slot() -> None:
    anchors, keep = draw_anchors(np.zeros((2, 8), dtype=bool), [8, 8], [0, 1], num_anchors=4, seed=0, epoch=0)
    assert anchors.shape == (2, 1) and not keep.any()


def test_fixed_slots_have_a_constant_shape() -> None:
    anchors, keep = draw_anchors(mask_of([9, 30], 5), [9, 30], [0, 1], num_anchors=16, seed=0, epoch=0, slots="fixed")
    assert anchors.shape == keep.shape == (2, 16)
    assert keep.sum(dim=1).tolist() == [3, 16]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    limit=st.integers(1, 20),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 5),
)
def test_anchors_are_distinct_sorted_valid_and_independent_of_the_batch(
    lengths: list[int], limit: int, seed: int, epoch: int
) -> None:
    mask = mask_of(lengths, 3, width=64)
    ids = list(range(100, 100 + len(lengths)))
    anchors, keep = draw_anchors(mask, lengths, ids, num_anchors=limit, seed=seed, epoch=epoch)
    for i, length in enumerate(lengths):
        row = anchors[i][keep[i]].tolist()
        valid = valid_anchors(mask[i], length).tolist()
        assert row == sorted(set(row)) and set(row) <= set(valid) and len(row) == min(limit, len(valid))
        alone, kept = draw_anchors(mask[i : i + 1], [length], [ids[i]], num_anchors=limit, seed=seed, epoch=epoch)
        assert alone[kept].tolist() == row


def test_seed_epoch_and_sample_each_change_the_draw() -> None:
    def draw(seed: int, epoch: int, sample: int) -> list[int]:
        anchors, _ = draw_anchors(mask_of([400], 5), [400], [sample], num_anchors=20, seed=seed, epoch=epoch)
        return anchors[0].tolist()

    first = draw(1, 2, 3)
    assert draw(1, 2, 3) == first
    assert all(draw(*other) != first for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3)))


def test_every_valid_position_is_equally_likely() -> None:
    counts = np.zeros(40, dtype=int)
    for sample in range(2000):
        anchors, _ = draw_anchors(mask_of([40], 10), [40], [sample], num_anchors=5, seed=0, epoch=0)
        counts[anchors[0].numpy()] += 1
    drawn = counts[10:39]
    assert counts.sum() == drawn.sum() == 10000
    # 2000 * 5 / 29 = 345 each, standard deviation 17.
    assert drawn.min() > 345 - 5 * 17 and drawn.max() < 345 + 5 * 17


def test_columns_that_describe_different_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="do not describe one batch"):
        draw_anchors(mask_of([5, 6], 1), [5, 6], [1], num_anchors=2, seed=0, epoch=0)
    with pytest.raises(ValueError, match="num_anchors"):
        draw_anchors(mask_of([5], 1), [5], [1], num_anchors=0, seed=0, epoch=0)
