"""Acceptance length of a draft on fixed prompts, its speed, and whether its output is the target's own."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from flowdflash.dflash.model import DFlashDraft
    from flowdflash.dflash.rounds import DecodeResult
    from flowdflash.dflash.sampling import Sampling

T = TypeVar("T")
Paused = Generator[tuple[str, int], None, T]
"""Work that may be left alone between its pieces: yields what it is at and how many prompts are done."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Decoding of all prompts in batches of one size, with the draft and without.

    Attributes:
        batch_size: prompts decoded at once.
        tau_gen: tokens committed per verification pass, the target's own included; mean over prompts of their means.
        identical: prompts whose tokens equal plain greedy decoding; None where tokens are sampled.
        secs: wall time of decoding with the draft.
        plain_secs: wall time of the target alone, on the same device, prompts and batches.
        speedup: how many times as many tokens a second with the draft as without; below 1 it slows down.
    """

    batch_size: int
    tau_gen: float
    identical: int | None
    secs: float
    plain_secs: float
    speedup: float


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Result of one evaluation.

    Attributes:
        step: optimizer steps that the draft had seen.
        block_size: slots per block.
        tau_gen, batch_size, identical, secs, plain_secs, speedup: see ``Speed``.
        tau_pooled: as ``tau_gen``, over all passes at once.
        eal: teacher forced on the answers of the prompts' file: expected acceptance length of a block that starts at a
            random place; None where the file holds no answers.
        eal_walk: the same for blocks where decoding would have put them: ``tau_gen``, if the answers are the target's.
        answers: prompts that have an answer.
        prompts: prompts decoded.
        new_tokens: tokens generated over all prompts.
        fewest_new_tokens: of the prompt that stopped first.
        passes: verification passes.
        histogram: passes that committed 1, 2, ... tokens.
        acceptance_per_slot: share of slot k's drafts accepted, given that all before were.
        alone: every prompt decoded by itself, as one user sees it; None where that was not asked for.
        temperature, top_p, top_k: how tokens were chosen; temperature 0 is greedy.
    """

    step: int
    block_size: int
    tau_gen: float
    tau_pooled: float
    eal: float
    eal_walk: float
    answers: int
    prompts: int
    batch_size: int
    identical: int | None
    new_tokens: int
    fewest_new_tokens: int
    passes: int
    histogram: tuple[int, ...]
    acceptance_per_slot: tuple[float, ...]
    secs: float
    plain_secs: float
    speedup: float
    alone: Speed | None
    temperature: float
    top_p: float
    top_k: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; None where there was nothing to take a mean of."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and math.isnan(value) else value


class AcceptanceMeter:
    """Measures drafts for one target on fixed prompts. Plain decoding is done once and kept.

    Args:
        target: a loaded Hugging Face causal LM, on its device.
        prompts: token ids.
        answers: per prompt, tokens of prompt and answer with the index of the answer's first token, or None.
        max_new_tokens: most tokens per prompt; longer answers are looked at up to there.
        stop_ids: end-of-turn tokens.
        batch_size: prompts decoded at once.
        alone: decode every prompt by itself too.
        block_size: slots per block, the draft's own by default.
        sampling: how tokens are chosen.
    """

    def __init__(
        self,
        target: Any,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[tuple[Sequence[int], int] | None] = (),
        *,
        max_new_tokens: int,
        stop_ids: Collection[int],
        batch_size: int,
        alone: bool = False,
        block_size: int | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        from flowdflash.dflash.sampling import GREEDY

        self.target, self.prompts = target, [list(p) for p in prompts]
        self.answers = [(ids[: start + max_new_tokens], start) for ids, start in filter(None, answers)]
        self.batch_size, self.alone, self.block_size = batch_size, alone and batch_size > 1, block_size
        self.sampling = sampling or GREEDY
        self._options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "stop_ids": stop_ids,
            "sampling": self.sampling,
        }
        self._plain: dict[int, tuple[list[tuple[int, ...]], float]] = {}

    def measure(self, draft: DFlashDraft, step: int) -> Paused[Acceptance]:
        """Decode all prompts with the draft's help, and look at all answers."""
        from flowdflash.dflash.acceptance import answer_runs, eal, eal_walk, summarise

        size = self.block_size or draft.config.block_size
        span = draft.config.span(size)
        results, speed = yield from self._decode(draft, size, self.batch_size)
        alone = (yield from self._decode(draft, size, 1))[1] if self.alone else None
        runs: list[list[int]] = []
        for ids, start in self.answers:
            yield "teacher forcing", len(runs)
            runs.append(answer_runs(self.target, draft, ids, start, block_size=size))
        total, counts = summarise(results, span), [len(r.tokens) for r in results]
        return Acceptance(
            step=step,
            block_size=size,
            tau_pooled=total.tau_pooled,
            eal=eal(runs, span),
            eal_walk=eal_walk(runs),
            answers=len(runs),
            prompts=len(results),
            new_tokens=sum(counts),
            fewest_new_tokens=min(counts),
            passes=total.passes,
            histogram=total.histogram,
            acceptance_per_slot=total.acceptance_per_slot,
            alone=alone,
            **{name: getattr(self.sampling, name) for name in ("temperature", "top_p", "top_k")},
            **asdict(speed),
        )

    def _decode(self, draft: DFlashDraft, size: int, batch_size: int) -> Paused[tuple[list[DecodeResult], Speed]]:
        from flowdflash.dflash.acceptance import summarise
        from flowdflash.dflash.decode import plain_rounds, speculative_rounds

        options = {**self._options, "batch_size": batch_size}
        if batch_size not in self._plain:
            # What happens only once in a process is nobody's speed.
            first, short = self.prompts[:1], {**options, "max_new_tokens": 2}
            yield from _timed("warming up", plain_rounds(self.target, first, **short))
            yield from _timed("warming up", speculative_rounds(self.target, draft, first, **short))
            self._plain[batch_size] = yield from _timed(
                "plain decoding", plain_rounds(self.target, self.prompts, **options)
            )
        plain, plain_secs = self._plain[batch_size]
        results, secs = yield from _timed(
            "decoding with the draft",
            speculative_rounds(self.target, draft, self.prompts, block_size=size, **options),
        )
        same = sum(r.tokens == p for r, p in zip(results, plain, strict=True)) if self.sampling.greedy else None
        rates = sum(len(r.tokens) for r in results) / secs, sum(map(len, plain)) / plain_secs
        tau = summarise(results, draft.config.span(size)).tau_request_mean
        return results, Speed(batch_size, tau, same, secs, plain_secs, speedup=rates[0] / rates[1])


def _timed(what: str, rounds: Generator[int, None, T]) -> Paused[tuple[T, float]]:
    """What the rounds come to, and the seconds spent in them; not those between them."""
    secs = 0.0
    while True:
        began = time.monotonic()
        try:
            done = next(rounds)
        except StopIteration as end:
            return end.value, secs + time.monotonic() - began
        secs += time.monotonic() - began
        yield what, done
