"""Root-mean-square norm, in fp32 whatever the dtype of its input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def precise(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute norms and rotations in: never below fp32."""
    return torch.promote_types(dtype, torch.float32)


class _CpuRMSNorm(torch.autograd.Function):
    """The norm with its own backward: a quarter of the memory passes of the composite one that torch has for CPUs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        high = x.to(precise(x.dtype))
        norm = torch.linalg.vector_norm(high, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        out: Tensor = (high * scale).mul_(weight).to(x.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed, grad = x.to(scale.dtype) * scale, grads[0].to(scale.dtype)
        product = grad * normed
        for_weight = product.flatten(0, -2).sum(dim=0)
        mean = product.mul_(weight).mean(dim=-1, keepdim=True)
        for_x = torch.addcmul(grad * weight, normed, mean, value=-1).mul_(scale)
        return for_x.to(x.dtype), for_weight.to(weight.dtype), None


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, in fp32, returned in the dtype of its input."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x [..., size]``."""
        dtype = precise(x.dtype)
        weight = self.weight.to(dtype)
        # A compiler fuses the plain form by itself.
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            normed: Tensor = _CpuRMSNorm.apply(x, weight, self.eps)  # type: ignore[no-untyped-call]
            return normed
        return nn.functional.rms_norm(x.to(dtype), weight.shape, weight, self.eps).to(x.dtype)
