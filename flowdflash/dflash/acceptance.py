"""How long the accepted prefixes are: measured while decoding, or teacher forced on answers that are known.

The number of interest is tau, the tokens committed per verification pass of the target, its own token included. It is a
mean over blocks. The product of acceptance rates per slot is another number wherever slots are correlated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from flowdflash.dflash.loss import leading_runs
from flowdflash.dflash.model import DFlashDraft
from flowdflash.dflash.rounds import DecodeResult
from flowdflash.dflash.slots import TargetView
from flowdflash.dflash.training import training_step_inputs

SLOTS_AT_ONCE = 512
"""Bounds the logits and the mask that exist at once."""


@dataclass(frozen=True, slots=True)
class AcceptanceSummary:
    """Acceptance over many requests. ``nan`` where there was no verification pass.

    Attributes:
        requests, passes, tokens: counts; ``tokens`` are those committed by verification passes.
        tau_request_mean: mean over requests of the mean tokens per pass.
        tau_pooled: all committed tokens / all passes.
        histogram: passes that committed 1, 2, ..., B tokens.
        acceptance_per_slot: share of slot k's drafts accepted, among those whose predecessors were all accepted.
    """

    requests: int
    passes: int
    tokens: int
    tau_request_mean: float
    tau_pooled: float
    histogram: tuple[int, ...]
    acceptance_per_slot: tuple[float, ...]


def summarise(results: Sequence[DecodeResult], block_size: int) -> AcceptanceSummary:
    """Acceptance lengths of results that were decoded with this block size."""
    produced = [n for r in results for n in r.produced]
    rounds = [pair for r in results for pair in zip(r.accepted, r.proposed, strict=True)]
    tried = [sum(accepted >= k and proposed > k for accepted, proposed in rounds) for k in range(block_size - 1)]
    right = [sum(accepted > k for accepted, _ in rounds) for k in range(block_size - 1)]
    return AcceptanceSummary(
        requests=len(results),
        passes=len(produced),
        tokens=sum(produced),
        tau_request_mean=mean([mean(r.produced) for r in results if r.produced]),
        tau_pooled=mean(produced),
        histogram=tuple(produced.count(n) for n in range(1, block_size + 1)),
        acceptance_per_slot=tuple(r / t if t else float("nan") for r, t in zip(right, tried, strict=True)),
    )


def mean(values: Sequence[float]) -> float:
    """``nan`` of nothing."""
    return sum(values) / len(values) if values else float("nan")


@torch.inference_mode()
def answer_runs(
    target: Any, draft: DFlashDraft, tokens: Sequence[int], answer_start: int, *, block_size: int | None = None
) -> list[int]:
    """Teacher forced: for each token of an answer but the last, the leading right slots of the block that starts there.

    The target runs once, over prompt and answer; a slot is right if the draft's most likely token is the answer's.
    A block ends with the answer.

    Args:
        target: a Hugging Face causal LM with full attention.
        draft: on the target's device.
        tokens: prompt and answer.
        answer_start: index of the answer's first token.
        block_size: slots per block, the draft's own by default.
    """
    config = replace(draft.config, block_size=block_size or draft.config.block_size)
    view, B, n = TargetView(target, config.target_layer_ids), config.block_size, len(tokens)
    ids = torch.tensor([list(tokens)], device=view.embedding.device)
    positions = torch.arange(n, device=ids.device)
    last = ids.new_tensor([n - 1])
    _, features = view.forward(ids, positions[None], view.new_cache(n), n, only=last)
    runs: list[int] = []
    for anchors in torch.split(positions[answer_start : n - 1], max(SLOTS_AT_ONCE // B, 1)):
        keep = torch.ones(1, len(anchors), dtype=torch.bool, device=ids.device)
        block_ids, position_ids, mask = training_step_inputs(config, ids, anchors[None], keep)
        states = draft(nn.functional.embedding(block_ids, view.embedding), features, position_ids, mask)
        logits = view.draft_logits(states.view(len(anchors), B, states.shape[-1])[:, config.first_slot :])
        # From its own choices: before the first wrong one they are the answer's tokens.
        chosen = draft.draft_tokens(logits, ids[0, anchors], lambda scores, at: scores.argmax(dim=-1))
        place = anchors[:, None] + torch.arange(1, config.span(B), device=ids.device)
        right = (chosen == ids[0, place.clamp(max=n - 1)]) & (place < n)
        runs += leading_runs(right).tolist()
    return runs


def eal(runs: Sequence[Sequence[int]], block_size: int) -> float:
    """Expected acceptance length: 1 + the mean run over all blocks of all answers that have a label in every slot."""
    return 1 + mean([run for answer in runs for run in answer[: max(len(answer) - block_size + 2, 0)]])


def eal_walk(runs: Sequence[Sequence[int]]) -> float:
    """The same where decoding would have put its blocks: the tau of decoding, if answers are the target's greedy ones.

    A walk starts at an answer's first token and moves on by what would be committed; mean over answers of their means.
    """
    return mean([mean(walk(answer)) for answer in runs if answer])


def walk(runs: Sequence[int]) -> list[int]:
    """Tokens committed by each block of one answer; their sum is the answer's length - 1."""
    produced, at = [], 0
    while at < len(runs):
        produced.append(min(runs[at] + 1, len(runs) - at))
        at += produced[-1]
    return produced
