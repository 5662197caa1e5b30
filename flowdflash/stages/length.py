"""Bucketer ``length``: samples of like length together, under a budget of padded tokens per batch."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from flowdflash.batching import (
    BatchSize,
    BudgetBucketer,
    BudgetOptions,
    bucketed,
    check_budget,
    complaint,
    equal_token_edges,
    over_budget,
)
from flowdflash.errors import DataInvalid
from flowdflash.items import BatchTable, IntArray, SampleTable
from flowdflash.stage import Bucketer, Check


class LengthBucketer(BudgetBucketer, Bucketer):
    """Groups samples of like length into batches under a budget of padded tokens.

    A sample goes to the first bucket whose edge is not below its length. Within a bucket samples are permuted, so that
    batches differ between epochs. Where the source is streaming, edges from ``buckets`` are worked out per block.
    """

    type = "length"
    leftover_reason = "longer than the last edge or the budget, or no full batch at the end of the epoch"

    class Config(BudgetOptions):
        """Options of the length bucketer."""

        edges: tuple[int, ...] = Field((), description="upper bound of each bucket in tokens, rising; none: `buckets`")
        buckets: int = Field(6, ge=1, description="number of buckets of equal token counts, where `edges` is not given")
        batch_size: BatchSize = "fixed"
        over_long: Literal["error", "drop"] = Field("error", description="what to do with samples above the last edge")

        @model_validator(mode="after")
        def _one_way_to_say_edges(self) -> LengthBucketer.Config:
            if self.edges and "buckets" in self.model_fields_set:
                raise ValueError("give `edges` or `buckets`, not both")
            return self

    def check(self, check: Check) -> Mapping[str, Any]:
        """Edges rise, and the longest sample that can come has a bucket and fits the budget."""
        config, edges = self.config, self.config.edges
        for place, (low, high) in enumerate(pairwise((0, *edges))):
            if high <= low:
                check.refuse(f"edges.{place}", f"edges must rise from 1, but {high} follows {low}", "sort the edges")
        longest = check.facts.get("max_length")
        if edges and longest is not None and longest > edges[-1]:
            hint = f"raise the last edge, or lower max_length to {edges[-1]}"
            text = f"samples may have up to {longest} tokens, the last edge is {edges[-1]}"
            if config.over_long == "error":
                check.refuse("edges", text, hint + ", or say `over_long: drop`")
            else:
                check.warn("edges", text + "; longer samples are dropped", hint)
        if not edges and "over_long" in config.model_fields_set:
            check.refuse("over_long", "without edges no sample is above the last one", "give edges, or remove it")
        budget = check_budget(check, config, edges[-1] if edges else (longest or 0))
        return {"buckets": len(edges) or config.buckets, **budget}

    def _made(self, samples: SampleTable, keep: IntArray, rng: np.random.Generator) -> tuple[BatchTable, IntArray]:
        edges = np.asarray(self.config.edges or equal_token_edges(samples.lengths[keep], self.config.buckets))
        return bucketed(samples, keep, edges, self.config, self.config.batch_size, rng)

    def _refused(self, samples: SampleTable) -> NDArray[np.bool_]:
        config = self.config
        over_long = samples.lengths > config.edges[-1] if config.edges else np.zeros(len(samples), bool)
        if over_long.any() and config.over_long == "error":
            raise DataInvalid(
                complaint(samples, over_long, f"longer than the last edge of {config.edges[-1]} tokens")
                + "; raise the last edge, truncate at the source, or say `over_long: drop`"
            )
        within = np.flatnonzero(~over_long)
        out = over_long.copy()
        out[within] = over_budget(samples.take(within), config)
        return out
