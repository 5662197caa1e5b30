"""Bucketer ``length``: samples of like length together, under a budget of padded tokens per batch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from flowdflash.errors import DataInvalid
from flowdflash.items import BatchTable, IntArray, SampleTable
from flowdflash.stage import Bucketer, Check, StageConfig


class LengthBucketer(Bucketer):
    """Groups samples of like length into batches under a budget of padded tokens.

    A sample goes to the first bucket whose edge is not below its length. Within a bucket samples are permuted, so that
    batches differ between epochs. Where the source is streaming, edges from ``buckets`` are worked out per block.
    """

    type = "length"
    leftover_reason = "longer than the last edge or the budget, or no full batch at the end of the epoch"

    class Config(StageConfig):
        """Options of the length bucketer."""

        token_budget: int = Field(ge=1, description="most padded tokens in a batch: longest sample x samples")
        edges: tuple[int, ...] = Field((), description="upper bound of each bucket in tokens, rising; none: `buckets`")
        buckets: int = Field(6, ge=1, description="number of buckets of equal token counts, where `edges` is not given")
        batch_size: Literal["fixed", "dynamic"] = Field(
            "fixed",
            description="fixed: budget // edge samples in every batch of a bucket; dynamic: as many as fit the budget",
        )
        max_samples: int = Field(0, ge=0, description="most samples in a batch; 0 for no limit")
        over_long: Literal["error", "drop"] = Field("error", description="what to do with samples above the last edge")
        over_budget: Literal["error", "drop", "alone"] = Field(
            "error", description="what to do with a sample that is longer than the budget; alone: a batch of its own"
        )
        drop_last: bool = Field(
            False, description="leave out the incomplete batch of each bucket at the end of an epoch"
        )

        @model_validator(mode="after")
        def _one_way_to_say_edges(self) -> LengthBucketer.Config:
            if self.edges and "buckets" in self.model_fields_set:
                raise ValueError("give `edges` or `buckets`, not both")
            return self

    def __init__(self, config: LengthBucketer.Config) -> None:
        super().__init__(config)
        self._epoch = -1
        self._counts: dict[str, int] = {}
        self._rows: dict[int, dict[str, int]] = {}

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
        bound = edges[-1] if edges else (longest or 0)
        if bound > config.token_budget and config.over_budget == "error":
            text = f"a sample may have {bound} tokens, more than the budget of {config.token_budget} for a whole batch"
            check.refuse("token_budget", text, f"raise it to {bound} or more, or say `over_budget: drop` or `alone`")
        return {"buckets": len(edges) or config.buckets}

    def batches(self, samples: SampleTable, rng: np.random.Generator) -> tuple[BatchTable, SampleTable | None]:
        """Batches bucket after bucket; incomplete ones are held back while more samples may come."""
        keep, refused = self._admit(samples)
        edges = np.asarray(self.config.edges or equal_token_edges(samples.lengths[keep], self.config.buckets))
        shuffled = keep[rng.permutation(len(keep))]
        bucket = np.searchsorted(edges, samples.lengths[shuffled])
        by_bucket = np.argsort(bucket.astype(np.int16 if len(edges) < 2**15 else np.int64), kind="stable")
        members, bounds = shuffled[by_bucket], np.searchsorted(bucket[by_bucket], np.arange(len(edges) + 1))
        groups: list[IntArray] = []
        labels: list[int] = []
        held = [refused]
        for k, edge in enumerate(edges.tolist()):
            inside = members[bounds[k] : bounds[k + 1]]
            cuts, full = self._cut(samples.lengths[inside], edge)
            made = [inside[a:b] for a, b in pairwise(cuts)]
            if made and not full and (self.config.drop_last or not samples.last):
                held.append(made.pop())
            groups += made
            labels += [k] * len(made)
        table = BatchTable.build(samples, groups, labels)
        left = np.sort(np.concatenate(held))
        self._count(table, samples, len(refused), len(left) - len(refused))
        return table, samples.take(left) if len(left) else None

    def summary(self) -> Mapping[str, Any]:
        """Of the last epoch: counts and lengths per bucket, how full batches are, what was left out."""
        rows = self._rows
        real, padded = sum(r["tokens"] for r in rows.values()), sum(r["padded_tokens"] for r in rows.values())
        batches = sum(r["batches"] for r in rows.values())
        per_bucket = {
            str(k): {**row, "mean_length": round(row["tokens"] / row["samples"], 1)} for k, row in sorted(rows.items())
        }
        return {
            "buckets": per_bucket,
            "batches": batches,
            "padding_waste": 1 - real / padded if padded else 0.0,
            "fill": real / (batches * self.config.token_budget) if batches else 0.0,
            **self._counts,
        }

    def _admit(self, samples: SampleTable) -> tuple[IntArray, IntArray]:
        """Positions to bucket and positions to leave out, by the stated policies."""
        config, lengths = self.config, samples.lengths
        over_long = lengths > config.edges[-1] if config.edges else np.zeros(len(samples), bool)
        if over_long.any() and config.over_long == "error":
            raise DataInvalid(
                _complaint(samples, over_long, f"longer than the last edge of {config.edges[-1]} tokens")
                + "; raise the last edge, truncate at the source, or say `over_long: drop`"
            )
        over_budget = (lengths > config.token_budget) & ~over_long
        if over_budget.any() and config.over_budget == "error":
            raise DataInvalid(
                _complaint(samples, over_budget, f"longer than the budget of {config.token_budget} tokens of a batch")
                + "; raise token_budget, truncate at the source, or say `over_budget: drop` or `alone`"
            )
        out = over_long | (over_budget if config.over_budget == "drop" else False)
        return np.flatnonzero(~out), np.flatnonzero(out)

    def _cut(self, lengths: IntArray, edge: int) -> tuple[list[int], bool]:
        """Where to cut one bucket, and whether its last batch is full."""
        config, count = self.config, len(lengths)
        limit = config.max_samples or sys.maxsize
        if config.batch_size == "dynamic":
            cuts = list(_greedy_cuts(lengths.tolist(), config.token_budget, limit))
            last = lengths[cuts[-2] :] if count else lengths
            return cuts, len(last) == limit or bool(count and last.max() * (len(last) + 1) > config.token_budget)
        size = max(1, min(config.token_budget // edge, limit))
        return [*range(0, count, size), count], count % size == 0

    def _count(self, table: BatchTable, samples: SampleTable, refused: int, incomplete: int) -> None:
        if samples.epoch != self._epoch:
            self._epoch, self._rows, self._counts = samples.epoch, {}, {}
        if samples.last:
            self._counts = {"dropped_over_long": refused, "dropped_incomplete": incomplete}
        for k in np.unique(table.bucket).tolist():
            of = table.bucket == k
            row = self._rows.setdefault(
                k, {"samples": 0, "batches": 0, "tokens": 0, "padded_tokens": 0, "max_length": 0}
            )
            row["samples"] += int(table.sizes[of].sum())
            row["batches"] += int(of.sum())
            row["tokens"] += int(table.tokens[of].sum())
            row["padded_tokens"] += int(table.padded_tokens[of].sum())
            row["max_length"] = max(row["max_length"], int(table.max_length[of].max()))


def equal_token_edges(lengths: IntArray, buckets: int) -> IntArray:
    """Rising upper bounds of up to ``buckets`` buckets that hold about equally many tokens; the last is the longest."""
    if not len(lengths):
        return np.ones(1, np.int64)
    rising = np.sort(lengths)
    total = np.cumsum(rising)
    places = np.searchsorted(total, total[-1] * np.arange(1, buckets + 1) / buckets)
    return np.unique(np.maximum(rising[np.minimum(places, len(rising) - 1)], 1))


def _greedy_cuts(lengths: list[int], budget: int, limit: int) -> Iterator[int]:
    """Start of each batch and the end: a batch closes when one more sample would break longest x count <= budget."""
    start, longest = 0, 0
    yield 0
    for i, length in enumerate(lengths):
        higher = max(longest, length)
        count = i - start
        if count and (higher * (count + 1) > budget or count == limit):
            yield i
            start, longest = i, length
        else:
            longest = higher
    if lengths:
        yield len(lengths)


def _complaint(samples: SampleTable, bad: np.ndarray[Any, Any], why: str) -> str:
    where = np.flatnonzero(bad)
    shown = ", ".join(f"{samples.ids[i]} ({samples.lengths[i]} tokens)" for i in where[:5])
    return f"{len(where)} of {len(samples)} samples are {why}: sample {shown}" + (", ..." if len(where) > 5 else "")
