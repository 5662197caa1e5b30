"""The draft model: a small non-causal transformer over the target's fused hidden states and one block of slots.

Shape suffixes: b rows, C context tokens, q block slots, D hidden, K tapped layers, H heads, d head size.

Context rows only ever become keys and values: they get no query, no output projection, no residual and no MLP. Training
and serving run the same code. They differ in where the context's keys and values come from: projected in one go from
the whole row, or kept in a ``ContextCache`` that grows by a few tokens per step. A block's own keys and values never
enter the cache, so there is nothing to roll back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from flowdflash.dflash.config import DraftConfig, auto_layers, check_layers, tensor_shapes
from flowdflash.dflash.head import Head, head_loss
from flowdflash.dflash.layers import DraftAttention, DraftLayer, DraftMLP, Rotary
from flowdflash.dflash.mask import AttentionMask
from flowdflash.dflash.norm import RMSNorm, precise
from flowdflash.errors import ModelInvalid

__all__ = [
    "ContextCache",
    "DFlashDraft",
    "DraftAttention",
    "DraftConfig",
    "DraftLayer",
    "DraftMLP",
    "Pick",
    "RMSNorm",
    "Rotary",
    "auto_layers",
    "check_layers",
    "init_from_layers",
    "init_fusion",
    "tensor_shapes",
]


Pick = Callable[[Tensor, int], Tensor]
"""``(scores [b, n, V], at) -> tokens [b, n]``: chooses the drafts from number ``at`` on."""


class ContextCache:
    """Keys and values of the context, per layer, at the slot that equals their position.

    A row's tokens are written at its own positions and overwritten when those positions are written again. What lies
    at or after a row's anchor is stale; the mask hides it. Rolling back is therefore nothing but an earlier anchor.
    """

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._layers = list(layers)

    def write(self, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Put ``k, v [b, Hkv, n, d]`` at ``positions [b, n]``."""
        index = positions[:, None, :, None]
        for buffer, new in zip(self._layers[layer], (k, v), strict=True):
            buffer.scatter_(2, index.expand_as(new), new.to(buffer.dtype))

    def read(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first ``length`` slots."""
        k, v = self._layers[layer]
        return k[:, :, :length], v[:, :, :length]

    def select(self, rows: Tensor) -> None:
        """Keep the given rows of the batch."""
        self._layers = [(k.index_select(0, rows), v.index_select(0, rows)) for k, v in self._layers]


class DFlashDraft(nn.Module):
    """The draft. It holds neither embedding nor head: both are the target's, and are handed in and out as tensors.

    Args:
        config: its shape.
        seed: of the initial weights, normal(0, ``initializer_range``) and ones for norms. None makes a draft without
            storage, for ``load_state_dict(..., assign=True)``.
    """

    def __init__(self, config: DraftConfig, *, seed: int | None = 0) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):
            self.build()
        if seed is not None:
            self.to_empty(device="cpu")
            self.initialise(torch.Generator().manual_seed(seed))

    def build(self) -> None:
        """Make the modules, by the config."""
        config = self.config
        self.fc = nn.Linear(config.num_features * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Give all parameters their first values."""
        for parameter in self.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, self.config.initializer_range, generator=generator)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.norm.weight.dtype

    def contexts(self, features: Tensor) -> Sequence[Tensor]:
        """Fuse target features ``[b, C, K*D]`` into each layer's context states ``[b, C, D]``: all share one."""
        return [self.hidden_norm(self.fc(self.cast(features)))] * len(self.layers)

    def cast(self, features: Tensor) -> Tensor:
        """In the dtype of the weights, unless autocast sees to it."""
        return features if torch.is_autocast_enabled(features.device.type) else features.to(self.dtype)

    def forward(self, block_embeds: Tensor, features: Tensor, position_ids: Tensor, mask: AttentionMask) -> Tensor:
        """All blocks of all rows at once, for training.

        Args:
            block_embeds: ``[b, A*B, D]`` embeddings of the anchors and of the mask token.
            features: ``[b, S, K*D]`` the target's states.
            position_ids: ``[b, S + A*B]`` positions of the context, then of the slots.
            mask: who sees whom.

        Returns:
            ``[b, A*B, D]`` normed states, ready for the target's head.
        """
        length = features.shape[1]
        rotary_context, rotary = Rotary.at(position_ids, self.config, self.dtype).split(length)
        contexts, x = self.contexts(features), block_embeds.to(self.dtype)
        for layer, context in zip(self._layers(), contexts, strict=True):
            x = layer(x, layer.self_attn.context_keys_values(context, rotary_context), rotary, mask)
        out: Tensor = self.norm(x)
        return out

    def new_cache(self, rows: int, max_length: int) -> ContextCache:
        """An empty cache for ``rows`` rows of up to ``max_length`` positions."""
        shape = (rows, self.config.num_key_value_heads, max_length, self.config.head_dim)
        # Zeros, not empty: a masked slot still meets a weight of 0, and 0 times NaN is NaN.
        zeros = self.norm.weight.new_zeros
        return ContextCache([(zeros(shape), zeros(shape)) for _ in self.layers])

    def extend(self, cache: ContextCache, features: Tensor, positions: Tensor) -> None:
        """Add the target's states ``[b, n, K*D]`` of tokens at ``positions [b, n]`` to the context."""
        contexts, rotary = self.contexts(features), Rotary.at(positions, self.config, self.dtype)
        for i, (layer, context) in enumerate(zip(self._layers(), contexts, strict=True)):
            cache.write(i, positions, *layer.self_attn.context_keys_values(context, rotary))

    def propose(
        self, block_embeds: Tensor, cache: ContextCache, position_ids: Tensor, mask: AttentionMask, length: int
    ) -> Tensor:
        """One block per row, for serving: normed states ``[b, q, D]`` of ``block_embeds [b, q, D]``.

        Args:
            block_embeds: embeddings of the anchor and of the mask token.
            cache: the context; not changed.
            position_ids: ``[b, q]`` positions of the slots.
            mask: over ``length`` context slots, then the ``q`` slots.
            length: how much of the cache to look at.
        """
        rotary, x = Rotary.at(position_ids, self.config, self.dtype), block_embeds.to(self.dtype)
        for i, layer in enumerate(self._layers()):
            x = layer(x, cache.read(i, length), rotary, mask)
        out: Tensor = self.norm(x)
        return out

    def bounded(self, logits: Tensor) -> Tensor:
        """Logits of the target's head, bounded as the target bounds its own."""
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits.to(precise(logits.dtype)) / cap)

    def draft_tokens(self, logits: Tensor, anchor: Tensor, pick: Pick) -> Tensor:
        """Choose the drafts ``[b, n]`` of blocks at tokens ``anchor [b]`` from the head's ``logits [b, n, V]``."""
        return pick(self.bounded(logits), 0)

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
        """Loss of each slot in training; see ``head_loss``. ``previous [n]`` holds the tokens before the labels."""
        return head_loss(hidden, head, labels, taught=taught, kind=kind, chunk_slots=chunk_slots)

    def _layers(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]


@torch.no_grad()
def init_from_layers(
    draft: DFlashDraft, target_layers: Sequence[Mapping[str, Tensor]], *, final_norm: Tensor | None = None
) -> None:
    """Start the draft's layers from layers of the target: worth much on a small budget.

    Args:
        draft: changed in place.
        target_layers: one state dict per draft layer, with the names of a Llama or Qwen3 decoder layer
            (``self_attn.q_proj.weight``, ``mlp.up_proj.weight``, ``input_layernorm.weight``, ...). ``q_norm`` and
            ``k_norm`` stay ones where the target has none.
        final_norm: the target's final norm, copied to the draft's where given.

    Raises:
        ModelInvalid: a tensor is missing or has another shape than the draft's.
    """
    if len(target_layers) != len(draft.layers):
        raise ModelInvalid(f"{len(target_layers)} target layers to start {len(draft.layers)} draft layers from")
    copies: list[tuple[Tensor, Tensor]] = []
    for i, (layer, state) in enumerate(zip(draft.layers, target_layers, strict=True)):
        for name, parameter in layer.named_parameters():
            if name not in state and name.endswith(("q_norm.weight", "k_norm.weight")):
                continue
            copies.append((parameter, _matching(state.get(name), parameter, f"layer {i}: {name}")))
    if final_norm is not None:
        copies.append((draft.norm.weight, _matching(final_norm, draft.norm.weight, "norm.weight")))
    for weight, value in copies:
        weight.copy_(value)


@torch.no_grad()
def init_fusion(draft: DFlashDraft, context_norm: Tensor, *, others: float = 0.02) -> None:
    """Let the context start as the state of the deepest tapped layer, normed as the target's next layer norms it.

    A draft layer that starts as that next layer then has the target's own keys and values to attend to from the first
    step; with a random fusion it has noise.

    Args:
        draft: changed in place.
        context_norm: ``[D]`` input norm of the target's layer after the deepest tapped one.
        others: share of the random initial weights that is left on all columns, so that the other layers can come in.
    """
    width = draft.config.hidden_size
    value = _matching(context_norm, draft.hidden_norm.weight, "the context's norm")
    draft.fc.weight.mul_(others)
    draft.fc.weight[:, -width:] += torch.eye(width, dtype=draft.fc.weight.dtype)
    draft.hidden_norm.weight.copy_(value)


def _matching(value: Tensor | None, parameter: Tensor, what: str) -> Tensor:
    """The value if its shape is the parameter's."""
    if value is None:
        raise ModelInvalid(f"cannot start the draft from the target: {what} is missing in the target's layer")
    if value.shape != parameter.shape:
        raise ModelInvalid(
            f"cannot start the draft from the target: {what} has shape {list(value.shape)} in the target and "
            f"{list(parameter.shape)} in the draft; give the draft the target's geometry or start at random"
        )
    return value
