"""Rounds of speculative decoding for a batch: the draft proposes a block, the target verifies it in one pass.

Per row, ``start`` is the position of the last committed token, which the target has not processed yet: it is the anchor
of the next block. One round drafts ``q - 1`` tokens after it, runs the target over all ``q``, commits the accepted
prefix plus one token of the target's own, and moves ``start`` by that many. Each row is at its own position; finished
rows leave the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from flowdflash.dflash.mask import draft_mask
from flowdflash.dflash.model import ContextCache, DFlashDraft
from flowdflash.dflash.sampling import Sampling, draw, probabilities, verify
from flowdflash.dflash.slots import SlotCache, TargetView


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """What decoding one prompt gave.

    Attributes:
        prompt_tokens: length of the prompt.
        tokens: generated tokens, a stop token included.
        produced: tokens committed per verification pass; their sum is ``len(tokens) - 1``, as the first token comes
            from the prompt's own pass.
        accepted: drafts that the target agreed with per pass, whether or not a stop token or the limit cut them off.
        proposed: drafts per pass.
        finish_reason: ``stop`` or ``length``.
    """

    prompt_tokens: int
    tokens: tuple[int, ...]
    produced: tuple[int, ...]
    accepted: tuple[int, ...]
    proposed: tuple[int, ...]
    finish_reason: Literal["stop", "length"]


class Chance:
    """A stream of uniform numbers per prompt: the same whatever its batch mates are."""

    def __init__(self, seed: int, prompts: Sequence[int], device: torch.device) -> None:
        self._streams = [np.random.default_rng((seed, number)) for number in prompts]
        self._device = device

    def uniform(self, rows: Sequence[int], count: int) -> Tensor:
        """``[len(rows), count]`` the next numbers of the given rows, fp64 in [0, 1)."""
        return torch.from_numpy(np.stack([self._streams[row].random(count) for row in rows])).to(self._device)


class SpeculativeBatch:
    """Some prompts on their way. Tensors hold the rows that are still running; ``self.rows`` says which those are.

    Args:
        view: the target.
        draft: on its device.
        prompts: token ids.
        numbers: what each prompt's stream of chance is named by.
        max_new_tokens: most tokens per prompt.
        stop_ids: a prompt is finished when one of these has been generated.
        block_size: slots per block; 1 decodes without drafting.
        sampling: how tokens are chosen.
    """

    def __init__(
        self,
        view: TargetView,
        draft: DFlashDraft,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        *,
        max_new_tokens: int,
        stop_ids: Collection[int],
        block_size: int,
        sampling: Sampling,
    ) -> None:
        self.view, self.draft, self.sampling = view, draft, sampling
        self.span = draft.config.span(block_size)
        self.prompts, device = prompts, view.embedding.device
        self.chance = Chance(sampling.seed, numbers, device)
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        max_length = int(lengths.max()) + max_new_tokens + self.span
        self.out = torch.zeros(len(prompts), max_length, dtype=torch.long, device=device)
        for row, prompt in zip(self.out, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt, device=device)
        self.start, self.limit = lengths, lengths + max_new_tokens
        self.stops = torch.tensor(sorted(stop_ids), dtype=torch.long, device=device)
        self.rows = list(range(len(prompts)))
        self.rounds: list[list[tuple[int, int, int]]] = [[] for _ in prompts]
        self.done: dict[int, DecodeResult] = {}
        self.target_cache: SlotCache = view.new_cache(max_length)
        self.draft_cache: ContextCache = draft.new_cache(len(prompts), max_length)

    def run(self) -> Iterator[int]:
        """Decode to the end; after each pass of the target, how many prompts are finished."""
        self._prefill()
        yield len(self.done)
        while self.rows:
            self._round()
            yield len(self.done)

    def _prefill(self) -> None:
        """Run the prompts, right-padded, and commit the first token of each."""
        length = int(self.start.max())
        ids = self.out[:, :length]
        positions = torch.arange(length, device=ids.device).expand(len(ids), -1)
        logits, features = self.view.forward(ids, positions, self.target_cache, length, only=self.start - 1)
        if self.sampling.greedy:
            first = logits.argmax(dim=-1)
        else:
            first = draw(probabilities(logits, self.sampling), self.chance.uniform(self.rows, 1))
        self.out.scatter_(1, self.start[:, None], first)
        stopped = torch.isin(first[:, 0], self.stops)
        self._settle(stopped, features, positions)

    def _round(self) -> None:
        """Draft, verify, commit."""
        sizes = (self.limit - self.start).clamp(max=self.span)
        width, reach = int(sizes.max()), int(self.start.max())
        slot = torch.arange(width, device=self.start.device)
        positions = self.start[:, None] + slot
        proposed = self._propose(sizes, width, reach, positions)
        anchor = self.out.gather(1, positions[:, :1])
        if self.sampling.greedy:
            drafts = self.draft.draft_tokens(proposed, anchor[:, 0], lambda scores, at: scores.argmax(dim=-1))
            block = torch.cat([anchor, drafts], dim=1)
            logits, features = self.view.forward(block, positions, self.target_cache, reach + width)
            # Accepted drafts equal the target's choices, so the target's choices are what is committed.
            wanted = logits.argmax(dim=-1)
            agreed = (block[:, 1:] == wanted[:, :-1]) & (slot[1:] < sizes[:, None])
            accepted = agreed.long().cumprod(dim=1).sum(dim=1)
        else:
            uniform = self.chance.uniform(self.rows, 2 * self.span - 1)
            q: list[Tensor] = []

            def pick(scores: Tensor, at: int) -> Tensor:
                q.append(probabilities(scores, self.sampling))
                return draw(q[-1], uniform[:, at : at + scores.shape[1]])

            block = torch.cat([anchor, self.draft.draft_tokens(proposed, anchor[:, 0], pick)], dim=1)
            logits, features = self.view.forward(block, positions, self.target_cache, reach + width)
            p = probabilities(logits, self.sampling)
            # Each slot has its own place in the numbers: a row's tokens must not depend on the width of its batch.
            place = [*range(self.span - 1, self.span + width - 2), 2 * self.span - 2]
            accepted, last = verify(p, torch.cat(q, dim=1), block[:, 1:], sizes - 1, uniform[:, place])
            wanted = block.roll(-1, dims=1).scatter(1, accepted[:, None], last[:, None])
        self.out.scatter_(1, positions + 1, wanted)
        produced = torch.minimum(accepted + 1, self.limit - self.start - 1)
        stop_at = torch.where(torch.isin(wanted, self.stops) & (slot < produced[:, None]), slot, width).amin(dim=1)
        stopped = stop_at < width
        produced = torch.where(stopped, stop_at + 1, produced)
        figures = zip(produced.tolist(), accepted.tolist(), (sizes - 1).tolist(), strict=True)
        for row, figure in zip(self.rows, figures, strict=True):
            self.rounds[row].append(figure)
        self.start = self.start + produced
        self._settle(stopped, features, positions)

    def _propose(self, sizes: Tensor, width: int, reach: int, positions: Tensor) -> Tensor:
        """``[b, width - 1, V]`` the draft's logits for the tokens after each row's anchor."""
        if width == 1:
            return self.view.embedding.new_zeros(len(positions), 0, len(self.view.embedding))
        first = self.draft.config.first_slot
        slots = width - 1 + first
        block = torch.full_like(positions[:, :slots], self.draft.config.mask_token_id)
        block[:, :1] = self.out.gather(1, positions[:, :1])
        mask = draft_mask(self.start, sizes - 1 + first, context=reach, slots=slots)
        embeds = nn.functional.embedding(block, self.view.embedding)
        states = self.draft.propose(embeds, self.draft_cache, positions[:, :slots], mask, reach)
        return self.view.draft_logits(states[:, first:])

    def _settle(self, stopped: Tensor, features: Tensor, positions: Tensor) -> None:
        """Take finished rows out, and give the draft the states of the tokens that were processed.

        States of tokens that were not committed lie at or after the new anchor: hidden, and overwritten later.
        """
        over = stopped | (self.start + 1 >= self.limit)
        for i in torch.nonzero(over)[:, 0].tolist():
            self._finish(i, bool(stopped[i]))
        if bool(over.any()):
            kept = torch.nonzero(~over)[:, 0]
            self.rows = [self.rows[i] for i in kept.tolist()]
            self.out, self.start, self.limit = self.out[kept], self.start[kept], self.limit[kept]
            self.target_cache.batch_select_indices(kept)
            self.draft_cache.select(kept)
            positions, features = positions[kept], features[kept]
        if self.rows and self.span > 1:
            self.draft.extend(self.draft_cache, features, positions)

    def _finish(self, i: int, stopped: bool) -> None:
        """Record the result of the row at place ``i``."""
        row, prompt = self.rows[i], len(self.prompts[self.rows[i]])
        produced, accepted, proposed = zip(*self.rounds[row], strict=True) if self.rounds[row] else ((), (), ())
        tokens = self.out[i, prompt : int(self.start[i]) + 1].tolist()
        reason: Literal["stop", "length"] = "stop" if stopped else "length"
        self.done[row] = DecodeResult(prompt, tuple(tokens), produced, accepted, proposed, reason)
