"""The model: a DFlash draft whose layers each have a context, and projections of it, to themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flowdflash.dflash.config import DraftConfig
from flowdflash.dflash.layers import DraftAttention, Rotary
from flowdflash.dflash.model import DFlashDraft

START = 2.0
"""First value of a layer's weight for the tap that its own depth falls on; the others start at 0."""


class DFlareAttention(DraftAttention):
    """Attention with projections for the context apart from those for the block; ``k_norm`` serves both."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.k_proj_target = nn.Linear(config.hidden_size, config.num_key_value_heads * config.head_dim, bias=False)
        self.v_proj_target = nn.Linear(config.hidden_size, config.num_key_value_heads * config.head_dim, bias=False)

    def context_keys_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Keys and values of context states."""
        return self.shaped(self.k_proj_target(x), self.v_proj_target(x), rotary)


class DFlareDraft(DFlashDraft):
    """A DFlare draft."""

    def build(self) -> None:
        """Put the weights of the mix in place of ``fc``, and the attention with two sets of projections."""
        super().build()
        del self.fc
        for layer in self._layers():
            layer.self_attn = DFlareAttention(self.config)
        self.layer_fusion_weights = nn.Parameter(torch.empty(len(self.layers), self.config.num_features))

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Layer i of N starts with its eye on the tap that is as deep among the taps as i among N."""
        super().initialise(generator)
        layers, taps = self.layer_fusion_weights.shape
        self.layer_fusion_weights.zero_()
        for i in range(layers):
            self.layer_fusion_weights[i, i * taps // layers] = START

    def contexts(self, features: Tensor) -> Sequence[Tensor]:
        """Each layer's own mix ``[b, C, D]`` of the features ``[b, C, K*D]``, normed by the one norm they share."""
        taps = self.cast(features).view(*features.shape[:-1], self.config.num_features, self.config.hidden_size)
        mixed = torch.einsum("bckd,nk->nbcd", taps, self.layer_fusion_weights.softmax(dim=-1))
        return self.hidden_norm(mixed).unbind(0)  # type: ignore[no-any-return]
