"""Losses, optimizers and precision of the drafter, as its options choose them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafter_fakes import batch, opened, records

from flowdflash.dflash.optim import MuonAdamW
from flowdflash.errors import ModelInvalid
from flowdflash.items import Checkpoint
from flowdflash.stage import Check, Vocabulary
from flowdflash.stages.dflash_drafter import DFlashDrafter


def weights_after(drafter: DFlashDrafter, seqs: Any) -> list[torch.Tensor]:
    for seq in seqs:
        list(drafter.step(batch(seq)))
    return [p.detach().clone() for p in drafter.trainer.draft.parameters()]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def problems(facts: dict[str, Any], *, complete: bool = True, **options: Any) -> list[tuple[str, str]]:
    check = Check("drafter", facts, complete=complete)
    DFlashDrafter(DFlashDrafter.Config(**options)).check(check)
    return [(p.path, p.severity) for p in check.problems]


@pytest.mark.parametrize(
    "options",
    [{"loss": "kl"}, {"loss": "tv"}, {"weights": "dpace"}, {"weights": "dpace", "alpha": 0.9}, {"weights": "auf"}],
)
def test_loss_and_weights_are_those_that_the_options_name(tmp_path: Path, options: dict[str, Any]) -> None:
    (record,), (plain,) = (records(opened(tmp_path, **o).step(batch(0))) for o in (options, {}))
    assert record.loss != plain.loss and record.accuracy == plain.accuracy and record.terms == plain.terms


def test_a_distilled_loss_is_zero_for_a_draft_that_says_what_the_target_says(tmp_path: Path) -> None:
    drafter = opened(tmp_path, loss="kl", softmax="full")
    with torch.no_grad():
        drafter.trainer.draft.norm.weight.zero_()
    given = batch(0)
    (record,) = records(drafter.step(replace(given, last_hidden=torch.zeros_like(given.last_hidden))))
    assert record.loss == pytest.approx(0.0, abs=1e-6) and record.terms > 0


def test_distillation_is_refused_without_the_targets_last_states(tmp_path: Path) -> None:
    for loss in ("kl", "tv"):
        assert problems({}, loss=loss) == problems({"last_hidden": False}, loss=loss) == [("loss", "error")]
        assert problems({"last_hidden": True}, loss=loss) == problems({}, complete=False, loss=loss) == []
    assert problems({"last_hidden": True}) == [("loss", "warning")]
    with pytest.raises(ModelInvalid, match="kl needs the last hidden states"):
        list(opened(tmp_path, loss="kl").step(replace(batch(0), last_hidden=None)))


def test_an_option_of_other_weights_is_refused() -> None:
    assert problems({}, weights="auf", gamma=4.0) == [("gamma", "error")]
    assert problems({}, weights="decay", alpha=0.3) == [("alpha", "error")]
    assert problems({}, weights="dpace", alpha=0.3) == problems({}, gamma="none") == []


def test_n10_a_resumed_run_with_muon_goes_on_bit_for_bit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": "muon", "lr": 1e-2, "weight_decay": 0.1}
    straight, first, second = (opened(tmp_path, due=lambda step, why: why == "interrupted", **options) for _ in "abc")
    whole = weights_after(straight, range(4))
    half = weights_after(first, range(2))
    (checkpoint,) = first.finish("interrupted")
    assert isinstance(checkpoint, Checkpoint)
    second.resume(checkpoint)
    assert same(weights_after(second, range(2, 4)), whole) and not same(half, whole)
    assert isinstance(second.trainer.optimizer, MuonAdamW)
    with pytest.raises(ModelInvalid, match="not of this draft"):
        opened(tmp_path).resume(checkpoint)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_n1_weights_and_moments_are_fp32_where_the_forward_is_bf16(tmp_path: Path, optimizer: str) -> None:
    drafter = opened(tmp_path, precision="bfloat16", optimizer=optimizer, due=lambda step, why: why == "every")
    *_, checkpoint = drafter.step(batch(0))
    assert isinstance(checkpoint, Checkpoint) and drafter.trainer.dtype is torch.bfloat16
    slots = checkpoint.state["optimizer"]["state"].values()
    held = [*checkpoint.draft_tensors.values(), *(value for slot in slots for value in slot.values())]
    assert {tensor.dtype for tensor in held} == {torch.float32} and len(slots) == len(checkpoint.draft_tensors)


def patched(monkeypatch: pytest.MonkeyPatch, call: Any) -> list[dict[str, Any]]:
    """Put ``call(function, *args)`` in the place of what torch compiles; returns the options of each compilation."""
    compiled: list[dict[str, Any]] = []

    def compile_(function: Any, **options: Any) -> Any:
        compiled.append(options)
        return lambda *args, **kwargs: call(function, *args, **kwargs)

    monkeypatch.setattr(torch, "compile", compile_)
    return compiled


def test_a_draft_is_compiled_when_it_opens_for_one_row_and_for_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []

    def called(function: Any, embeds: torch.Tensor, *args: Any) -> Any:
        rows.append(len(embeds))
        return function(embeds, *args)

    compiled = patched(monkeypatch, called)
    drafter = opened(tmp_path, compile=True)
    assert compiled == [{"dynamic": True}] and rows == [2, 1]
    assert all(p.grad is None for p in drafter.trainer.draft.parameters())
    plain = opened(tmp_path)
    assert same(weights_after(drafter, range(2)), weights_after(plain, range(2))) and rows == [2, 1, 2, 2]
    assert drafter.trainer.weights().keys() == plain.trainer.weights().keys()


def test_a_draft_is_compiled_whatever_tokens_its_softmax_runs_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched(monkeypatch, lambda function, *args: function(*args))
    unseen = Vocabulary(np.arange(3, 20), np.arange(3, 20))
    drafter = opened(tmp_path, compile=True, softmax="seen", vocabulary=unseen)
    assert drafter.trainer.head.ids is not None and 0 not in drafter.trainer.head.ids


def test_what_would_be_compiled_anew_for_every_batch_is_refused() -> None:
    assert problems({"packed": True}, compile=True) == [("compile", "error")]


def test_a_machine_that_cannot_compile_says_so_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: Any, *args: Any) -> Any:
        raise RuntimeError("no C++ compiler")

    patched(monkeypatch, broken)
    with pytest.raises(ModelInvalid, match=r"compile: true does not work here: RuntimeError: no C\+\+"):
        opened(tmp_path, compile=True)
