"""Bucketer ``optimal``: bucket edges that cost least, by dynamic programming."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from pydantic import Field

from flowdflash.batching import BatchSize, BudgetBucketer, BudgetOptions, bucketed, optimal_edges
from flowdflash.items import BatchTable, IntArray, SampleTable
from flowdflash.stage import Bucketer, Check


class OptimalBucketer(BudgetBucketer, Bucketer):
    """Groups samples of like length into buckets whose edges waste least padding, or make fewest batches.

    Edges are multiples of ``grid``, found by dynamic programming over the lengths there are: no other edges on the grid
    are better. Where the source is streaming, they are worked out per block.
    """

    type = "optimal"

    class Config(BudgetOptions):
        """Options of the optimal bucketer."""

        buckets: int = Field(6, ge=1, description="most buckets")
        grid: int = Field(32, ge=1, description="edges are multiples of so many tokens")
        minimise: Literal["padding", "batches"] = Field(
            "padding", description="what the edges make least: padding up to the edge, or the number of batches"
        )
        batch_size: BatchSize = "fixed"

    def __init__(self, config: OptimalBucketer.Config) -> None:
        super().__init__(config)
        self._edges: tuple[int, ...] = ()

    def check(self, check: Check) -> Mapping[str, Any]:
        """The longest sample that can come fits the budget."""
        if self.config.cost_budget and self.config.minimise == "batches":
            check.refuse("minimise", "edges of fewest batches are not known under a cost_budget", "minimise padding")
        return super().check(check)

    def _made(self, samples: SampleTable, keep: IntArray, rng: np.random.Generator) -> tuple[BatchTable, IntArray]:
        config = self.config
        edges = optimal_edges(
            samples.lengths[keep],
            config.buckets,
            grid=config.grid,
            budget=config.token_budget,
            minimise=config.minimise,
        )
        self._edges = tuple(edges.tolist())
        return bucketed(samples, keep, edges, config, config.batch_size, rng)

    def summary(self) -> Mapping[str, Any]:
        """Of the last epoch: counts and lengths per bucket, how full batches are, what was left out; its edges."""
        return {**super().summary(), "edges": list(self._edges)}
