"""A key/value cache for a Hugging Face target in which every row is at its own position.

Speculative decoding of several prompts at once accepts another number of tokens in each row. Here a token's slot is its
position: keys and values are written to each row's own slots, and an explicit mask shows a query the slots up to its
own position. Tokens that were rejected, and padding, lie behind it until they are overwritten: rolling back costs
nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from flowdflash.errors import ModelInvalid


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, ``[b, H, max_length, d]``."""

    is_sliding = False

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate. Zeros, not empty: a masked slot still meets a weight of 0, and 0 times NaN is NaN."""
        b, heads = key_states.shape[:2]
        length = self.owner.max_length
        self.keys = key_states.new_zeros(b, heads, length, key_states.shape[-1])
        self.values = value_states.new_zeros(b, value_states.shape[1], length, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write at the owner's positions; return the slots in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        index = self.owner.positions[:, None, :, None]
        for buffer, new in ((self.keys, key_states), (self.values, value_states)):
            buffer.scatter_(2, index.expand_as(new), new)
        return self.keys[:, :, : self.owner.length], self.values[:, :, : self.owner.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Key length and offset; the mask that decoding passes has this width."""
        return self.owner.length, 0

    def get_seq_length(self) -> int:
        """Slots in use."""
        return self.owner.length

    def get_max_length(self) -> int:
        """Slots there are."""
        return self.owner.max_length

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows."""
        self.keys, self.values = self.keys.index_select(0, indices), self.values.index_select(0, indices)


class SlotCache(Cache):  # type: ignore[misc]
    """One slot layer per decoder layer. ``place`` says where the next forward writes."""

    def __init__(self, num_layers: int, max_length: int) -> None:
        self.max_length = max_length
        self.positions = torch.zeros(0, 0, dtype=torch.long)
        self.length = 0
        super().__init__(layers=[_SlotLayer(self) for _ in range(num_layers)])

    def place(self, positions: Tensor, length: int) -> None:
        """The next forward holds tokens at ``positions [b, q]``, all below ``length``."""
        self.positions, self.length = positions, length


class TargetView:
    """A Hugging Face causal LM seen as embedding, tapped layers and logits, and a head for the draft.

    Args:
        model: Llama-, Qwen- or similar, with full attention in all layers.
        layers: tapped layers, 0-based; their outputs are taken by hooks, never after the final norm.

    Raises:
        ModelInvalid: the model keeps a state that cannot be rolled back, or takes no explicit mask.
    """

    def __init__(self, model: Any, layers: Sequence[int] = ()) -> None:
        self.model, self.tapped = model, tuple(layers)
        name = type(model).__name__
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else getattr(model, "model", None)
        blocks = getattr(decoder, "layers", getattr(decoder, "h", None))
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        if decoder is None or blocks is None or head is None:
            raise ModelInvalid(f"target {name} is not a decoder with layers and an output head; it cannot be decoded")
        self.blocks: Sequence[nn.Module] = blocks
        self.head: nn.Module = head
        _check_croppable(model, name)
        attention = getattr(model.config, "_attn_implementation", None)
        if attention not in ("sdpa", "eager"):
            raise ModelInvalid(
                f"target {name} uses attention {attention!r}, which takes no explicit mask; load it with "
                "attn_implementation='sdpa'"
            )
        self.additive = attention == "eager"

    @property
    def embedding(self) -> Tensor:
        """Raw rows of the input embedding ``[V, D]``."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    def new_cache(self, max_length: int) -> SlotCache:
        """An empty cache."""
        return SlotCache(len(self.blocks), max_length)

    def forward(
        self, ids: Tensor, positions: Tensor, cache: SlotCache, length: int, *, only: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run ``ids [b, q]`` at ``positions [b, q]``, all below ``length``.

        Args:
            ids, positions: tokens and where they are.
            cache: holds what came before, and takes up these.
            length: slots of the cache in use.
            only: ``[b]`` the one index into ``ids`` that logits are wanted of; None for all.

        Returns:
            The model's logits ``[b, q or 1, V]``, and the features ``[b, q, K*D]`` of the tapped layers.
        """
        cache.place(positions, length)
        slots = torch.arange(length, device=ids.device)
        mask = (slots <= positions[..., None])[:, None]
        if self.additive:
            mask = torch.zeros(mask.shape, dtype=self.embedding.dtype, device=ids.device).masked_fill_(
                ~mask, torch.finfo(self.embedding.dtype).min
            )
        taken: dict[int, Tensor] = {}
        hooks = [self.blocks[layer].register_forward_hook(_take(taken, layer)) for layer in self.tapped]
        if only is not None:
            hooks.append(self.head.register_forward_pre_hook(_choose(only)))
        try:
            # The model and not only its decoder: some scale or cap what their head gives.
            out = self.model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
        finally:
            for hook in hooks:
                hook.remove()
        features = [taken[layer] for layer in self.tapped]
        return out.logits, torch.cat(features, dim=-1) if features else out.logits[..., :0]

    def draft_logits(self, states: Tensor) -> Tensor:
        """What the head makes of the draft's states."""
        logits: Tensor = self.head(states.to(next(self.head.parameters()).dtype))
        return logits


def _take(taken: dict[int, Tensor], layer: int) -> Any:
    """A forward hook that keeps a layer's output, of the calling thread only: others may run the same model."""
    owner = threading.get_ident()

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == owner:
            taken[layer] = output[0] if isinstance(output, tuple) else output

    return hook


def _choose(only: Tensor) -> Any:
    """A hook that lets the head see one state per row, of the calling thread only."""
    owner = threading.get_ident()

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if threading.get_ident() != owner:
            return None
        (states,) = args
        return (states.gather(1, only[:, None, None].expand(-1, 1, states.shape[-1])),)

    return hook


def _check_croppable(model: Any, name: str) -> None:
    """Refuse targets whose cache cannot drop its last tokens: recurrent states, sliding windows."""
    kinds = {
        type(layer).__name__ for layer in DynamicCache(config=model.config).layers if type(layer) is not DynamicLayer
    }
    if getattr(model, "_is_stateful", False):
        kinds.add("recurrent state")
    if kinds:
        raise ModelInvalid(
            f"target {name} keeps {', '.join(sorted(kinds))} in its cache, which cannot be rolled back after a "
            "rejected draft; speculative decoding here needs a target with full attention in every layer"
        )
