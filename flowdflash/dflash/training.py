"""One training forward: from a row's tokens, the target's states and the anchors to the sums of the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from flowdflash.dflash.documents import documents, positions
from flowdflash.dflash.head import Head
from flowdflash.dflash.loss import (
    BlockWeights,
    LabelGap,
    LossSums,
    auf_weights,
    auto_gamma,
    block_labels,
    decay_weights,
    dpace_weights,
    loss_sums,
)
from flowdflash.dflash.mask import AttentionMask, Backend, block_mask
from flowdflash.dflash.model import DFlashDraft, DraftConfig
from flowdflash.errors import ModelInvalid


@dataclass(frozen=True, slots=True)
class LossOptions:
    """How the loss is computed.

    Attributes:
        kind: ``ce`` against the labels; ``kl`` or ``tv``, distillation from the target's last hidden states; or a name
            for a loss that the draft has of its own, from labels and last hidden states.
        gamma: decay constant of the slot weights; ``auto`` takes the published one, None weighs all slots alike.
        alpha: of ``dpace``; 1 makes its weights depend on the slot alone.
        label_gap: ``cut`` ends a block at its first unsupervised token, ``keep`` skips it.
        backend: attention backend.
        chunk_slots: slots whose logits exist at once, 0 for all; bounds memory, changes no result.
        weights: ``decay`` by slot, ``dpace``, ``auf``, or weights of your own.
    """

    kind: str = "ce"
    gamma: float | str | None = "auto"
    label_gap: LabelGap = "cut"
    backend: Backend = "sdpa"
    chunk_slots: int = 1024
    weights: Literal["decay", "dpace", "auf"] | BlockWeights = "decay"
    alpha: float = 0.5

    def block_weights(self, block_size: int, span: int) -> BlockWeights:
        """The weight function for blocks of this size, whose drafts span so many tokens with the anchor."""
        if not isinstance(self.weights, str):
            return self.weights
        if self.weights != "decay":
            return auf_weights if self.weights == "auf" else dpace_weights(self.alpha)
        if isinstance(self.gamma, str):
            if self.gamma != "auto":
                raise ValueError(f"gamma must be 'auto', a number or None, got {self.gamma!r}")
            return decay_weights(span, auto_gamma(block_size))
        return decay_weights(span, self.gamma)


DEFAULT_OPTIONS = LossOptions()


def training_step_inputs(
    config: DraftConfig,
    input_ids: Tensor,
    anchors: Tensor,
    keep: Tensor,
    *,
    backend: Backend = "sdpa",
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, AttentionMask]:
    """What the draft is run on, besides embeddings and features. Of a packed row ``lengths [n]`` must be given.

    Returns:
        ``block_ids [b, A*B]`` (anchor token, then mask tokens), ``position_ids [b, S + A*B]`` and the mask.
    """
    b, S = input_ids.shape
    A, B = anchors.shape[1], config.block_size
    block_ids = torch.full((b, A, B), config.mask_token_id, dtype=torch.long, device=input_ids.device)
    block_ids[..., 0] = input_ids.gather(1, anchors)
    if lengths is None:
        at, context = anchors, torch.arange(S, device=anchors.device).expand(b, -1)
    else:
        at, context = anchors - documents(lengths, anchors).start, positions(lengths, S)
    slots = at[..., None] + torch.arange(B, device=anchors.device)
    position_ids = torch.cat([context, slots.view(b, -1)], dim=1)
    mask = block_mask(anchors, keep, context=S, block_size=B, backend=backend, lengths=lengths)
    return block_ids.view(b, -1), position_ids, mask


def training_loss(
    draft: DFlashDraft,
    embed_weight: Tensor,
    head: Head,
    input_ids: Tensor,
    loss_mask: Tensor,
    lengths: Tensor,
    features: Tensor,
    anchors: Tensor,
    keep: Tensor,
    options: LossOptions = DEFAULT_OPTIONS,
    *,
    last_hidden: Tensor | None = None,
) -> LossSums:
    """Loss sums of one micro-batch; all tensors on the draft's device.

    Run it under ``torch.autocast`` for bf16, under ``torch.no_grad`` to evaluate (with the whole head). Call
    ``.num.backward()`` on the result. Without a single supervised slot the sums are 0 and the gradients are zeros, not
    None: no rank waits for another.

    Args:
        draft: the model.
        embed_weight: ``[V, D]`` the target's embedding rows, frozen.
        head: the target's head, frozen; restricted to a training vocabulary or whole.
        input_ids: ``[b, S]`` right-padded tokens, or one packed row.
        loss_mask: ``[b, S]`` bool, True on supervised tokens.
        lengths: ``[n]`` tokens per sample; n is b unless the row is packed.
        features: ``[b, S, K*D]`` the target's states, aligned with ``input_ids``.
        anchors, keep: ``[b, A]`` as ``draw_anchors`` gives them.
        options: see ``LossOptions``.
        last_hidden: ``[b, S, D]`` the target's states after its final norm, for ``kl`` and ``tv``.
    """
    config = draft.config
    _check_shapes(config, embed_weight, head, input_ids, loss_mask, lengths, features)
    packed = None if len(lengths) == len(input_ids) else lengths
    block_ids, position_ids, mask = training_step_inputs(
        config, input_ids, anchors, keep, backend=options.backend, lengths=packed
    )
    states = draft(nn.functional.embedding(block_ids, embed_weight), features, position_ids, mask)
    b, A, B, span = *anchors.shape, config.block_size, config.span(config.block_size)
    labels, valid = block_labels(
        input_ids, loss_mask, lengths, anchors, keep, block_size=span, label_gap=options.label_gap
    )
    # Only slots with a label meet the head: it is over half of a step.
    hidden = states.view(b, A, B, -1)[:, :, config.first_slot :][valid]
    # A label is the target's choice at the place before it.
    row, block, draft_number = valid.nonzero(as_tuple=True)
    before = row, anchors[row, block] + draft_number
    taught = None if options.kind == "ce" or last_hidden is None else last_hidden[before]
    found = draft.slot_losses(
        hidden,
        head,
        labels[valid],
        input_ids[before],
        taught=taught,
        kind=options.kind,
        chunk_slots=options.chunk_slots,
    )
    loss, ce, correct = (flat.new_zeros(valid.shape).masked_scatter(valid, flat) for flat in found)
    return loss_sums(loss, ce, correct, valid, keep, options.block_weights(B, span))


def _check_shapes(
    config: DraftConfig,
    embed_weight: Tensor,
    head: Head,
    input_ids: Tensor,
    loss_mask: Tensor,
    lengths: Tensor,
    features: Tensor,
) -> None:
    """Refuse inputs that belong to another target, before a kernel does."""
    if embed_weight.shape != (config.vocab_size, config.hidden_size):
        raise ModelInvalid(
            f"the target's embedding table is {list(embed_weight.shape)}, the draft expects "
            f"{[config.vocab_size, config.hidden_size]}"
        )
    if embed_weight.requires_grad:
        raise ModelInvalid("the target's embedding must be frozen (requires_grad is set on it)")
    if head.weight.shape[1] != config.hidden_size or (head.ids is None and len(head.weight) != config.vocab_size):
        raise ModelInvalid(
            f"the target's head is {list(head.weight.shape)}, the draft expects "
            f"{[config.vocab_size, config.hidden_size]}"
        )
    if head.ids is not None and not bool((head.ids == config.mask_token_id).any()):
        # The mask token's own embedding runs through the residual into its logit: unless the training softmax sees that
        # logit, nothing ever pushes it down, and the served draft proposes the mask token.
        raise ModelInvalid(f"the training vocabulary must contain the mask token {config.mask_token_id}")
    if len(lengths) != len(input_ids) != 1:
        raise ModelInvalid(f"{len(lengths)} lengths do not fit {len(input_ids)} rows; only one row can be packed")
    wanted = (*input_ids.shape, config.num_features * config.hidden_size)
    if features.shape != wanted or loss_mask.shape != input_ids.shape:
        raise ModelInvalid(
            f"features {list(features.shape)} and loss mask {list(loss_mask.shape)} do not fit tokens "
            f"{list(input_ids.shape)}: the draft expects features {list(wanted)}"
        )
