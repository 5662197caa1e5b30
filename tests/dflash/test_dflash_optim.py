"""Optimizer, schedules, clipping."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from flowdflash.dflash.optim import Schedule, build_optimizer, clip_gradients, scale_gradients, set_lr
from flowdflash.errors import ModelInvalid


def test_bf16_parameters_are_refused_with_the_reason(make_draft: Callable[..., Any]) -> None:
    with pytest.raises(ModelInvalid, match=r"fc\.weight is torch\.bfloat16.*loses every update"):
        build_optimizer(make_draft().bfloat16(), lr=6e-4)


def test_n1_fp32_weights_move_under_a_small_constant_gradient(make_draft: Callable[..., Any]) -> None:
    draft = make_draft()
    optimizer = build_optimizer(draft, lr=6e-4)
    for _ in range(100):
        draft.norm.weight.grad = torch.full_like(draft.norm.weight, 0.01)
        optimizer.step()
    assert draft.norm.weight[0].item() == pytest.approx(0.94, abs=0.002)
    state = optimizer.state[draft.norm.weight]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32


def test_w2_the_optimizer_takes_a_draft_and_nothing_else(
    make_target: Callable[..., Any], make_draft: Callable[..., Any]
) -> None:
    with pytest.raises(ModelInvalid, match="LlamaForCausalLM"):
        build_optimizer(make_target(), lr=1e-3)
    optimizer = build_optimizer(make_draft(), lr=1e-3)
    assert optimizer.defaults["betas"] == (0.9, 0.999) and optimizer.defaults["weight_decay"] == 0.0


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
def test_a_schedule_warms_up_to_its_peak_and_ends_at_its_floor(kind: Any) -> None:
    schedule = Schedule(kind, total_steps=100, warmup_fraction=0.1, floor=0.1)
    factors = [schedule.factor(step) for step in range(101)]
    assert factors[:10] == pytest.approx([(i + 1) / 11 for i in range(10)]) and factors[10] == 1.0
    assert all(b <= a for a, b in pairwise(factors[10:]))
    assert factors[100] == pytest.approx(1.0 if kind == "constant" else 0.1)
    if kind in ("constant", "wsd"):
        assert factors[80] == 1.0


def test_schedules_halfway() -> None:
    assert Schedule("cosine", 100, warmup_fraction=0.0).factor(50) == pytest.approx(0.5)
    assert Schedule("linear", 100, warmup_fraction=0.0).factor(25) == pytest.approx(0.75)
    assert Schedule("wsd", 100, warmup_fraction=0.0).factor(90) == pytest.approx(0.5)
    assert Schedule("cosine", 1, warmup_fraction=0.04).factor(0) == 1.0


def test_impossible_schedules_are_refused() -> None:
    for options in ({"kind": "step"}, {"total_steps": 0}, {"warmup_fraction": 1.5}, {"floor": -0.1}):
        with pytest.raises(ValueError):
            Schedule(**{"kind": "cosine", "total_steps": 10, **options})  # type: ignore[arg-type]


def test_the_learning_rate_is_set_on_every_group(make_draft: Callable[..., Any]) -> None:
    optimizer = build_optimizer(make_draft(), lr=1.0)
    lr = set_lr(optimizer, 6e-4, Schedule("linear", 10, warmup_fraction=0.0), 5)
    assert lr == pytest.approx(3e-4) and [g["lr"] for g in optimizer.param_groups] == [lr]


def parameters_with(*gradients: list[float] | None) -> list[nn.Parameter]:
    out = []
    for values in gradients:
        parameter = nn.Parameter(torch.zeros(len(values or [0.0])))
        parameter.grad = None if values is None else torch.tensor(values)
        out.append(parameter)
    return out


def test_n7_clipping_bounds_the_total_norm_and_reports_both() -> None:
    parameters = parameters_with([3.0, 0.0], None, [4.0])
    assert clip_gradients(parameters, 1.0) == (5.0, 1.0)
    assert torch.cat([p.grad for p in parameters if p.grad is not None]).tolist() == pytest.approx([0.6, 0.0, 0.8])
    assert clip_gradients(parameters, 2.0) == (pytest.approx(1.0), pytest.approx(1.0))


def test_a_norm_that_is_not_finite_is_reported_and_nothing_is_touched() -> None:
    parameters = parameters_with([math.inf], [1.0])
    before, after = clip_gradients(parameters, 1.0)
    assert before == after == math.inf and parameters[1].grad is not None and parameters[1].grad.item() == 1.0
    assert math.isnan(clip_gradients(parameters_with([math.nan]), 1.0)[0])
    assert clip_gradients(parameters_with(None), 1.0) == (0.0, 0.0)


def test_gradients_are_scaled_by_the_windows_weights() -> None:
    parameters = parameters_with([6.0], None)
    scale_gradients(parameters, 3.0)
    assert parameters[0].grad is not None and parameters[0].grad.item() == 2.0
    scale_gradients(parameters, 0.0)
    assert parameters[0].grad.item() == 2.0
