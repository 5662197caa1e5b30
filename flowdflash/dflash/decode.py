"""Greedy speculative decoding: the draft proposes a block, the target verifies it in one pass. Batched and lossless.

Per row, ``start`` is the position of the last committed token, which the target has not processed yet: it is the anchor
of the next block. One round drafts ``q - 1`` tokens after it, runs the target over all ``q``, commits the longest
prefix that the target agrees with plus one token of the target's own, and moves ``start`` by that many. Each row is at
its own position; finished rows leave the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowdflash.dflash.mask import draft_mask
from flowdflash.dflash.model import ContextCache, DFlashDraft
from flowdflash.dflash.slots import SlotCache, TargetView
from flowdflash.errors import ModelInvalid


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
    nan = float("nan")
    means = [sum(r.produced) / len(r.produced) for r in results if r.produced]
    produced = [n for r in results for n in r.produced]
    rounds = [pair for r in results for pair in zip(r.accepted, r.proposed, strict=True)]
    tried = [sum(accepted >= k and proposed > k for accepted, proposed in rounds) for k in range(block_size - 1)]
    right = [sum(accepted > k for accepted, _ in rounds) for k in range(block_size - 1)]
    return AcceptanceSummary(
        requests=len(results),
        passes=len(produced),
        tokens=sum(produced),
        tau_request_mean=sum(means) / len(means) if means else nan,
        tau_pooled=sum(produced) / len(produced) if produced else nan,
        histogram=tuple(produced.count(n) for n in range(1, block_size + 1)),
        acceptance_per_slot=tuple(r / t if t else nan for r, t in zip(right, tried, strict=True)),
    )


@torch.inference_mode()
def speculative_decode(
    target: nn.Module,
    draft: DFlashDraft,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    block_size: int | None = None,
    batch_size: int = 16,
) -> list[DecodeResult]:
    """Decode prompts greedily with the draft's help. The tokens are the target's own greedy tokens.

    Prompts are decoded ``batch_size`` at a time, those of similar length together; results come in the order given.

    Args:
        target: a Hugging Face causal LM with full attention.
        draft: on the target's device.
        prompts: token ids, at least one each.
        max_new_tokens: most tokens per prompt.
        stop_ids: a prompt is finished when one of these has been generated.
        block_size: slots per block, the draft's own by default; 1 decodes without drafting.
        batch_size: prompts decoded at once; bounds memory.
    """
    size = draft.config.block_size if block_size is None else block_size
    view = TargetView(target, draft.config.target_layer_ids)
    _check_request(view, draft, prompts, max_new_tokens, size, batch_size)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    results: dict[int, DecodeResult] = {}
    for at in range(0, len(order), batch_size):
        rows = order[at : at + batch_size]
        batch = _Batch(view, draft, [prompts[i] for i in rows], max_new_tokens, frozenset(stop_ids), size)
        results.update(zip(rows, batch.run(), strict=True))
    return [results[i] for i in range(len(prompts))]


class _Batch:
    """Some prompts on their way. Tensors hold the rows that are still running; ``self.rows`` says which those are."""

    def __init__(
        self,
        view: TargetView,
        draft: DFlashDraft,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop_ids: frozenset[int],
        block_size: int,
    ) -> None:
        self.view, self.draft, self.block_size, self.stop_ids = view, draft, block_size, stop_ids
        self.prompts, device = prompts, view.embedding.device
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        longest = int(lengths.max())
        max_length = longest + max_new_tokens + block_size
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

    def run(self) -> list[DecodeResult]:
        """Decode to the end."""
        self._prefill()
        while self.rows:
            self._round()
        return [self.done[i] for i in range(len(self.prompts))]

    def _prefill(self) -> None:
        """Run the prompts, right-padded, and commit the first token of each."""
        length = int(self.start.max())
        ids = self.out[:, :length]
        positions = torch.arange(length, device=ids.device).expand(len(ids), -1)
        hidden, features = self.view.forward(ids, positions, self.target_cache, length)
        last = hidden.gather(1, (self.start - 1)[:, None, None].expand(-1, 1, hidden.shape[-1]))
        first = self.view.choose(last)
        self.out.scatter_(1, self.start[:, None], first)
        stopped = torch.isin(first[:, 0], self.stops)
        self._settle(stopped, features, positions)

    def _round(self) -> None:
        """Draft, verify, commit."""
        sizes = (self.limit - self.start).clamp(max=self.block_size)
        width, reach = int(sizes.max()), int(self.start.max())
        slot = torch.arange(width, device=self.start.device)
        positions = self.start[:, None] + slot
        block = self._draft(sizes, width, reach, positions)
        hidden, features = self.view.forward(block, positions, self.target_cache, reach + width)
        wanted = self.view.choose(hidden)
        agreed = (block[:, 1:] == wanted[:, :-1]) & (slot[1:] < sizes[:, None])
        accepted = agreed.long().cumprod(dim=1).sum(dim=1)
        # Accepted drafts equal the target's choices, so the target's choices are what is committed, bonus included.
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

    def _draft(self, sizes: Tensor, width: int, reach: int, positions: Tensor) -> Tensor:
        """``[b, width]`` each row's anchor and the tokens drafted after it."""
        config = self.draft.config
        block = torch.full_like(positions, config.mask_token_id)
        block[:, 0] = self.out.gather(1, self.start[:, None])[:, 0]
        if width > 1:
            mask = draft_mask(self.start, sizes, context=reach, slots=width)
            embeds = nn.functional.embedding(block, self.view.embedding)
            states = self.draft.propose(embeds, self.draft_cache, positions, mask, reach)
            block[:, 1:] = self.view.choose(states[:, 1:])
        return block

    def _settle(self, stopped: Tensor, features: Tensor | None, positions: Tensor) -> None:
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
            positions = positions[kept]
            features = None if features is None else features[kept]
        if self.rows and features is not None and self.block_size > 1:
            self.draft.extend(self.draft_cache, features, positions)

    def _finish(self, i: int, stopped: bool) -> None:
        """Record the result of the row at place ``i``."""
        row, prompt = self.rows[i], len(self.prompts[self.rows[i]])
        produced, accepted, proposed = zip(*self.rounds[row], strict=True) if self.rounds[row] else ((), (), ())
        tokens = self.out[i, prompt : int(self.start[i]) + 1].tolist()
        reason: Literal["stop", "length"] = "stop" if stopped else "length"
        self.done[row] = DecodeResult(prompt, tuple(tokens), produced, accepted, proposed, reason)


@torch.inference_mode()
def greedy(
    target: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    batch_size: int = 16,
) -> list[tuple[int, ...]]:
    """Plain greedy decoding by the target's own ``generate``, left-padded: an independent reference.

    Whatever the target's generation config says about sampling, penalties or end tokens is overruled.
    """
    from transformers import GenerationConfig

    vocabulary = target.get_input_embeddings().weight.shape[0]
    config = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        min_new_tokens=0,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        encoder_no_repeat_ngram_size=0,
        # An id that no head can produce: an absent one would be filled in from the target's own config.
        eos_token_id=sorted(stop_ids) or [vocabulary],
        pad_token_id=0,
        use_cache=True,
    )
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    results: dict[int, tuple[int, ...]] = {}
    for at in range(0, len(order), batch_size):
        rows = order[at : at + batch_size]
        longest = max(len(prompts[i]) for i in rows)
        ids = torch.tensor([[0] * (longest - len(prompts[i])) + list(prompts[i]) for i in rows], device=target.device)
        real = torch.tensor(
            [[0] * (longest - len(prompts[i])) + [1] * len(prompts[i]) for i in rows], device=target.device
        )
        out = target.generate(ids, attention_mask=real, generation_config=config)
        for i, tokens in zip(rows, out[:, longest:].tolist(), strict=True):
            end = next((n + 1 for n, token in enumerate(tokens) if token in stop_ids), len(tokens))
            results[i] = tuple(tokens[:end])
    return [results[i] for i in range(len(prompts))]


def _check_request(
    view: TargetView,
    draft: DFlashDraft,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    block_size: int,
    batch_size: int,
) -> None:
    """Refuse what cannot be decoded."""
    for name, value in (("max_new_tokens", max_new_tokens), ("block_size", block_size), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    empty = next((i for i, prompt in enumerate(prompts) if not len(prompt)), None)
    if empty is not None:
        raise ValueError(f"prompt {empty} is empty; decoding needs at least one token")
    config, rows = draft.config, tuple(view.embedding.shape)
    if rows != (config.vocab_size, config.hidden_size) or len(view.blocks) != config.num_target_layers:
        raise ModelInvalid(
            f"the draft is for a target with {config.num_target_layers} layers and an embedding of "
            f"{[config.vocab_size, config.hidden_size]}; this target has {len(view.blocks)} and {list(rows)}"
        )
