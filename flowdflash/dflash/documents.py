"""A packed row: several samples, its documents, end to end without padding. None sees another."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Documents(NamedTuple):
    """Of each place asked for: the number of its document, where that begins, and where it ends (exclusive)."""

    number: Tensor
    start: Tensor
    end: Tensor


def documents(lengths: Tensor, places: Tensor) -> Documents:
    """The documents of ``places`` (any shape) in a packed row whose documents have ``lengths [n]`` tokens."""
    ends = lengths.cumsum(0)
    number = torch.bucketize(places, ends, right=True)
    return Documents(number, (ends - lengths)[number], ends[number])


def positions(lengths: Tensor, size: int) -> Tensor:
    """``[1, size]`` positions of a packed row of ``size`` tokens: they restart at each document."""
    place = torch.arange(size, device=lengths.device)[None]
    return place - documents(lengths, place).start
