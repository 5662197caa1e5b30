"""Bucketer that draws batches from merged neighbouring buckets: a first-party plugin of flowdflash.

Merging mixes lengths inside a batch, where stratified interleaving mixes them inside a window of batches. It costs
padding: every batch of a merged bucket is sized for the largest of its bounds. ``summary`` says how much.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from pydantic import Field

from flowdflash.errors import DataInvalid
from flowdflash.items import BatchTable, IntArray, SampleTable
from flowdflash.plugin import hookimpl
from flowdflash.stage import Bucketer, Check, StageConfig


class CrossBucketBucketer(Bucketer):
    """Draws batches from merged neighbouring buckets, sized for the larger bound, and reports what that costs."""

    type = "cross_bucket"
    leftover_reason = "longer than the last edge, or no full batch at the end of the epoch"

    class Config(StageConfig):
        """Options of the cross-bucket bucketer."""

        token_budget: int = Field(ge=1, description="most padded tokens in a batch: bucket edge x samples")
        edges: tuple[int, ...] = Field(min_length=1, description="upper bound of each bucket in tokens, rising")
        merge: Literal["pairs", "triples"] | tuple[tuple[int, ...], ...] = Field(
            "pairs",
            description="which neighbouring buckets to merge: pairs, triples, or lists of bucket numbers from 0 such "
            "as [[0], [1, 2]]; buckets that are not listed stay alone",
        )
        over_long: Literal["error", "drop"] = Field("error", description="what to do with samples above the last edge")
        drop_last: bool = Field(
            False, description="leave out the incomplete batch of each merged bucket at the end of an epoch"
        )

    def __init__(self, config: CrossBucketBucketer.Config) -> None:
        super().__init__(config)
        self._epoch = -1
        self._seen: dict[str, int] = {}

    def check(self, check: Check) -> Mapping[str, Any]:
        """Edges rise and fit the budget; merged buckets are neighbours, each named once."""
        config, edges = self.config, self.config.edges
        for place, (low, high) in enumerate(pairwise((0, *edges))):
            if high <= low:
                check.refuse(f"edges.{place}", f"edges must rise from 1, but {high} follows {low}", "sort the edges")
        if edges[-1] > config.token_budget:
            text = f"one sample of {edges[-1]} tokens exceeds the budget of {config.token_budget} for a whole batch"
            check.refuse("token_budget", text, f"raise it to {edges[-1]} or more")
        longest = check.facts.get("max_length", 0)
        if longest > edges[-1]:
            text = f"samples may have up to {longest} tokens, the last edge is {edges[-1]}"
            report = check.refuse if config.over_long == "error" else check.warn
            report("edges", text, f"raise the last edge or lower max_length to {edges[-1]}")
        if not isinstance(config.merge, str):
            self._check_groups(check, config.merge)
        return {"buckets": len(self._groups())}

    def _check_groups(self, check: Check, groups: tuple[tuple[int, ...], ...]) -> None:
        known = range(len(self.config.edges))
        for place, group in enumerate(groups):
            where = f"merge.{place}"
            if not group or any(k not in known for k in group):
                check.refuse(
                    where, f"{list(group)} must name buckets from 0 to {known[-1]}", "count from the first edge"
                )
            elif sorted(group) != list(range(min(group), max(group) + 1)):
                check.refuse(where, f"buckets {list(group)} are not neighbours", "merge buckets that follow each other")
        named = [k for group in groups for k in group]
        if twice := sorted({k for k in named if named.count(k) > 1}):
            check.refuse("merge", f"buckets {twice} are in more than one group", "name each bucket once")

    def batches(self, samples: SampleTable, rng: np.random.Generator) -> tuple[BatchTable, SampleTable | None]:
        """Batches, merged bucket after merged bucket; incomplete ones are held back while more samples may come."""
        edges = np.asarray(self.config.edges)
        fits = samples.lengths <= edges[-1]
        if not fits.all() and self.config.over_long == "error":
            first = int(np.flatnonzero(~fits)[0])
            raise DataInvalid(
                f"{int((~fits).sum())} of {len(samples)} samples are longer than the last edge of {edges[-1]} tokens, "
                f"first sample {samples.ids[first]} with {samples.lengths[first]}; raise the edge, truncate at the "
                "source, or say `over_long: drop`"
            )
        shuffled = rng.permutation(np.flatnonzero(fits))
        bucket = np.searchsorted(edges, samples.lengths[shuffled])
        merged = np.array([group[-1] for group in self._groups()])
        keep_incomplete = samples.last and not self.config.drop_last
        groups, labels = self._cut(shuffled, np.searchsorted(merged, bucket), edges[merged], keep_incomplete)
        table = BatchTable.build(samples, groups, labels)
        alone = BatchTable.build(samples, *self._cut(shuffled, bucket, edges, keep_incomplete))
        self._count(samples.epoch, table, alone)
        used = np.zeros(len(samples), bool)
        used[table.members] = True
        left = np.flatnonzero(~used)
        return table, samples.take(left) if len(left) else None

    def summary(self) -> Mapping[str, Any]:
        """Of the last epoch: batches and padding, merged and unmerged, and the share of throughput that it costs."""
        s = self._seen
        if not s.get("padded"):
            return {}
        waste, waste_unmerged = (1 - s[f"tokens{of}"] / max(s[f"padded{of}"], 1) for of in ("", "_unmerged"))
        return {
            "batches": s["batches"],
            "batches_unmerged": s["batches_unmerged"],
            "padding_waste": waste,
            "padding_waste_unmerged": waste_unmerged,
            "throughput_cost": 1 - (1 - waste) / (1 - waste_unmerged),
        }

    def _groups(self) -> list[tuple[int, ...]]:
        """Merged buckets in rising order; those that no group names stay alone."""
        count, merge = len(self.config.edges), self.config.merge
        if isinstance(merge, str):
            size = {"pairs": 2, "triples": 3}[merge]
            return [tuple(range(k, min(k + size, count))) for k in range(0, count, size)]
        named = {k for group in merge for k in group}
        return sorted([*(tuple(sorted(g)) for g in merge if g), *((k,) for k in range(count) if k not in named)])

    def _cut(
        self, members: IntArray, bucket: IntArray, edges: IntArray, keep_incomplete: bool
    ) -> tuple[list[IntArray], list[int]]:
        """Batches of a fixed size per bucket, and their buckets."""
        groups: list[IntArray] = []
        labels: list[int] = []
        for k, edge in enumerate(edges.tolist()):
            inside, size = members[bucket == k], max(1, self.config.token_budget // edge)
            end = len(inside) if keep_incomplete else len(inside) // size * size
            groups += [inside[at : min(at + size, end)] for at in range(0, end, size)]
            labels += [k] * (len(groups) - len(labels))
        return groups, labels

    def _count(self, epoch: int, table: BatchTable, alone: BatchTable) -> None:
        if epoch != self._epoch:
            self._epoch, self._seen = epoch, {}
        for of, made in (("", table), ("_unmerged", alone)):
            for name, value in (
                ("batches", len(made)),
                ("tokens", made.tokens.sum()),
                ("padded", made.padded_tokens.sum()),
            ):
                self._seen[name + of] = self._seen.get(name + of, 0) + int(value)


@hookimpl
def flowdflash_register(registry: Any) -> None:
    """Register the bucketer."""
    registry.register(CrossBucketBucketer)
