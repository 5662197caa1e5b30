"""Who sees whom, and attention under it, by three backends that agree.

A query is slot k of block j with anchor a; keys are the context (the target's states, one per token of the row), then
all slots of all blocks. The slot sees the context strictly before its anchor, in a packed row only that of its own
document, and its own block in both directions.
``u <= a`` instead of ``u < a`` is the classic leak: the state at the anchor nearly predicts the next token, and does
not exist yet when the draft is served.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from flowdflash.dflash.documents import documents
from flowdflash.errors import ModelInvalid

Backend = Literal["sdpa", "eager", "flex"]


class AttentionMask:
    """A visibility rule in the form that one attention backend wants.

    Attributes:
        backend: the backend that ``attend`` uses.
        visible: ``[b, 1, q, k]`` bool, True where a query sees a key; None for ``flex``.
        block_mask: of ``flex_attention``; None for the others.
        parts: of a packed row, instead of ``visible``: a mask for each document, between its own slots and context.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        visible: Tensor | None = None,
        block_mask: Any = None,
        parts: tuple[DocumentMask, ...] = (),
    ) -> None:
        if backend not in get_args(Backend):
            raise ModelInvalid(f"attention backend {backend!r} cannot apply the mask; choose from {get_args(Backend)}")
        if (block_mask if backend == "flex" else visible) is None and not parts:
            raise ModelInvalid(f"attention backend {backend!r} was given no mask; the draft never runs without one")
        self.backend, self.visible, self.block_mask, self.parts = backend, visible, block_mask, parts
        self._bias: dict[tuple[torch.dtype, int], Tensor] = {}

    def bias(self, dtype: torch.dtype, groups: int) -> Tensor:
        """``[b, 1, groups * q, k]`` additive form, 0 or -inf; made once and used by all layers of a step."""
        key = (dtype, groups)
        if key not in self._bias:
            assert self.visible is not None
            bias = torch.zeros(self.visible.shape, dtype=dtype, device=self.visible.device)
            self._bias[key] = bias.masked_fill_(~self.visible, float("-inf")).repeat(1, 1, groups, 1)
        return self._bias[key]


class DocumentMask(NamedTuple):
    """The mask of one document: between ``slots`` of the row's blocks and ``context`` of its tokens."""

    slots: slice
    context: slice
    mask: AttentionMask


def block_mask(
    anchors: Tensor,
    keep: Tensor,
    *,
    context: int,
    block_size: int,
    backend: Backend,
    lengths: Tensor | None = None,
) -> AttentionMask:
    """The mask of one training forward.

    Args:
        anchors: ``[b, A]`` position of each block's anchor.
        keep: ``[b, A]`` False for slots that hold no block. Such a block attends to itself alone, so that no row is
            fully masked; it carries no loss.
        context: context keys per row, ``S``. Rows are right-padded, so padding lies after every anchor.
        block_size: slots per block.
        backend: ``sdpa`` or ``eager`` (dense) or ``flex`` (block-sparse).
        lengths: ``[n]`` tokens per document, where the one row is packed. Its anchors ascend, those not kept last.
    """
    limit = torch.where(keep, anchors, 0)
    if backend == "flex":
        first = torch.zeros_like(limit) if lengths is None else documents(lengths, anchors).start
        return AttentionMask("flex", block_mask=_flex_block_mask(first, limit, context, block_size))
    if lengths is not None:
        return AttentionMask(backend, parts=_document_masks(anchors, keep, lengths, block_size, backend))
    b, A = anchors.shape
    slots = A * block_size
    visible = torch.zeros(b, 1, slots, context + slots, dtype=torch.bool, device=anchors.device)
    before = torch.arange(context, device=anchors.device) < limit[:, :, None]
    visible[..., :context] = before.repeat_interleave(block_size, dim=1)[:, None]
    block = torch.arange(slots, device=anchors.device) // block_size
    visible[..., context:] = block[:, None] == block
    return AttentionMask(backend, visible=visible)


def draft_mask(starts: Tensor, sizes: Tensor, *, context: int, slots: int, backend: Backend = "sdpa") -> AttentionMask:
    """The mask of one drafting step: the same rule with one block per row.

    Args:
        starts: ``[b]`` position of each row's anchor; the context holds the tokens before it.
        sizes: ``[b]`` slots of each row's block; slots beyond are padding that nobody else sees.
        context: context keys per row.
        slots: slots per row.
        backend: ``sdpa`` or ``eager``.
    """
    before = torch.arange(context, device=starts.device) < starts[:, None]
    slot = torch.arange(slots, device=starts.device)
    own = (slot < sizes[:, None, None]) | (slot == slot[:, None])
    visible = torch.cat([before[:, None].expand(-1, slots, -1), own], dim=-1)
    return AttentionMask(backend, visible=visible[:, None])


def attend(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """Attention of ``q [b, H, n, d]`` over ``k, v [b, Hkv, m, d]``, scale ``d ** -0.5``, under the mask."""
    b, H, n, d = q.shape
    kv_heads = k.shape[1]
    groups = H // kv_heads
    if mask.backend == "flex":
        return _flex(q, k, v, mask.block_mask)
    if mask.parts:
        # Document by document: one dense mask over a packed row would be the square of what is needed.
        context = k.shape[2] - n
        parts = [
            attend(q[:, :, slots], _of_document(k, own, slots, context), _of_document(v, own, slots, context), part)
            for slots, own, part in mask.parts
        ]
        return torch.cat(parts, dim=2)
    # The heads that share a key head become further query rows of it: keys are never repeated, nor their gradients.
    folded, bias = q.reshape(b, kv_heads, groups * n, d), mask.bias(q.dtype, groups)
    if mask.backend == "sdpa":
        return nn.functional.scaled_dot_product_attention(folded, k, v, attn_mask=bias).view(b, H, n, d)
    scores = folded @ k.transpose(-1, -2) * d**-0.5 + bias
    precise = torch.promote_types(scores.dtype, torch.float32)
    return (torch.softmax(scores, dim=-1, dtype=precise).to(v.dtype) @ v).view(b, H, n, d)


def _of_document(x: Tensor, context: slice, slots: slice, size: int) -> Tensor:
    """Keys or values of one document, of a row's ``size`` context tokens followed by all slots."""
    return torch.cat([x[:, :, context], x[:, :, size + slots.start : size + slots.stop]], dim=2)


def _document_masks(
    anchors: Tensor, keep: Tensor, lengths: Tensor, block_size: int, backend: Backend
) -> tuple[DocumentMask, ...]:
    """A mask for each document that has blocks; blocks that are not kept come last, as of a document of no tokens."""
    owner = torch.where(keep, documents(lengths, anchors).number, len(lengths))[0]
    if bool((owner.diff() < 0).any()):
        raise ValueError("anchors of a packed row must ascend, and those that are not kept come last")
    counts = torch.bincount(owner, minlength=len(lengths) + 1).tolist()
    parts, block, start = [], 0, 0
    for count, length in zip(counts, [*lengths.tolist(), 0], strict=True):
        own = slice(block, block + count)
        if count:
            mask = block_mask(
                anchors[:, own] - start, keep[:, own], context=length, block_size=block_size, backend=backend
            )
            slots = slice(block * block_size, (block + count) * block_size)
            parts.append(DocumentMask(slots, slice(start, start + length), mask))
        block, start = block + count, start + length
    return tuple(parts)


def _flex_block_mask(first: Tensor, limit: Tensor, context: int, block_size: int) -> Any:
    """The rule as a function of indices. Query indices may exceed the last block: kernels round lengths up to 128."""
    from torch.nn.attention.flex_attention import create_block_mask

    b, A = limit.shape

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // block_size
        own = block.clamp(max=A - 1)
        return torch.where(
            key < context,
            (key >= first[row, own]) & (key < limit[row, own]),
            torch.div(key - context, block_size, rounding_mode="floor") == block,
        )

    slots = A * block_size
    return create_block_mask(visible, b, None, slots, context + slots, device=limit.device)


def _flex(q: Tensor, k: Tensor, v: Tensor, block_mask: Any) -> Tensor:
    """flex_attention: compiled on a GPU, uncompiled (and without gradients) elsewhere."""
    from torch.nn.attention.flex_attention import flex_attention

    if q.device.type == "cuda":
        out: Tensor = _compiled_flex()(q, k, v, block_mask=block_mask, enable_gqa=True)
        return out
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ModelInvalid(f"attention backend 'flex' has no backward on {q.device.type}; use 'sdpa' to train there")
    plain: Tensor = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)
    return plain


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    """Compiled once per process; compiling is not thread-safe and happens on the first step."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
