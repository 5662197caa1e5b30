"""Acceptance length by real speculative decoding, and whether its output is the target's own."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowdflash.dflash.model import DFlashDraft


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Result of one evaluation.

    Attributes:
        step: optimizer steps that the draft had seen.
        tau: tokens committed per verification pass, the target's own included; mean over prompts of each prompt's mean.
        tau_pooled: the same over all passes at once.
        prompts: prompts decoded.
        identical: prompts whose tokens equal plain greedy decoding.
        new_tokens: tokens generated over all prompts.
        fewest_new_tokens: of the prompt that stopped first.
        passes: verification passes.
        histogram: passes that committed 1, 2, ..., B tokens.
        acceptance_per_slot: share of slot k's drafts accepted, given that all before were.
        secs: wall time of the speculative decoding.
        plain_secs: wall time of the plain decoding it is compared with, in the same batches.
    """

    step: int
    tau: float
    tau_pooled: float
    prompts: int
    identical: int
    new_tokens: int
    fewest_new_tokens: int
    passes: int
    histogram: tuple[int, ...]
    acceptance_per_slot: tuple[float, ...]
    secs: float
    plain_secs: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; None where there was nothing to take a mean of."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and math.isnan(value) else value


class AcceptanceMeter:
    """Measures drafts for one target on fixed prompts. Plain greedy decoding is done once and kept.

    Args:
        target: a loaded Hugging Face causal LM, on its device.
        prompts: token ids.
        max_new_tokens: most tokens per prompt.
        stop_ids: end-of-turn tokens.
        batch_size: prompts decoded at once.
    """

    def __init__(
        self,
        target: Any,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Collection[int],
        batch_size: int,
    ) -> None:
        self.target, self.prompts = target, [list(p) for p in prompts]
        self.max_new_tokens, self.stop_ids, self.batch_size = max_new_tokens, stop_ids, batch_size
        self._plain: list[tuple[int, ...]] | None = None
        self.plain_secs = 0.0

    def plain(self) -> list[tuple[int, ...]]:
        """Plain greedy decoding of the prompts."""
        if self._plain is None:
            from flowdflash.dflash.decode import greedy

            began = time.monotonic()
            self._plain = greedy(
                self.target,
                self.prompts,
                max_new_tokens=self.max_new_tokens,
                stop_ids=self.stop_ids,
                batch_size=self.batch_size,
            )
            self.plain_secs = time.monotonic() - began
        return self._plain

    def measure(self, draft: DFlashDraft, step: int) -> Acceptance:
        """Decode all prompts with the draft's help."""
        from flowdflash.dflash.decode import speculative_decode, summarise

        plain = self.plain()
        began = time.monotonic()
        results = speculative_decode(
            self.target,
            draft,
            self.prompts,
            max_new_tokens=self.max_new_tokens,
            stop_ids=self.stop_ids,
            batch_size=self.batch_size,
        )
        secs = time.monotonic() - began
        total = summarise(results, draft.config.block_size)
        counts = [len(r.tokens) for r in results]
        return Acceptance(
            step=step,
            tau=total.tau_request_mean,
            tau_pooled=total.tau_pooled,
            prompts=len(results),
            identical=sum(r.tokens == p for r, p in zip(results, plain, strict=True)),
            new_tokens=sum(counts),
            fewest_new_tokens=min(counts),
            passes=total.passes,
            histogram=total.histogram,
            acceptance_per_slot=total.acceptance_per_slot,
            secs=secs,
            plain_secs=self.plain_secs,
        )
