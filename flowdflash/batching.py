"""What bucketers share: who is let in, where batches are cut under budgets of tokens and cost, and the account of it.

Pure functions on columns; the stages that use them differ in the edges of their buckets.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise, repeat
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from flowdflash.errors import DataInvalid
from flowdflash.items import BatchTable, FloatArray, IntArray, SampleTable
from flowdflash.stage import Bucketer, Check, StageConfig

MOST_CELLS = 1024
"""Most places that ``optimal_edges`` looks at: its time and memory grow with the square of their number."""

BatchSize = Annotated[
    Literal["fixed", "dynamic"],
    Field(
        description="fixed: budget // edge samples in every batch of a bucket; dynamic: as many as fit the budget",
    ),
]
"""How many samples a batch of a bucket has."""


class BudgetOptions(StageConfig):
    """Options of every bucketer that works under a budget of padded tokens."""

    token_budget: int = Field(ge=1, description="most padded tokens in a batch: longest sample x samples")
    cost_budget: float = Field(
        0,
        ge=0,
        description="most that a batch may cost in target tokens: its padded tokens, and each anchor of the drafter "
        "as many as anchor_cost_tokens says there; 0 for no limit",
    )
    max_samples: int = Field(0, ge=0, description="most samples in a batch; 0 for no limit")
    over_budget: Literal["error", "drop", "alone"] = Field(
        "error", description="what to do with a sample that is longer than the budget; alone: a batch of its own"
    )
    drop_last: bool = Field(False, description="leave out the incomplete batch of each bucket at the end of an epoch")


def check_budget(check: Check, config: BudgetOptions, longest: int) -> Mapping[str, Any]:
    """Refuse a budget that one sample of ``longest`` tokens exceeds, unless the options say what to do with it.

    Returns:
        The budget of cost, if there is one, for those downstream.
    """
    if longest > config.token_budget and config.over_budget == "error":
        text = f"a sample may have {longest} tokens, more than the budget of {config.token_budget} for a whole batch"
        check.refuse("token_budget", text, f"raise it to {longest} or more, or say `over_budget: drop` or `alone`")
    return {"cost_budget": config.cost_budget} if config.cost_budget else {}


def over_budget(samples: SampleTable, config: BudgetOptions) -> NDArray[np.bool_]:
    """``[n]`` samples to leave out because one of them exceeds the budget of a whole batch.

    Raises:
        DataInvalid: there are some, and the options allow for none.
    """
    over: NDArray[np.bool_] = samples.lengths > config.token_budget
    why, option = f"longer than the budget of {config.token_budget} tokens of a batch", "token_budget"
    if config.cost_budget:
        dear = samples.lengths + _anchor_cost(samples) > config.cost_budget
        if dear.any() and not over.any():
            why, option = f"dearer than the budget of {config.cost_budget:g} for the cost of a batch", "cost_budget"
        over |= dear
    if over.any() and config.over_budget == "error":
        raise DataInvalid(
            complaint(samples, over, why)
            + f"; raise {option}, truncate at the source, or say `over_budget: drop` or `alone`"
        )
    return over if config.over_budget == "drop" else np.zeros(len(samples), bool)


def complaint(samples: SampleTable, bad: NDArray[np.bool_], why: str) -> str:
    """How many samples are bad, and the first few of them."""
    where = np.flatnonzero(bad)
    shown = ", ".join(f"{samples.ids[i]} ({samples.lengths[i]} tokens)" for i in where[:5])
    return f"{len(where)} of {len(samples)} samples are {why}: sample {shown}" + (", ..." if len(where) > 5 else "")


def bucketed(
    samples: SampleTable,
    keep: IntArray,
    edges: IntArray,
    config: BudgetOptions,
    size: BatchSize,
    rng: np.random.Generator,
) -> tuple[BatchTable, IntArray]:
    """Batches bucket after bucket, and positions of the incomplete ones that are held back.

    A sample goes to the first bucket whose edge is not below its length; within a bucket samples are permuted.
    """
    # Sorting small integers is a radix sort. Only then is the order random, which keeps memory access in order so far.
    bucket = np.searchsorted(edges, samples.lengths[keep]).astype(np.int16 if len(edges) < 2**15 else np.int64)
    members = keep[np.argsort(bucket, kind="stable")]
    bounds = np.concatenate([[0], np.cumsum(np.bincount(bucket, minlength=len(edges)))])
    groups: list[IntArray] = []
    labels: list[int] = []
    held = [np.zeros(0, np.int64)]
    for k, edge in enumerate(edges.tolist()):
        inside = rng.permutation(members[bounds[k] : bounds[k + 1]])
        made, incomplete = cut(samples, inside, config, 0 if size == "dynamic" else edge, samples.last)
        held.append(incomplete)
        groups += made
        labels += [k] * len(made)
    return BatchTable.build(samples, groups, labels), np.concatenate(held)


def cut(
    samples: SampleTable, members: IntArray, config: BudgetOptions, edge: int, last: bool
) -> tuple[list[IntArray], IntArray]:
    """Batches of as many members as fit the budgets, and the rest; where ``edge`` is not 0 all count as that long.

    An incomplete last batch is held back while more samples may come, and at the end where the options say so.
    """
    if not len(members):
        return [], members
    limit = config.max_samples or sys.maxsize
    anchors = _anchor_cost(samples)[members] if config.cost_budget else None
    if edge:
        size = min(_most(edge, anchors, config), limit)
        cuts, full = [*range(0, len(members), size), len(members)], len(members) % size == 0
    else:
        lengths = samples.lengths[members]
        cuts = list(_greedy_cuts(lengths, anchors, config, limit))
        rest = slice(cuts[-2], None)
        most = _most(int(lengths[rest].max()), None if anchors is None else anchors[rest], config)
        full = len(members) - cuts[-2] >= min(most, limit)
    made = [members[a:b] for a, b in pairwise(cuts)]
    if not full and (config.drop_last or not last):
        return made[:-1], made[-1]
    return made, members[:0]


def _anchor_cost(samples: SampleTable) -> FloatArray:
    return np.zeros(len(samples)) if samples.anchor_cost is None else samples.anchor_cost


def _most(longest: int, anchors: FloatArray | None, config: BudgetOptions) -> int:
    """Most samples in a batch whose longest has so many tokens; ``anchors`` is what those of each sample cost."""
    most = config.token_budget // longest
    if anchors is not None:
        most = min(most, int(config.cost_budget // (longest + float(anchors.max()))))
    return max(most, 1)


def _greedy_cuts(lengths: IntArray, anchors: FloatArray | None, config: BudgetOptions, limit: int) -> Iterator[int]:
    """Start of each batch and the end: a batch closes when one more sample would break a budget."""
    budget, cost_budget = config.token_budget, config.cost_budget or math.inf
    start, longest, dearest = 0, 0, 0.0
    yield 0
    for i, (length, cost) in enumerate(zip(lengths.tolist(), repeat(0.0) if anchors is None else anchors.tolist())):  # noqa: B905
        higher, dearer = max(longest, length), max(dearest, cost)
        count = i - start
        more = count + 1
        if count and (higher * more > budget or count == limit or (higher + dearer) * more > cost_budget):
            yield i
            start, longest, dearest = i, length, cost
        else:
            longest, dearest = higher, dearer
    yield len(lengths)


def equal_token_edges(lengths: IntArray, buckets: int) -> IntArray:
    """Rising upper bounds of up to ``buckets`` buckets that hold about equally many tokens; the last is the longest."""
    if not len(lengths):
        return np.ones(1, np.int64)
    rising = np.sort(lengths)
    total = np.cumsum(rising)
    places = np.searchsorted(total, total[-1] * np.arange(1, buckets + 1) / buckets)
    return np.unique(np.maximum(rising[np.minimum(places, len(rising) - 1)], 1))


def optimal_edges(
    lengths: IntArray, buckets: int, *, grid: int, budget: int, minimise: Literal["padding", "batches"]
) -> IntArray:
    """Rising upper bounds of up to ``buckets`` buckets of least cost: dynamic programming over multiples of ``grid``.

    A sample in a bucket costs what it occupies there: the bucket's upper bound in tokens (``padding``), or its share of
    a batch of ``budget // bound`` samples (``batches``). best(k, j), the least cost of all samples up to place j in k
    buckets, is the least over i < j of best(k - 1, i) and one bucket for what lies between. Only multiples with samples
    just below them can be bounds; where there are more than ``MOST_CELLS`` the grid is doubled until there are not.
    """
    if not len(lengths):
        return np.ones(1, np.int64)
    while True:
        bounds, counts = np.unique(-(-lengths // grid) * grid, return_counts=True)
        if len(bounds) <= MOST_CELLS:
            break
        grid *= 2
    each = bounds.astype(np.float64) if minimise == "padding" else 1 / np.maximum(budget // bounds, 1)
    upto = np.concatenate([[0], np.cumsum(counts)])
    # price[i, j]: one bucket that ends at bounds[j] and begins after the first i places.
    price = np.where(
        np.tri(len(bounds) + 1, len(bounds), -1, dtype=bool), np.inf, (upto[None, 1:] - upto[:, None]) * each
    )
    best = price[0]
    came_from: list[IntArray] = []
    for _ in range(min(buckets, len(bounds)) - 1):
        total = np.concatenate([[0.0], best])[:, None] + price
        came_from.append(total.argmin(axis=0))
        best = total.min(axis=0)
    at, picked = len(bounds), []
    for step in reversed([np.zeros(len(bounds), np.int64), *came_from]):
        if at == 0:
            break
        picked.append(int(bounds[at - 1]))
        at = int(step[at - 1])
    return np.array(picked[::-1], dtype=np.int64)


class BudgetBucketer(Bucketer):
    """What bucketers under a budget share: who is let in, and an account of each epoch over all its blocks.

    A bucketer of this sort says what its batches are (``_made``).
    """

    leftover_reason = "longer than the budget, or no full batch at the end of the epoch"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._epoch, self._complete = -1, True
        self._counts: dict[str, int] = {}
        self._rows: dict[int, dict[str, int]] = {}

    def check(self, check: Check) -> Mapping[str, Any]:
        """The longest sample that can come fits the budget."""
        budget = check_budget(check, self.config, check.facts.get("max_length", 0))
        return {"buckets": getattr(self.config, "buckets", 0), **budget}

    def batches(self, samples: SampleTable, rng: np.random.Generator) -> tuple[BatchTable, SampleTable | None]:
        """Batches of the samples that are let in; incomplete ones are held back while more samples may come."""
        out = self._refused(samples)
        table, incomplete = self._made(samples, np.flatnonzero(~out), rng)
        self._count(table, samples, int(out.sum()), len(incomplete))
        left = np.sort(np.concatenate([np.flatnonzero(out), incomplete]))
        return table, samples.take(left) if len(left) else None

    def _refused(self, samples: SampleTable) -> NDArray[np.bool_]:
        return over_budget(samples, self.config)

    def _made(self, samples: SampleTable, keep: IntArray, rng: np.random.Generator) -> tuple[BatchTable, IntArray]:
        """Batches of the samples at the positions ``keep``, and positions of those that are held back."""
        raise NotImplementedError

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

    def _count(self, table: BatchTable, samples: SampleTable, refused: int, incomplete: int) -> None:
        # An epoch that is planned before the run and again in it is one epoch, not two.
        if self._complete or samples.epoch != self._epoch:
            self._epoch, self._rows, self._counts = samples.epoch, {}, {}
        self._complete = samples.last
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
