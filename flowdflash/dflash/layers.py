"""Layers of the draft: attention from a block's slots to the context and to themselves, MLP, rotary positions.

Shape suffixes: b rows, q block slots, D hidden, H heads, d head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flowdflash.dflash.config import DraftConfig
from flowdflash.dflash.mask import AttentionMask, attend
from flowdflash.dflash.norm import RMSNorm, precise


class Rotary:
    """Cosines and sines of rotary positions: ``[b, 1, n, d]`` each."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin = cos, sin

    @classmethod
    def at(cls, positions: Tensor, config: DraftConfig, dtype: torch.dtype) -> Rotary:
        """For ``positions [b, n]``. Computed anew each time: a buffer would be cast along with the weights."""
        dtype = precise(dtype)
        exponent = torch.arange(0, config.head_dim, 2, device=positions.device).to(dtype) / config.head_dim
        angles = positions[:, None, :, None].to(dtype) * config.rope_theta**-exponent
        angles = torch.cat([angles, angles], dim=-1)
        return cls(angles.cos(), angles.sin())

    def split(self, first: int) -> tuple[Rotary, Rotary]:
        """The first positions, and the rest."""
        return (
            Rotary(self.cos[:, :, :first], self.sin[:, :, :first]),
            Rotary(self.cos[:, :, first:], self.sin[:, :, first:]),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate ``x [b, H, n, d]``."""
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        return (x * self.cos + turned * self.sin).to(x.dtype)


class DraftAttention(nn.Module):
    """Grouped-query attention from block slots to the context and to their own block."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        D, d = config.hidden_size, config.head_dim
        self.head_dim = d
        self.q_proj = nn.Linear(D, config.num_attention_heads * d, bias=False)
        self.k_proj = nn.Linear(D, config.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(D, config.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * d, D, bias=False)
        self.q_norm = RMSNorm(d, config.rms_norm_eps)
        self.k_norm = RMSNorm(d, config.rms_norm_eps)

    def keys_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Keys and values of block slots, and of the context: the same weights."""
        return self.shaped(self.k_proj(x), self.v_proj(x), rotary)

    def shaped(self, k: Tensor, v: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Keys (normed, rotated) and values ``[b, Hkv, n, d]`` of projected states ``[b, n, Hkv*d]``."""
        k, v = (x.view(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim) for x in (k, v))
        return rotary(self.k_norm(k).transpose(1, 2)), v.transpose(1, 2)

    def context_keys_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """The same of context states."""
        return self.keys_values(x, rotary)

    def forward(self, x: Tensor, context: tuple[Tensor, Tensor], rotary: Rotary, mask: AttentionMask) -> Tensor:
        """Attend from the slots ``x [b, q, D]`` (already normed) to context keys and values, and to themselves."""
        q = rotary(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2))
        k, v = self.keys_values(x, rotary)
        k, v = torch.cat([context[0].to(k.dtype), k], dim=2), torch.cat([context[1].to(v.dtype), v], dim=2)
        out: Tensor = self.o_proj(attend(q, k, v, mask).transpose(1, 2).flatten(2))
        return out


class DraftMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x [b, q, D]``."""
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DraftLayer(nn.Module):
    """One pre-norm decoder layer. Its input norm is for the block only: the context has ``hidden_norm`` instead."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DraftMLP(config)

    def forward(self, x: Tensor, context: tuple[Tensor, Tensor], rotary: Rotary, mask: AttentionMask) -> Tensor:
        """Map block states ``x [b, q, D]``."""
        x = x + self.self_attn(self.input_layernorm(x), context, rotary, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out
