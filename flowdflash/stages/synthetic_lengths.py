"""Source ``synthetic_lengths``: made-up samples, for plans, tests and a pipeline that needs no data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from flowdflash.data.lengths import BRIEF_COUNTS, BRIEF_EDGES, brief, lognormal
from flowdflash.items import IntArray, SampleTable
from flowdflash.stage import Check, OpenContext, Source, StageConfig, Vocabulary

USES = {
    "lognormal": {"samples", "mu", "sigma", "min_length", "max_length"},
    "uniform": {"samples", "min_length", "max_length"},
    "fixed": {"samples", "length"},
    "brief": {"scale"},
}
SHAPE = frozenset[str]().union(*USES.values())


class SyntheticLengths(Source):
    """Samples whose lengths follow a law and whose tokens are worked out when asked for.

    Tokens are a pure function of ``seed`` and sample id, so any thread may ask for any sample at any time. The seed of
    the pipeline does not change them, just as it would not change a file.
    """

    type = "synthetic_lengths"

    class Config(StageConfig):
        """Options of the source of made-up samples."""

        law: Literal["lognormal", "uniform", "fixed", "brief"] = Field(
            "lognormal",
            description="how lengths are spread; brief: six groups of which the longest has a fifth of the samples "
            "and, under a budget of 49152 tokens, half of the batches",
        )
        samples: int = Field(1000, ge=1, description="samples in an epoch; not with brief")
        mu: float = Field(5.0, description="lognormal: mean of the natural logarithm of the length in tokens")
        sigma: float = Field(0.8, gt=0, description="lognormal: standard deviation of that logarithm")
        min_length: int = Field(8, ge=1, description="lognormal and uniform: shortest sample in tokens")
        max_length: int = Field(2048, ge=1, description="lognormal and uniform: longest sample in tokens")
        length: int = Field(128, ge=1, description="fixed: length of every sample in tokens")
        scale: int = Field(1, ge=1, description="brief: divide the 100082 samples by this")
        vocab_size: int = Field(256, ge=2, description="token ids are below this")
        avoid_token_ids: tuple[int, ...] = Field((), description="ids never used, such as those of mask and padding")
        pattern: Literal["random", "cycle"] = Field(
            "random",
            description="random: independent tokens; cycle: each follows from the one before, so a draft can learn",
        )
        prompt_share: float = Field(
            0.25, ge=0, lt=1, description="share of each sample, from its start, without a loss"
        )
        epochs: int = Field(1, ge=1, description="passes over the data")
        seed: int = Field(0, ge=0, description="changes lengths and tokens")

    def __init__(self, config: SyntheticLengths.Config) -> None:
        super().__init__(config)
        self._lengths: IntArray = np.zeros(0, np.int64)
        self._allowed: IntArray = np.zeros(0, np.int64)

    def check(self, check: Check) -> Mapping[str, Any]:
        """Only options of the law that is named are given, and some ids are left to use."""
        config = self.config
        for name in sorted((config.model_fields_set & SHAPE) - USES[config.law]):
            check.refuse(name, f"law: {config.law} does not use it", f"it takes {', '.join(sorted(USES[config.law]))}")
        if "min_length" in USES[config.law] and config.min_length > config.max_length:
            check.refuse("min_length", f"{config.min_length} is above max_length, {config.max_length}", "lower it")
        if config.law == "brief" and config.scale > min(BRIEF_COUNTS):
            check.refuse("scale", "no sample is left in the smallest group", f"use at most {min(BRIEF_COUNTS)}")
        if len(_allowed(config)) < 2:
            check.refuse("avoid_token_ids", "fewer than two token ids are left to use", "raise vocab_size")
        longest = {"fixed": config.length, "brief": BRIEF_EDGES[-1]}.get(config.law, config.max_length)
        return {"max_length": longest, "epochs": config.epochs, "task": "train"}

    def open(self, ctx: OpenContext) -> None:
        """Draw the lengths."""
        config, rng = self.config, np.random.default_rng([self.config.seed, 0])
        self._allowed = _allowed(config)
        if config.law == "brief":
            self._lengths = rng.permutation(brief(config.scale))
        elif config.law == "fixed":
            self._lengths = np.full(config.samples, config.length, dtype=np.int64)
        elif config.law == "uniform":
            self._lengths = rng.integers(config.min_length, config.max_length, config.samples, endpoint=True)
        else:
            quantiles = rng.random(config.samples)
            self._lengths = lognormal(quantiles, config.mu, config.sigma, config.min_length, config.max_length)

    def epochs(self) -> Iterator[SampleTable]:
        """The same samples in every epoch."""
        ids = np.arange(len(self._lengths), dtype=np.int64)
        for epoch in range(self.config.epochs):
            yield SampleTable(epoch, ids, self._lengths, self._lengths - self._prompts(self._lengths))

    def tokens(self, sample_id: int) -> tuple[IntArray, NDArray[np.bool_]]:
        """Token ids and loss mask of one sample, from seed and id alone."""
        if not 0 <= sample_id < len(self._lengths):
            raise IndexError(f"no sample {sample_id}: there are {len(self._lengths)}")
        length = int(self._lengths[sample_id])
        rng = np.random.default_rng([self.config.seed, 1, sample_id])
        if self.config.pattern == "cycle":
            picks = (rng.integers(len(self._allowed)) + np.arange(length)) % len(self._allowed)
        else:
            picks = rng.integers(len(self._allowed), size=length)
        mask = np.arange(length) >= self._prompts(self._lengths[sample_id : sample_id + 1])[0]
        return self._allowed[picks], mask

    def vocabulary(self) -> Vocabulary:
        """Token ids that may occur; a small data set need not use all of them."""
        return Vocabulary(self._allowed, self._allowed)

    def describe(self, sample_id: int) -> str:
        """Where a sample comes from."""
        return f"synthetic sample {sample_id}"

    def _prompts(self, lengths: IntArray) -> IntArray:
        prompts: IntArray = np.floor(self.config.prompt_share * lengths).astype(np.int64)
        return prompts

    def summary(self) -> Mapping[str, Any]:
        """Counts over one epoch."""
        total = int(self._lengths.sum())
        supervised = total - int(self._prompts(self._lengths).sum())
        return {
            "samples": len(self._lengths),
            "tokens": total,
            "supervised_share": supervised / total if total else 0.0,
        }


def _allowed(config: SyntheticLengths.Config) -> IntArray:
    return np.setdiff1d(np.arange(config.vocab_size, dtype=np.int64), np.array(config.avoid_token_ids, dtype=np.int64))
