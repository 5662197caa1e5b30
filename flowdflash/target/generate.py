"""Lets a target answer prompts: token ids in, texts out, cut by position at the end-of-turn token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from flowdflash.dflash.sampling import Sampling
from flowdflash.errors import ModelInvalid
from flowdflash.items import Answer, IntArray
from flowdflash.target.load import LoadedTarget


class _GumbelNoise(LogitsProcessor):  # type: ignore[misc]
    """Makes the greedy choice a sample of the softmax, each row with draws of its own, whatever batch it is in.

    ``do_sample`` would draw from torch's global generator, which other threads use too.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = generators

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        noise = torch.empty(scores.shape, dtype=torch.float32, device=self._generators[0].device)
        for row, generator in zip(noise, self._generators, strict=True):
            row.exponential_(generator=generator)
        # An exponential draw is never 0 in practice; the floor keeps the logarithm finite if it is.
        return scores.float() - noise.clamp_(min=1e-30).log().to(scores.device)


def left_padded(prompts: Sequence[IntArray], pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids and attention mask of a batch, padded on the left, where ``generate`` wants it."""
    b, S = len(prompts), max(map(len, prompts))
    ids = np.full((b, S), pad_id, dtype=np.int64)
    mask = np.zeros((b, S), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, S - len(prompt) :] = prompt
        mask[row, S - len(prompt) :] = 1
    return torch.from_numpy(ids), torch.from_numpy(mask)


def stop_ids(target: LoadedTarget, tokenizer: Any) -> tuple[int, ...]:
    """End-of-turn tokens: those of the model's generation config, and the tokenizer's.

    Raises:
        ModelInvalid: there are none, so no response would ever end.
    """
    found: set[int] = set()
    for ids in (getattr(target.model.generation_config, "eos_token_id", None), tokenizer.eos_token_id):
        found.update(ids if isinstance(ids, (list, tuple)) else () if ids is None else (ids,))
    if not found:
        raise ModelInvalid(f"{target.ref} names no end-of-turn token (eos_token_id), so no response would end")
    return tuple(sorted(int(token) for token in found))


def generate_answers(
    target: LoadedTarget,
    tokenizer: Any,
    prompts: Sequence[IntArray],
    *,
    stops: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    seeds: Sequence[int],
) -> list[Answer]:
    """One answer per prompt. The same seed gives a prompt the same draws, whatever its batch and other threads do.

    Raises:
        ModelInvalid: prompt and response together are longer than the target can read.
    """
    S = max(map(len, prompts))
    if 0 < target.max_positions < S + max_new_tokens:
        raise ModelInvalid(
            f"a prompt of {S} tokens and max_new_tokens {max_new_tokens} exceed the {target.max_positions} positions "
            f"of {target.ref} (lower max_new_tokens, or max_length of the source)"
        )
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stops[0]
    ids, mask = left_padded(prompts, pad)
    # Everything is said here: what is left open would come from the model's own generation_config.json.
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        eos_token_id=list(stops),
        pad_token_id=pad,
        use_cache=True,
    )
    with torch.no_grad():
        out = target.model.generate(
            ids.to(target.device),
            attention_mask=mask.to(target.device),
            generation_config=config,
            logits_processor=_processors(sampling, target.device, seeds),
        )
    return [_answer(row, tokenizer, stops) for row in out[:, S:].tolist()]


def _processors(sampling: Sampling, device: torch.device, seeds: Sequence[int]) -> LogitsProcessorList:
    if sampling.greedy:
        return LogitsProcessorList()
    steps: list[Any] = [TemperatureLogitsWarper(float(sampling.temperature))]
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(TopPLogitsWarper(sampling.top_p))
    steps.append(_GumbelNoise([torch.Generator(device).manual_seed(seed) for seed in seeds]))
    return LogitsProcessorList(steps)


def _answer(tokens: list[int], tokenizer: Any, stops: Sequence[int]) -> Answer:
    end = next((place for place, token in enumerate(tokens) if token in stops), None)
    kept = tokens if end is None else tokens[:end]
    count = len(kept) + (end is not None)
    added = tokenizer.added_tokens_decoder
    inside = next((added[token].content for token in kept if token in added and added[token].special), "")
    if inside:  # as text it would be markup, and without it the template could not write the answer again
        return Answer("", count, rejected="special token inside the answer", detail=inside)
    text = tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if end is None:
        return Answer(text.rstrip("\ufffd"), count, "length")  # it may end inside a character
    return Answer(text, count, "stop")
