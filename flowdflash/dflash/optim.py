"""Optimizer, learning-rate schedules in optimizer steps, and gradient scaling and clipping in fp32."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowdflash.dflash.model import DFlashDraft
from flowdflash.errors import ModelInvalid

OptimizerKind = Literal["adamw", "muon"]
ScheduleKind = Literal["cosine", "linear", "constant", "wsd"]


class MuonAdamW(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest, as one optimizer whose groups and state are theirs.

    Muon's update is scaled to the size of AdamW's, so that one learning rate and one weight decay serve both.
    """

    def __init__(self, matrices: list[nn.Parameter], others: list[nn.Parameter], **adamw: Any) -> None:
        own = {name: adamw[name] for name in ("lr", "weight_decay")}
        self._parts = (
            torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **own),
            torch.optim.AdamW(others, **adamw),
        )
        super().__init__([group for part in self._parts for group in part.param_groups], own)
        self._share()

    def _share(self) -> None:
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of both."""
        for part in self._parts:
            part.step()  # type: ignore[no-untyped-call]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what ``state_dict`` gave."""
        super().load_state_dict(state_dict)
        self._share()


def build_optimizer(
    draft: DFlashDraft,
    *,
    kind: OptimizerKind = "adamw",
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """An optimizer over the draft's parameters and no others. Takes the draft: nothing of the target can get in.

    Raises:
        ModelInvalid: it is not a draft, or a parameter is below fp32.
    """
    if not isinstance(draft, DFlashDraft):
        raise ModelInvalid(f"the optimizer is for a DFlashDraft alone, got {type(draft).__name__}")
    low = [name for name, p in draft.named_parameters() if p.dtype not in (torch.float32, torch.float64)]
    if low:
        raise ModelInvalid(
            f"parameter {low[0]} is {dict(draft.named_parameters())[low[0]].dtype}: it loses every update "
            "smaller than its rounding, about 0.4 % in bf16; keep the parameters in fp32 and use autocast"
        )
    # Fused: one pass over memory instead of a dozen, on CPUs too.
    fused = draft.norm.weight.device.type in ("cpu", "cuda")
    options: dict[str, Any] = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps, "fused": fused}
    if kind == "adamw":
        return torch.optim.AdamW(draft.parameters(), **options)
    # Tables and heads that a draft has besides its layers are no matrices to Muon.
    named = [(p, p.ndim == 2 and name.startswith(("fc.", "layers."))) for name, p in draft.named_parameters()]
    matrices, others = ([p for p, matrix in named if matrix is wanted] for wanted in (True, False))
    return MuonAdamW(matrices, others, **options)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate as a share of its peak, by optimizer step.

    Attributes:
        kind: ``cosine`` or ``linear`` fall to ``floor`` at the last step, ``constant`` stays, ``wsd`` stays and falls
            linearly over the last ``decay_fraction``.
        total_steps: optimizer steps of the run, from 1.
        warmup_fraction: share of the steps over which the rate rises linearly from 0.
        floor: share of the peak at the end.
        decay_fraction: of ``wsd``.
    """

    kind: ScheduleKind
    total_steps: int
    warmup_fraction: float = 0.04
    floor: float = 0.0
    decay_fraction: float = 0.2

    def __post_init__(self) -> None:
        if self.kind not in ("cosine", "linear", "constant", "wsd"):
            raise ValueError(f"unknown schedule {self.kind!r}")
        if self.total_steps < 1:
            raise ValueError(f"a schedule needs at least one step, got {self.total_steps}")
        shares = {"warmup_fraction": self.warmup_fraction, "floor": self.floor, "decay_fraction": self.decay_fraction}
        for name, share in shares.items():
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"{name} must be between 0 and 1, got {share}")

    @property
    def warmup_steps(self) -> int:
        """Steps over which the rate rises."""
        return round(self.total_steps * self.warmup_fraction)

    def factor(self, step: int) -> float:
        """Share of the peak for the optimizer step with this 0-based number.

        The first step of a warm-up is not wasted on a rate of 0, and step ``warmup_steps`` is at the peak.
        """
        warmup = self.warmup_steps
        if step < warmup:
            return (step + 1) / (warmup + 1)
        falling = self.total_steps - warmup
        if self.kind == "wsd":
            falling = max(1, round(self.total_steps * self.decay_fraction))
        start = self.total_steps - falling
        done = min(max(0, step - start) / max(1, falling), 1.0)
        if self.kind == "constant":
            return 1.0
        share = 0.5 * (1 + math.cos(math.pi * done)) if self.kind == "cosine" else 1.0 - done
        return self.floor + (1.0 - self.floor) * share


def set_lr(optimizer: torch.optim.Optimizer, peak_lr: float, schedule: Schedule, step: int) -> float:
    """Set and return the learning rate of the optimizer step with this 0-based number."""
    lr = peak_lr * schedule.factor(step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def scale_gradients(parameters: Iterable[nn.Parameter], den: float) -> None:
    """Divide gradients by a window's summed weights: the gradient of the mean over all its slots.

    A window without a supervised slot has only zero gradients, and is left as it is.
    """
    if den > 0:
        for grad in _gradients(parameters):
            grad.div_(den)


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> tuple[float, float]:
    """Clip to a total norm; returns the norm before and after. The norm is taken in fp32.

    A norm that is not finite leaves the gradients as they are; the caller must not take the step.
    """
    gradients = _gradients(parameters)
    if not gradients:
        return 0.0, 0.0
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]))
    before = float(norm)
    if not math.isfinite(before) or before <= max_norm:
        return before, before
    for grad in gradients:
        grad.mul_(max_norm / before)
    return before, max_norm


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]
