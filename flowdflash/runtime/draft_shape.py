"""What a drafter says of its work: anchors, loss terms, and what an anchor costs beside the tokens of the target."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flowdflash.graph import Graph
from flowdflash.items import BatchTable, FloatArray, IntArray, SampleTable


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Anchors per sample, slots per block, and the second term of a batch's cost; the first is its padded tokens.

    Attributes:
        num_anchors: as the drafter says.
        block_size: tokens that a block spans, the anchor included.
        every_slot: an anchor that a sample lacks is computed all the same.
        anchor_cost_tokens: target tokens that cost as much as one anchor.
        measured: that is to be measured, and 0 until it has been.
    """

    num_anchors: int
    block_size: int
    every_slot: bool = False
    anchor_cost_tokens: float = 0.0
    measured: bool = False

    @classmethod
    def of(cls, graph: Graph) -> DraftShape | None:
        """Of the first drafter; None if there is none or it does not say."""
        for node in graph.of_kind("drafter"):
            told = graph.returned.get(node.name, {})
            if {"num_anchors", "block_size"} <= set(told):
                cost = told.get("anchor_cost_tokens", 0.0)
                span = int(told.get("span", told["block_size"]))
                shape = int(told["num_anchors"]), span, told.get("anchor_slots") == "fixed"
                return cls(*shape, 0.0 if cost == "probe" else float(cost), cost == "probe")
        return None

    def anchors(self, supervised: IntArray) -> IntArray:
        """``[n]`` anchors drawn from samples with so many supervised tokens in one stretch."""
        return np.minimum(np.maximum(supervised - 1, 0), self.num_anchors)

    def computed(self, supervised: IntArray) -> IntArray:
        """``[n]`` anchors that the draft computes for such samples, each in a row of its own."""
        return np.full_like(supervised, self.num_anchors) if self.every_slot else self.anchors(supervised)

    def anchor_cost(self, samples: SampleTable) -> FloatArray | None:
        """``[n]`` cost of the anchors of each sample, in target tokens; None where they cost nothing."""
        if not self.anchor_cost_tokens:
            return None
        return np.asarray(self.anchor_cost_tokens * self.computed(samples.supervised), dtype=np.float64)

    def terms(self, table: BatchTable) -> FloatArray:
        """``[B]`` loss terms to expect, where the supervised tokens of a sample are one stretch; else there are fewer.

        Of the m places that an anchor may have, all but the last few have ``block_size - 1`` tokens after them. In a
        packed row every place is as likely to be an anchor as any other.
        """
        supervised = table.samples.supervised
        places, slots = np.maximum(supervised - 1, 0).astype(np.float64), self.block_size - 1
        short = np.minimum(places, slots)
        every = (places - short) * slots + short * (short + 1) / 2
        drawn = self.anchors(supervised).astype(np.float64)
        if table.packed:
            all_terms, chosen, of = (per_batch(table, column) for column in (every, drawn, places))
            return all_terms * chosen / np.maximum(of, 1)
        return per_batch(table, every * drawn / np.maximum(places, 1))


def per_batch(table: BatchTable, values: FloatArray) -> FloatArray:
    """``[B]`` sum over the samples of each batch of a value per sample."""
    if not len(table):
        return np.zeros(0)
    return np.asarray(np.add.reduceat(values[table.members], table.offsets[:-1]), dtype=np.float64)
