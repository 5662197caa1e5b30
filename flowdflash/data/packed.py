"""What became of the rows of a chunk, in few large pieces: quick to send between processes and to write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flowdflash.data.align import Ids, Mask
from flowdflash.data.encode import RowResult
from flowdflash.data.rejects import Rejection
from flowdflash.items import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Samples, one after the other, and rejections of some rows.

    Attributes:
        ids: ``[tokens]`` int32 of all samples.
        mask: ``[tokens]`` bool, as long.
        notes: UTF-8 of all notes.
        lengths, note_lengths, turns, open_turns: ``[samples]`` int64.
        truncated: ``[samples]`` bool.
        samples: ``[rows]`` int64, how many each row gave.
        rejections: by the number of the row, of those that have any.
    """

    ids: Ids
    mask: Mask
    notes: bytes
    lengths: IntArray
    note_lengths: IntArray
    turns: IntArray
    open_turns: IntArray
    truncated: Mask
    samples: IntArray
    rejections: Mapping[int, tuple[Rejection, ...]]


def pack(results: Sequence[RowResult]) -> Packed:
    """The results of rows, in order."""
    samples = [sample for result in results for sample in result.samples]
    notes = [sample.note.encode() for sample in samples]
    return Packed(
        np.concatenate([np.zeros(0, np.int32), *(sample.ids for sample in samples)]),
        np.concatenate([np.zeros(0, np.bool_), *(sample.mask for sample in samples)]),
        b"".join(notes),
        np.array([len(sample.ids) for sample in samples], np.int64),
        np.array([len(note) for note in notes], np.int64),
        np.array([sample.turn for sample in samples], np.int64),
        np.array([sample.open_turns for sample in samples], np.int64),
        np.array([sample.truncated for sample in samples], np.bool_),
        np.array([len(result.samples) for result in results], np.int64),
        {number: result.rejections for number, result in enumerate(results) if result.rejections},
    )
