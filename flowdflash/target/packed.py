"""Packed rows for a target: attention that goes document by document, and the proof that it isolates them.

A dense mask over a whole row would cost the square of its length in memory and time; document by document costs no more
than the documents would alone, while all else in a layer runs over the row at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from flowdflash.errors import ModelInvalid
from flowdflash.target.load import LoadedTarget

ATTENTION = "document_by_document"
"""A name without ``flash``, by which transformers tells flash kernels."""
CHECK_TOKENS = 8
MOST_OFF = 0.05
"""Rounding in bfloat16 stays well below this share of a state's norm, a document that is seen by another well above."""


def isolate(target: LoadedTarget, states: Callable[[Tensor, Sequence[slice]], Tensor]) -> None:
    """Prepare a target for packed rows, and compare two documents in one row with the same two in rows of their own.

    A target whose layers see a window only keeps the attention and the masks of transformers, which it derives from
    positions that restart.

    Args:
        target: the model.
        states: ``[b, S, ...]`` what is tapped, of ``ids [b, S]`` and of where in the row the documents are.

    Raises:
        ModelInvalid: documents are not isolated.
    """
    text = target.model.config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or ()
    if not getattr(text, "sliding_window", None) and all(kind == "full_attention" for kind in kinds):
        AttentionInterface.register(ATTENTION, _by_document)
        target.model.set_attn_implementation(ATTENTION)
    n = CHECK_TOKENS
    ids = torch.arange(2 * n, device=target.device) % target.vocab_size
    apart = states(ids.view(2, n), ()).flatten(0, 1).float()
    together = states(ids[None], (slice(0, n), slice(n, 2 * n)))[0].float()
    off = float(((together - apart).norm(dim=-1) / apart.norm(dim=-1)).max())
    if not off <= MOST_OFF:
        raise ModelInvalid(
            f"{target.ref} cannot read packed rows: a document beside another has other features than alone "
            f"({off:.0%} off; its layers carry something from token to token that no attention mask stops); "
            "use a bucketer that pads, such as length or sorted_budget"
        )


def _by_document(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    documents: Sequence[slice] = (),
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention of ``[b, H, S, d]`` within each document; over the whole row where there are none."""
    attend = AttentionInterface()["sdpa"]
    if not documents:
        out: tuple[Tensor, None] = attend(module, query, key, value, attention_mask, **options)
        return out
    parts = [attend(module, *(x[:, :, at] for x in (query, key, value)), None, **options)[0] for at in documents]
    return torch.cat(parts, dim=1), None
