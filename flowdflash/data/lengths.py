"""Made-up sample lengths: a log-normal law cut to a range, and a fixture with one bucket that makes most batches."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from flowdflash.items import FloatArray, IntArray

BRIEF_EDGES = (768, 1216, 1728, 2432, 3296, 8192)
BRIEF_COUNTS = (15_232, 17_360, 17_136, 17_020, 13_132, 20_202)
BRIEF_MU, BRIEF_SIGMA = 7.4921, 0.8097


def lognormal(quantiles: FloatArray, mu: float, sigma: float, shortest: int, longest: int) -> IntArray:
    """Lengths at the given quantiles (0..1) of a log-normal law cut to ``shortest..longest``, both included."""
    law = NormalDist(mu, sigma)
    low, high = law.cdf(float(np.log(shortest))), law.cdf(float(np.log(longest + 1)))
    tiny = np.finfo(np.float64).eps
    shares = np.clip(low + quantiles * (high - low), tiny, 1 - tiny)
    lengths = np.exp([law.inv_cdf(float(share)) for share in shares]).astype(np.int64)
    return np.clip(lengths, shortest, longest)


def brief(scale: int = 1) -> IntArray:
    """100,082 lengths in six groups (divided by ``scale``), rising; no random numbers.

    Under a budget of 49,152 padded tokens the last group has 20.2 % of the samples and makes 52.3 % of the batches.
    Inside a group, lengths are the mid-rank quantiles of the law within the group's bounds.
    """
    groups = []
    for low, high, count in zip((0, *BRIEF_EDGES), BRIEF_EDGES, BRIEF_COUNTS, strict=False):
        ranks = (np.arange(count // scale) + 0.5) / max(1, count // scale)
        groups.append(lognormal(ranks, BRIEF_MU, BRIEF_SIGMA, low + 1, high))
    return np.concatenate(groups)
