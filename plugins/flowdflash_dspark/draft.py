"""The model: a DFlash draft with a Markov head and a confidence head, and its loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, linear
from torch.utils.checkpoint import checkpoint

from flowdflash.dflash.head import Head
from flowdflash.dflash.model import DFlashDraft, Pick
from flowdflash.errors import ModelInvalid
from flowdflash_dspark import DSparkConfig

CE_SHARE, DISTANCE_SHARE = 0.1, 0.9


class MarkovHead(nn.Module):
    """What a token adds to the logits of the one after it: row ``token`` of ``markov_w1 @ markov_w2.T``."""

    def __init__(self, rows: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(rows, rank)
        self.markov_w2 = nn.Linear(rank, rows, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[..., V]`` for tokens ``[...]``."""
        bias: Tensor = self.markov_w2(self.markov_w1(tokens))
        return bias


class ConfidenceHead(nn.Module):
    """Logit of the chance that a draft is accepted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """``[n]`` of normed states ``[n, D]`` and the Markov head's rows ``[n, r]`` of the tokens before."""
        logit: Tensor = self.proj(torch.cat([hidden, previous], dim=-1).to(self.proj.weight.dtype))[:, 0]
        return logit


class DSparkDraft(DFlashDraft):
    """A DSpark draft."""

    config: DSparkConfig

    def build(self) -> None:
        """Add the two heads."""
        super().build()
        self.markov_head = MarkovHead(self.config.vocab_size, self.config.markov_rank)
        self.confidence_head = ConfidenceHead(self.config.hidden_size + self.config.markov_rank)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """At first every draft is as likely to be accepted as not."""
        super().initialise(generator)
        self.confidence_head.proj.bias.zero_()

    def draft_tokens(self, logits: Tensor, anchor: Tensor, pick: Pick) -> Tensor:
        """Slot by slot: each draft depends on the one before."""
        previous, tokens = anchor, []
        for at, of_slot in enumerate(self.bounded(logits).unbind(1)):
            previous = pick((of_slot + self.markov_head(previous))[:, None], at)[:, 0]
            tokens.append(previous)
        return torch.stack(tokens, dim=1)

    def slot_losses(
        self,
        hidden: Tensor,
        head: Head,
        labels: Tensor,
        previous: Tensor,
        *,
        taught: Tensor | None,
        kind: str,
        chunk_slots: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, cross-entropy and rightness of each slot, given the token before its label.

        Logits exist for a chunk of slots at a time; the backward pass computes them anew.
        """
        if taught is None:
            raise ModelInvalid("loss dspark needs the last hidden states of the target")
        with torch.autocast(hidden.device.type, enabled=False):
            after = self.markov_head.markov_w2.weight
            after = after if head.ids is None else after[head.ids]
            columns = (hidden, self.markov_head.markov_w1(previous), taught, head.rows_of(labels))
            chunks = zip(*(column.split(chunk_slots or max(len(hidden), 1)) for column in columns), strict=True)
            parts = [checkpoint(self._losses, head, after, *chunk, use_reentrant=False) for chunk in chunks]
        loss, ce, correct = (torch.cat(part) for part in zip(*parts, strict=True))
        return loss, ce, correct

    def _losses(
        self, head: Head, after: Tensor, hidden: Tensor, previous: Tensor, taught: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = head.logits(hidden)
        logits = logits + linear(previous.to(head.weight.dtype), after.to(head.weight.dtype))
        log_q = logits.log_softmax(dim=-1)
        ce = -log_q.gather(1, rows[:, None])[:, 0]
        distance = (head.logits(taught).softmax(dim=-1) - log_q.exp()).abs().sum(dim=-1)
        accepted = (1 - distance.detach() / 2).clamp(0, 1)
        confidence = self.confidence_head(hidden, previous).to(accepted.dtype)
        loss = CE_SHARE * ce + DISTANCE_SHARE * distance
        loss = loss + binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
        return loss, ce.detach(), logits.argmax(dim=-1) == rows
