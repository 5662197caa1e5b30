"""Tokens by chance: what options make of logits, draws from it, and the rule that accepts or refuses drafts.

Chance comes in as uniform numbers from outside, so that a prompt's tokens depend on its own numbers alone and not on
which prompts share its batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen.

    Attributes:
        temperature: 0 takes the most likely token; the others have no effect then.
        top_p: leaves in the fewest most likely tokens that reach this probability together; 1 leaves in all.
        top_k: leaves in so many most likely tokens; 0 leaves in all.
        seed: prompt number i draws from a stream of its own that depends on this seed and i.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(f"temperature and top_k must be at least 0 and top_p in (0, 1], got {self}")

    @property
    def greedy(self) -> bool:
        """Chance has no part in it."""
        return self.temperature == 0


GREEDY = Sampling()


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution ``[..., V]`` that tokens are drawn from: temperature, then ``top_k``, then ``top_p``."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    p = scores.softmax(dim=-1)
    if sampling.top_p < 1:
        ordered, ids = p.sort(dim=-1, descending=True)
        beyond = ordered.cumsum(dim=-1) - ordered >= sampling.top_p
        p = p.scatter(-1, ids, ordered.masked_fill(beyond, 0))
        p = p / p.sum(dim=-1, keepdim=True)
    return p


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Tokens ``[...]`` from weights ``[..., V]`` that need not sum to 1, by uniform numbers ``[...]`` in [0, 1)."""
    reached = weights.cumsum(dim=-1, dtype=torch.float64)
    tokens = torch.searchsorted(reached, uniform[..., None] * reached[..., -1:], right=True)[..., 0]
    return tokens.clamp(max=weights.shape[-1] - 1)


def verify(p: Tensor, q: Tensor, drafts: Tensor, proposed: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Accept a prefix of each row's drafts and draw the token after it; both together are distributed as ``p`` says.

    A draft ``x`` is accepted with probability ``min(1, p(x) / q(x))``. In place of the first one refused comes a token
    of what ``p`` has more than ``q``, after the last one a token of ``p``.

    Args:
        p: ``[b, n + 1, V]`` the target's distribution at each draft, and after the last.
        q: ``[b, n, V]`` the distributions that the drafts were drawn from.
        drafts: ``[b, n]`` tokens.
        proposed: ``[b]`` how many of them count.
        uniform: ``[b, n + 1]`` uniform numbers in [0, 1).

    Returns:
        How many drafts are accepted ``[b]``, and the token after them ``[b]``.
    """
    n, ids = drafts.shape[1], drafts[..., None]
    good = uniform[:, :-1] * q.gather(-1, ids)[..., 0] < p[:, :-1].gather(-1, ids)[..., 0]
    good &= torch.arange(n, device=drafts.device) < proposed[:, None]
    accepted = good.long().cumprod(dim=1).sum(dim=1)
    rows = torch.arange(len(drafts), device=drafts.device)
    weights = p[rows, accepted]
    if n:
        refused = (accepted < proposed)[:, None]
        rest = (weights - q[rows, accepted.clamp(max=n - 1)]).clamp(min=0)
        # Where p has nowhere more than q they are equal but for rounding, and nothing is refused but for rounding.
        weights = torch.where(refused & (rest.sum(dim=-1, keepdim=True) > 0), rest, weights)
    return accepted, draw(weights, uniform[:, -1])
