"""Interleavers whose every accumulation window holds its share of every bucket: a first-party plugin of flowdflash."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import numpy as np
from pydantic import Field

from flowdflash.items import BatchTable, FloatArray, IntArray
from flowdflash.plugin import hookimpl
from flowdflash.stage import History, Interleaver, StageConfig
from flowdflash_stratified import rules

Rule = Callable[[IntArray, FloatArray | None], IntArray]


class StratifiedInterleaver(Interleaver):
    """Spreads every bucket evenly over the epoch, so that each accumulation window has nearly the mix of the whole.

    Which batch of a bucket comes when is drawn anew each epoch; the order of the buckets depends on their sizes alone,
    so its bounds hold in every epoch.
    """

    type = "stratified"

    class Config(StageConfig):
        """Options of the stratified interleaver."""

        strategy: Literal["auto", "tijdeman", "largest_deficit", "golden_lattice", "herding"] = Field(
            "auto",
            description="rule for the order; auto: tijdeman while buckets are no more than the batches of an optimizer "
            "step, else golden_lattice over the mean length of batches",
        )

    def order(self, batches: BatchTable, history: History, rng: np.random.Generator) -> IntArray:
        """Each batch once, by the strategy of the options."""
        strategy = self.config.strategy
        if strategy == "auto":
            labels = np.unique(batches.bucket)
            few = len(labels) <= history.window and labels.max(initial=-1) >= 0
            strategy = "tijdeman" if few else "golden_lattice"
        if strategy == "golden_lattice":
            return _lattice(batches.mean_length, rng)
        rule = _herding(batches) if strategy == "herding" else _RULES[strategy]
        return _by_rule(rule, batches, history, rng)


class TijdemanInterleaver(Interleaver):
    """Earliest deadline among eligible buckets: no bucket is ever a whole batch ahead of its share or behind it."""

    type = "tijdeman"

    def order(self, batches: BatchTable, history: History, rng: np.random.Generator) -> IntArray:
        """Each batch once, by Tijdeman's rule."""
        return _by_rule(rules.tijdeman, batches, history, rng)


class LargestDeficitInterleaver(Interleaver):
    """Takes the bucket that is owed most: smooth weighted round robin."""

    type = "largest_deficit"

    def order(self, batches: BatchTable, history: History, rng: np.random.Generator) -> IntArray:
        """Each batch once, the bucket that is owed most first."""
        return _by_rule(rules.largest_deficit, batches, history, rng)


class GoldenLatticeInterleaver(Interleaver):
    """Spreads batches evenly along their mean length; needs no buckets, so it copes with more than a window holds."""

    type = "golden_lattice"

    def order(self, batches: BatchTable, history: History, rng: np.random.Generator) -> IntArray:
        """Each batch once, by a lattice over batches in order of mean length, from a random start."""
        return _lattice(batches.mean_length, rng)


class HerdingInterleaver(Interleaver):
    """Keeps the running mean of log length nearest to that of the epoch: least noise between windows, longer runs."""

    type = "herding"

    def order(self, batches: BatchTable, history: History, rng: np.random.Generator) -> IntArray:
        """Each batch once, the bucket that best cancels what the batches before it had too much of."""
        return _by_rule(_herding(batches), batches, history, rng)


_RULES: Mapping[str, Rule] = {"tijdeman": rules.tijdeman, "largest_deficit": rules.largest_deficit}


@hookimpl
def flowdflash_register(registry: Any) -> None:
    """Register the interleavers."""
    for cls in (
        StratifiedInterleaver,
        TijdemanInterleaver,
        LargestDeficitInterleaver,
        GoldenLatticeInterleaver,
        HerdingInterleaver,
    ):
        registry.register(cls)


def _by_rule(rule: Rule, batches: BatchTable, history: History, rng: np.random.Generator) -> IntArray:
    labels, which, counts = np.unique(batches.bucket, return_inverse=True, return_counts=True)
    places = rule(counts, _ahead(labels, history) if len(history.buckets) else None)
    # Inside a bucket the lattice again: neighbours differ in length there too, from another start each epoch.
    inside = np.split(np.argsort(which, kind="stable"), np.cumsum(counts)[:-1])
    taken = [members[_lattice(batches.mean_length[members], rng)] for members in inside]
    order = np.empty(len(batches), dtype=np.int64)
    order[np.argsort(places, kind="stable")] = np.concatenate([*taken, np.zeros(0, np.int64)])
    if history.window > 1 and len(order):
        _even_out(order, which, batches.tokens.astype(np.float64), history)
    return order


def _even_out(order: IntArray, which: IntArray, tokens: FloatArray, history: History) -> None:
    """Give all windows about the same number of tokens: each bucket's first batches of all windows change places.

    Of these the one with most tokens goes to the window that has fewest without it, and so on. Buckets stay in place,
    and all but the first batch of a bucket in a window stay as the lattice has spread them.
    """
    window = (len(history.buckets) % history.window + np.arange(len(order))) // history.window
    above = np.bincount(window, tokens[order] - tokens.mean())
    _, first = np.unique(window * (which.max() + 1) + which[order], return_index=True)
    bucket = which[order[first]]
    for k in range(which.max() + 1):
        places = first[bucket == k]
        batches = order[places]
        above[window[places]] -= tokens[batches]
        places = places[np.argsort(above[window[places]], kind="stable")]
        order[places] = batches[np.argsort(-tokens[batches], kind="stable")]
        above[window[places]] += tokens[order[places]]


def _herding(batches: BatchTable) -> Rule:
    """The herding rule over the buckets of these batches, their value being the mean of log length."""
    labels, which, counts = np.unique(batches.bucket, return_inverse=True, return_counts=True)
    value = np.bincount(which, np.log(np.maximum(batches.mean_length, 1)), len(labels)) / counts
    return partial(rules.herding, values=value)


def _ahead(labels: IntArray, history: History) -> FloatArray:
    """How far each bucket is ahead of its share when a new block of a stream begins, in batches.

    A block before this one was taken to its end, so it owes nothing; what is left is that one bucket has just had its
    turn, which puts it half a batch ahead. Making up here for what earlier blocks had little of would bunch it.
    """
    return np.where(labels == history.buckets[-1], 0.5, 0.0)


def _lattice(mean_lengths: FloatArray, rng: np.random.Generator) -> IntArray:
    count = len(mean_lengths)
    return rules.golden_lattice(mean_lengths, int(rng.integers(max(count, 1))), rng.permutation(count))
