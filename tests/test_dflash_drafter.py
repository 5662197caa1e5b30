"""The drafter stage: its window, its records, its checkpoints, and what it refuses."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafter_fakes import FACTS, LAYERS, MASK, TOY, batch, opened, records
from pydantic import ValidationError

from flowdflash.errors import ModelInvalid
from flowdflash.items import Checkpoint, FeatureBatch, HeadProbe, TokenBatch
from flowdflash.stage import Check, Vocabulary
from flowdflash.stages.dflash_drafter import DFlashDrafter


def test_a_window_gives_one_record_with_the_facts_of_its_batches(tmp_path: Path) -> None:
    drafter = opened(tmp_path, accumulate=2)
    assert records(drafter.step(batch(0, bucket=1))) == []
    (record,) = records(drafter.step(batch(1, (20, 7), bucket=3)))
    assert (record.step, record.batches, record.samples, record.seqs) == (1, 2, 4, (0, 1))
    assert record.buckets == {"1": 1, "3": 1} and set(record.loss_per_bucket) == {"1", "3"}
    assert (record.length_max, record.length_mean, record.tokens, record.padded_tokens) == (20, 12.0, 48, 64)
    assert record.padding == pytest.approx(0.25)
    assert record.terms > 0 and 0 < record.grad_norm_clipped <= 1.0 + 1e-6 <= record.grad_norm + 1e-6
    assert len(record.accuracy_per_slot) == 3 and record.skipped == ""


def test_the_last_window_of_an_epoch_is_closed_though_it_is_not_full(tmp_path: Path) -> None:
    drafter = opened(tmp_path, accumulate=4)
    closed = [records(drafter.step(batch(i, last=i == 6))) for i in range(7)]
    assert [len(r) for r in closed] == [0, 0, 0, 1, 0, 0, 1]
    assert [r[0].batches for r in closed if r] == [4, 3]


def test_n4_two_micro_batches_step_like_one_batch_of_both(tmp_path: Path) -> None:
    """Normalised over the window's terms, never a mean of means (N4): very unequal rows, every candidate an anchor."""
    short, long = batch(0, (12, 12), supervised=3), batch(1, (12, 12), supervised=11)
    join = np.concatenate
    tokens = TokenBatch(
        short.info,
        join([short.tokens.input_ids, long.tokens.input_ids]),
        join([short.tokens.loss_mask, long.tokens.loss_mask]),
        join([short.tokens.lengths, long.tokens.lengths]),
    )
    both_info = replace(
        short.info,
        sample_ids=short.info.sample_ids + long.info.sample_ids,
        lengths=(12,) * 4,
        supervised=(3, 3, 11, 11),
    )
    joined = FeatureBatch(replace(tokens, info=both_info), torch.cat([short.features, long.features]), LAYERS)
    split, whole = opened(tmp_path, accumulate=2, num_anchors=20), opened(tmp_path, accumulate=1, num_anchors=20)
    (first,) = records([*split.step(short), *split.step(long)])
    (second,) = records(whole.step(joined))
    assert first.loss == pytest.approx(second.loss, rel=1e-5) and first.grad_norm == pytest.approx(
        second.grad_norm, rel=1e-4
    )
    assert first.terms == second.terms


@pytest.mark.parametrize("policy", ["stop", "skip_step"])
def test_n1_a_loss_that_is_not_finite_never_reaches_the_weights(tmp_path: Path, policy: str) -> None:
    drafter = opened(tmp_path, on_nonfinite=policy, max_skipped=2)
    before = {k: v.clone() for k, v in drafter.trainer.draft.state_dict().items()}
    bad = batch(0)
    bad.features[:, 2:] = math.inf
    if policy == "stop":
        with pytest.raises(FloatingPointError, match="samples \\[0, 1\\]"):
            list(drafter.step(bad))
    else:
        (record,) = records(drafter.step(bad))
        assert record.skipped and drafter.summary()["steps_skipped"] == 1
        (fine,) = records(drafter.step(batch(1)))
        assert not fine.skipped
        again = batch(2)
        again.features[:] = math.nan
        assert records(drafter.step(again))[0].skipped
        with pytest.raises(FloatingPointError, match=r"2 in a row; checkpoints: none was taken"):
            list(drafter.step(again))
        return
    assert all(torch.equal(before[k], v) for k, v in drafter.trainer.draft.state_dict().items())


def test_a_window_without_a_supervised_slot_takes_no_step_and_is_counted(tmp_path: Path) -> None:
    drafter = opened(tmp_path)
    before = {k: v.clone() for k, v in drafter.trainer.draft.state_dict().items()}
    (record,) = records(drafter.step(batch(0, supervised=0)))
    assert record.terms == 0 and math.isnan(record.loss) and "no supervised slot" in record.skipped
    assert drafter.summary()["samples_without_anchor"] == 2
    assert all(torch.equal(before[k], v) for k, v in drafter.trainer.draft.state_dict().items())


def test_a_checkpoint_is_a_copy_that_training_does_not_touch(tmp_path: Path) -> None:
    drafter = opened(tmp_path, due=lambda step, reason: reason == "every" and step == 1)
    items = list(drafter.step(batch(0)))
    (checkpoint,) = [i for i in items if isinstance(i, Checkpoint)]
    kept = {k: v.clone() for k, v in checkpoint.draft_tensors.items()}
    moments = checkpoint.state["optimizer"]["state"][0]["exp_avg"].clone()
    (record,) = records(drafter.step(batch(1)))
    assert record.checkpoint_pause_secs >= checkpoint.pause_secs * 0.5 > 0
    assert all(torch.equal(kept[k], v) for k, v in checkpoint.draft_tensors.items())
    assert torch.equal(moments, checkpoint.state["optimizer"]["state"][0]["exp_avg"])
    assert not all(torch.equal(kept[k], v) for k, v in drafter.trainer.draft.state_dict().items())
    assert checkpoint.ledger == {"prefix": 1, "extras": []} and checkpoint.step == 1


def test_14_an_export_says_with_which_template_options_the_draft_was_trained(tmp_path: Path) -> None:
    for options, told in (({}, {}), ({"thinking": False}, {"template_options": {"thinking": False}})):
        drafter = opened(tmp_path, due=lambda *_: True, facts={**FACTS, "template_options": options})
        (checkpoint,) = [i for i in drafter.step(batch(0)) if isinstance(i, Checkpoint)]
        assert checkpoint.draft_config["flowdflash"] == {"target": TOY, "step": 1, **told}


def test_an_interrupted_run_drops_the_open_window_and_a_finished_one_closes_it(tmp_path: Path) -> None:
    for reason, steps, consumed in (("interrupted", 1, 2), ("final", 2, 3)):
        drafter = opened(tmp_path, accumulate=2, due=lambda step, why, reason=reason: why == reason)
        for i in range(3):
            list(drafter.step(batch(i)))
        (checkpoint,) = [i for i in drafter.finish(reason) if isinstance(i, Checkpoint)]  # type: ignore[arg-type]
        assert (checkpoint.step, checkpoint.ledger["prefix"], checkpoint.reason) == (steps, consumed, reason)


def test_n10_a_drafter_that_was_resumed_goes_on_as_if_never_interrupted(tmp_path: Path) -> None:
    """Weights, moments, step of the schedule and ledger; also the counters (N10)."""
    due = {"due": lambda step, reason: reason == "interrupted"}
    straight, first, second = opened(tmp_path), opened(tmp_path, **due), opened(tmp_path)
    whole = [record for i in range(4) for record in records(straight.step(batch(i)))]
    for i in range(2):
        list(first.step(batch(i)))
    (checkpoint,) = [item for item in first.finish("interrupted") if isinstance(item, Checkpoint)]
    second.resume(checkpoint)
    rest = [record for i in range(2, 4) for record in records(second.step(batch(i)))]
    plain = [(r.step, r.loss, r.lr, r.grad_norm, r.seqs) for r in (*whole[2:], *rest)]
    assert plain[:2] == plain[2:]
    pairs = zip(straight.trainer.draft.parameters(), second.trainer.draft.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert second.consumed.as_dict() == {"prefix": 4, "extras": []}
    assert all(torch.equal(checkpoint.draft_tensors[k], v) for k, v in first.trainer.weights().items())


@pytest.mark.parametrize("entry", ["optimizer", "steps", "skipped_in_row"])
def test_27_a_checkpoint_that_lacks_an_entry_is_refused_by_name(tmp_path: Path, entry: str) -> None:
    drafter = opened(tmp_path, due=lambda step, reason: True)
    (checkpoint,) = drafter.begin()
    assert isinstance(checkpoint, Checkpoint)
    with pytest.raises(ModelInvalid, match=f"lacks {entry}"):
        drafter.resume(replace(checkpoint, state={k: v for k, v in checkpoint.state.items() if k != entry}))


def test_a_checkpoint_of_another_draft_is_refused(tmp_path: Path) -> None:
    (checkpoint,) = opened(tmp_path, due=lambda step, reason: True).begin()
    assert isinstance(checkpoint, Checkpoint)
    with pytest.raises(ModelInvalid, match="block_size 4 instead of 6"):
        opened(tmp_path, block_size=6).resume(checkpoint)


def test_what_is_consumed_out_of_turn_is_in_the_ledger_until_the_prefix_reaches_it(tmp_path: Path) -> None:
    drafter = opened(tmp_path)
    for seq, ledger in ((0, (1, [])), (3, (1, [3])), (2, (1, [2, 3])), (1, (4, []))):
        list(drafter.step(batch(seq)))
        assert drafter.consumed.as_dict() == dict(zip(("prefix", "extras"), ledger, strict=True))


def test_a_checkpoint_that_is_due_at_the_last_step_is_taken_there_and_not_only_at_the_end(tmp_path: Path) -> None:
    """Two sinks: one wants every second step and nothing at the end, the other the end alone."""
    drafter = opened(tmp_path, steps=2, due=lambda step, why: why == "final" or (why == "every" and step == 2))
    items = [*drafter.step(batch(0)), *drafter.step(batch(1, last=True)), *drafter.finish("final")]
    assert [(i.step, i.reason) for i in items if isinstance(i, Checkpoint)] == [(2, "every"), (2, "final")]


def graph_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(o), torch.Tensor) and o.grad_fn is not None for o in gc.get_objects())


def test_56_no_graph_lives_on_after_a_micro_batch(tmp_path: Path) -> None:
    drafter, before = opened(tmp_path, accumulate=4), graph_tensors()
    for i in range(3):
        list(drafter.step(batch(i)))
        assert graph_tensors() == before


def test_w1_a_head_that_is_not_the_targets_is_refused(tmp_path: Path) -> None:
    drafter = opened(tmp_path)
    hidden = torch.randn(3, 32)
    right = HeadProbe(hidden, hidden @ drafter.trainer.full_head.weight.T)
    wrong = HeadProbe(hidden, hidden @ torch.randn(64, 32).T)
    good, bad = batch(0), batch(1)
    list(drafter.step(replace(good, probe=right)))
    with pytest.raises(ModelInvalid, match="not the target's"):
        list(drafter.step(replace(bad, probe=wrong)))


def test_w2_nothing_of_the_target_is_trained(tmp_path: Path) -> None:
    drafter = opened(tmp_path)
    embed, head = drafter.trainer.embed.clone(), drafter.trainer.full_head.weight.clone()
    for i in range(3):
        list(drafter.step(batch(i)))
    assert torch.equal(embed, drafter.trainer.embed) and torch.equal(head, drafter.trainer.full_head.weight)
    trained = {id(p) for group in drafter.trainer.optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in drafter.trainer.draft.parameters()}


def test_w3_a_mask_token_that_occurs_in_the_data_or_means_something_else_is_refused(tmp_path: Path) -> None:
    seen = Vocabulary(np.array([1, 2, 7, MASK]), np.array([1, 2]))
    with pytest.raises(ModelInvalid, match="mask token 63 occurs in the training data"):
        opened(tmp_path, vocabulary=seen)
    with pytest.raises(ModelInvalid, match="not a row"):
        opened(tmp_path, mask_token_id=64)


def test_features_of_other_layers_are_refused(tmp_path: Path) -> None:
    drafter = opened(tmp_path)
    with pytest.raises(ModelInvalid, match="layers"):
        list(drafter.step(replace(batch(0), layers=(1, 2))))


def test_the_softmax_over_seen_tokens_needs_to_know_them(tmp_path: Path) -> None:
    drafter = opened(tmp_path, softmax="seen", vocabulary=Vocabulary(np.arange(60), np.arange(1, 60)))
    assert len(drafter.trainer.head.weight) == 60
    (record,) = records(drafter.step(batch(0)))
    assert math.isfinite(record.loss)
    with pytest.raises(ModelInvalid, match="softmax"):
        opened(tmp_path, softmax="seen")


def test_max_steps_ends_the_run_and_bounds_the_schedule(tmp_path: Path) -> None:
    drafter = opened(tmp_path, max_steps=2, steps=50)
    list(drafter.step(batch(0)))
    assert not drafter.done
    list(drafter.step(batch(1)))
    assert drafter.done and drafter.total_steps == 2


def problems(facts: dict[str, Any], **options: Any) -> list[str]:
    check = Check("drafter", facts)
    DFlashDrafter(DFlashDrafter.Config(**options)).check(check)
    return [p.path for p in check.problems]


def test_check_refuses_geometry_that_cannot_be() -> None:
    assert problems({"vocab_size": 64}, mask_token_id=64) == ["mask_token_id"]
    assert problems({"num_layers": 2}, init="target", num_hidden_layers=3) == ["init"]
    assert problems({"max_length": 8}, block_size=16) == ["block_size"]
    assert problems({"vocab_size": 64, "num_layers": 4, "max_length": 64}) == []


def test_check_refuses_an_option_without_effect_and_a_backend_without_a_device() -> None:
    assert problems({}, max_skipped=3) == ["max_skipped"]
    assert problems({}, max_skipped=3, on_nonfinite="skip_step") == []
    assert problems({}, attention="flex", device="cpu") == ["attention"]


@pytest.mark.parametrize(
    "options",
    [
        {"device": "gpu"},
        {"device": "cuda:1,cuda:2"},
        {"betas": (0.9, 1.0)},
        {"head_dim": 7},
        {"num_attention_heads": 6, "num_key_value_heads": 4},
        {"gamma": 0.0},
    ],
)
def test_options_that_could_never_train_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(options))):
        DFlashDrafter.Config(**options)


def test_layers_follow_from_the_model_where_no_stage_could_tell_them_beforehand(tmp_path: Path) -> None:
    """A Hugging Face id that is not in the catalogue: the target stage knows how many layers, not which."""
    drafter = opened(tmp_path, facts={"model": TOY, "num_features": 2})
    assert drafter.trainer.draft.config.target_layer_ids == LAYERS


def test_flex_is_refused_where_it_has_no_backward(tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match="flex cannot train on cpu"):
        opened(tmp_path, attention="flex", device="auto")


def test_a_schedule_that_falls_needs_to_know_where_it_ends(tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match="set max_steps"):
        opened(tmp_path, steps=0)
    assert opened(tmp_path, steps=0, schedule="constant").total_steps == 0
