"""Decoding with the draft's help, and without: batched, in rounds that a caller may pause between.

Greedy, both give the target's own most likely tokens; sampled, both draw from the target's own distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import Any, TypeVar

import torch
from transformers.cache_utils import DynamicCache

from flowdflash.dflash.model import DFlashDraft
from flowdflash.dflash.rounds import Chance, DecodeResult, SpeculativeBatch
from flowdflash.dflash.sampling import GREEDY, Sampling, draw, probabilities
from flowdflash.dflash.slots import TargetView
from flowdflash.errors import ModelInvalid

T = TypeVar("T")


def finish(rounds: Generator[Any, None, T], told: Callable[[Any], object] = lambda at: None) -> T:
    """What a generator returns when nobody pauses it; ``told`` gets what it yields on the way."""
    while True:
        try:
            told(next(rounds))
        except StopIteration as end:
            result: T = end.value
            return result


def speculative_decode(
    target: Any, draft: DFlashDraft, prompts: Sequence[Sequence[int]], **options: Any
) -> list[DecodeResult]:
    """Decode prompts with the draft's help; options as ``speculative_rounds`` takes them."""
    return finish(speculative_rounds(target, draft, prompts, **options))


def greedy(target: Any, prompts: Sequence[Sequence[int]], **options: Any) -> list[tuple[int, ...]]:
    """Decode prompts without a draft; options as ``plain_rounds`` takes them."""
    return finish(plain_rounds(target, prompts, **options))


@torch.inference_mode()
def speculative_rounds(
    target: Any,
    draft: DFlashDraft,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    block_size: int | None = None,
    batch_size: int = 16,
    sampling: Sampling = GREEDY,
) -> Generator[int, None, list[DecodeResult]]:
    """Decode prompts with the draft's help.

    Prompts are decoded ``batch_size`` at a time, those of similar length together; results come in the order given and
    do not depend on the batches.

    Args:
        target: a Hugging Face causal LM with full attention.
        draft: on the target's device.
        prompts: token ids, at least one each.
        max_new_tokens: most tokens per prompt.
        stop_ids: a prompt is finished when one of these has been generated.
        block_size: slots per block, the draft's own by default; 1 decodes without drafting.
        batch_size: prompts decoded at once; bounds memory.
        sampling: how tokens are chosen.

    Yields:
        After each pass of the target, how many prompts are finished.
    """
    size = draft.config.block_size if block_size is None else block_size
    view = TargetView(target, draft.config.target_layer_ids)
    _check_fit(view, draft)
    _check_request(prompts, max_new_tokens=max_new_tokens, block_size=size, batch_size=batch_size)
    results: dict[int, DecodeResult] = {}
    for rows in _batches(prompts, batch_size):
        batch = SpeculativeBatch(
            view,
            draft,
            [prompts[i] for i in rows],
            rows,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
            block_size=size,
            sampling=sampling,
        )
        for done in batch.run():
            yield len(results) + done
        results.update((i, batch.done[row]) for row, i in enumerate(rows))
    return [results[i] for i in range(len(prompts))]


@torch.inference_mode()
def plain_rounds(
    target: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    batch_size: int = 16,
    sampling: Sampling = GREEDY,
) -> Generator[int, None, list[tuple[int, ...]]]:
    """Decode prompts by the target alone, left-padded, with the caches and masks of transformers.

    What decoding with a draft is compared with, so it shares none of its code but the choice of a token from logits.
    Arguments, order and what is yielded are those of ``speculative_rounds``.
    """
    _check_request(prompts, max_new_tokens=max_new_tokens, batch_size=batch_size)
    tokens: list[list[int]] = [[] for _ in prompts]
    finished = 0
    for numbers in _batches(prompts, batch_size):
        chance = Chance(sampling.seed, numbers, target.device)
        longest = max(len(prompts[i]) for i in numbers)
        ids = torch.tensor(
            [[0] * (longest - len(prompts[i])) + list(prompts[i]) for i in numbers], device=target.device
        )
        width = torch.tensor([len(prompts[i]) for i in numbers], device=target.device)
        real = (torch.arange(longest, device=target.device) >= longest - width[:, None]).long()
        cache, rows = DynamicCache(config=target.config), list(range(len(numbers)))
        while rows:
            positions = (real.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            out = target(
                input_ids=ids,
                attention_mask=real,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            if sampling.greedy:
                ids = out.logits.argmax(dim=-1)
            else:
                ids = draw(probabilities(out.logits, sampling), chance.uniform(rows, 1))
            for row, token in zip(rows, ids[:, 0].tolist(), strict=True):
                tokens[numbers[row]].append(token)
            over = [len(t) == max_new_tokens or t[-1] in stop_ids for t in (tokens[numbers[row]] for row in rows)]
            if any(over):
                kept = torch.tensor([place for place, end in enumerate(over) if not end], device=ids.device)
                finished += sum(over)
                rows = [row for row, end in zip(rows, over, strict=True) if not end]
                cache.batch_select_indices(kept.long())
                ids, real = ids[kept.long()], real[kept.long()]
            real = torch.cat([real, torch.ones_like(ids)], dim=1)
            yield finished
    return [tuple(t) for t in tokens]


def _batches(prompts: Sequence[Sequence[int]], batch_size: int) -> Iterator[list[int]]:
    """Numbers of prompts of similar length."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for at in range(0, len(order), batch_size):
        yield order[at : at + batch_size]


def _check_request(prompts: Sequence[Sequence[int]], **least_one: int) -> None:
    """Refuse what cannot be decoded."""
    for name, value in least_one.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    empty = next((i for i, prompt in enumerate(prompts) if not len(prompt)), None)
    if empty is not None:
        raise ValueError(f"prompt {empty} is empty; decoding needs at least one token")


def _check_fit(view: TargetView, draft: DFlashDraft) -> None:
    """Refuse a draft for another target."""
    config, rows = draft.config, tuple(view.embedding.shape)
    if rows != (config.vocab_size, config.hidden_size) or len(view.blocks) != config.num_target_layers:
        raise ModelInvalid(
            f"the draft is for a target with {config.num_target_layers} layers and an embedding of "
            f"{[config.vocab_size, config.hidden_size]}; this target has {len(view.blocks)} and {list(rows)}"
        )
