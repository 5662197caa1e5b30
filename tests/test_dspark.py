"""DSpark drafts: labels, the two heads, the loss by hand, and all that a kind of draft must do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import flowdflash_dspark
import pytest
import torch
from cli_runs import TINY
from draft_kinds import SHAPE, decodes_losslessly, learns, resumes_exactly, trains_and_exports
from drafter_fakes import batch, opened
from flowdflash_dspark import DSparkConfig, DSparkDrafter
from flowdflash_dspark.draft import DSparkDraft
from torch import Tensor

from flowdflash import stages
from flowdflash.config.check import load
from flowdflash.dflash.config import DraftConfig, tensor_shapes
from flowdflash.dflash.export import config_from_zlab, zlab_config
from flowdflash.dflash.head import Head
from flowdflash.dflash.loss import block_labels
from flowdflash.dflash.optim import MuonAdamW
from flowdflash.dflash.speculators import speculators_config
from flowdflash.dflash.training import LossOptions
from flowdflash.doctor import overfit
from flowdflash.errors import ModelInvalid
from flowdflash.plugin.loader import load_plugins
from flowdflash.stage import Check, SilentReport

CONFIG = DSparkConfig(**SHAPE, markov_rank=4)
HEADS = {
    "markov_head.markov_w1.weight": (6, 4),
    "markov_head.markov_w2.weight": (6, 4),
    "confidence_head.proj.weight": (1, 36),
    "confidence_head.proj.bias": (1,),
}


def draft_of(**changes: Any) -> DSparkDraft:
    return DSparkConfig(**{**SHAPE, "markov_rank": 4, **changes}).new_draft()


def test_its_tensors_are_those_of_dflash_and_of_the_two_heads() -> None:
    shapes = tensor_shapes(CONFIG)
    assert {name: tuple(t.shape) for name, t in CONFIG.new_draft().state_dict().items()} == shapes
    assert shapes == {**tensor_shapes(DraftConfig(**SHAPE)), **HEADS}


def test_a_block_of_b_slots_drafts_b_tokens(tmp_path: Path) -> None:
    assert (CONFIG.span(4), DraftConfig(**SHAPE).span(4)) == (5, 4)
    drafter = opened(tmp_path, cls=DSparkDrafter, loss="dspark")
    (record,) = drafter.step(batch(0))
    assert len(record.accuracy_per_slot) == 4
    assert drafter.check(Check("drafter", {"last_hidden": True}))["span"] == 5


def test_the_overfit_gate_wants_all_of_them_in_a_pass(tmp_path: Path) -> None:
    changes = ("stages.drafter.type=dspark", "stages.target.last_hidden=true")
    graph = load(TINY, load_plugins(builtin=[stages, flowdflash_dspark]), overrides=changes).graph
    assert overfit(graph, steps=1, new_tokens=8, cache_dir=tmp_path, report=SilentReport()).span == 5


def test_slot_k_learns_the_token_at_anchor_k_plus_1_after_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, item, seen = opened(tmp_path, cls=DSparkDrafter), batch(0, (12,), supervised=8), {}

    def look(self: DSparkDraft, hidden: Tensor, head: Head, labels: Tensor, previous: Tensor, **more: Any) -> Any:
        seen.update(labels=labels, previous=previous, taught=more["taught"])
        return found(self, hidden, head, labels, previous, **more)

    found = DSparkDraft.slot_losses
    monkeypatch.setattr(DSparkDraft, "slot_losses", look)
    ids = torch.from_numpy(item.tokens.input_ids[0])
    anchors, keep = torch.tensor([[4, 9]]), torch.ones(1, 2, dtype=torch.bool)
    drafter.trainer.backward(item, anchors, keep)
    places = torch.tensor([5, 6, 7, 8, 10, 11])
    assert seen["labels"].tolist() == ids[places].tolist()
    assert seen["previous"].tolist() == ids[places - 1].tolist()
    assert torch.equal(seen["taught"], item.last_hidden[0, places - 1])


def test_only_labels_before_the_first_unsupervised_token_count_and_weights_fall_from_the_anchors_slot_on() -> None:
    ids, keep = torch.arange(10)[None], torch.ones(1, 1, dtype=torch.bool)
    mask = torch.ones(1, 10, dtype=torch.bool)
    mask[0, 5] = False
    _, valid = block_labels(ids, mask, torch.tensor([10]), torch.tensor([[2]]), keep, block_size=CONFIG.span(4))
    assert valid.tolist() == [[[True, True, False, False]]]
    weights = LossOptions().block_weights(4, CONFIG.span(4))(torch.zeros(4), torch.ones(4).bool(), torch.ones(4).bool())
    assert weights.tolist() == pytest.approx([math.exp(-k / 4) for k in range(4)])


def test_a_token_before_adds_a_row_of_the_product_and_slots_are_drafted_in_turn() -> None:
    draft = draft_of(markov_rank=6, final_logit_softcapping=2.0)
    with torch.no_grad():
        # Each token is followed by the next one.
        draft.markov_head.markov_w1.weight.copy_(torch.eye(6))
        draft.markov_head.markov_w2.weight.copy_(torch.eye(6).roll(1, dims=0))
    logits, seen = torch.zeros(2, 4, 6), []
    logits[0, 1, 2] = 100.0  # bounded to 2, it outweighs the 1 of the next token

    def pick(scores: Tensor, at: int) -> Tensor:
        seen.append((at, scores[0, 0].tolist()))
        return scores.argmax(dim=-1)

    assert draft.draft_tokens(logits, torch.tensor([3, 0]), pick).tolist() == [[4, 2, 3, 4], [1, 2, 3, 4]]
    assert seen[1] == (1, [0, 0, 2, 0, 0, 1]) and [at for at, _ in seen] == [0, 1, 2, 3]


def test_the_loss_by_hand() -> None:
    draft = draft_of(hidden_size=2, vocab_size=6)
    head = Head(torch.eye(6)[:, :2].contiguous()).restricted(torch.tensor([0, 1]))
    with torch.no_grad():
        for parameter in (*draft.markov_head.parameters(), *draft.confidence_head.parameters()):
            parameter.zero_()
        draft.markov_head.markov_w1.weight[3] = torch.tensor([1.0, 0, 0, 0])
        draft.markov_head.markov_w2.weight[0, 0] = math.log(3)
        draft.confidence_head.proj.weight[0, 2] = math.log(3)
    hidden, taught = torch.zeros(2, 2), torch.tensor([[math.log(3), 0.0]] * 2)
    labels, previous = torch.tensor([0, 1]), torch.tensor([2, 3])
    loss, ce, correct = draft.slot_losses(hidden, head, labels, previous, taught=taught, kind="dspark", chunk_slots=0)
    # p is (3/4, 1/4). After token 2 q is (1/2, 1/2), and the confidence 1/2; after token 3 q is p, and it is 3/4.
    first = 0.1 * math.log(2) + 0.9 * 0.5 - 0.75 * math.log(0.5) - 0.25 * math.log(0.5)
    second = 0.1 * math.log(4) + 0.9 * 0.0 - math.log(0.75)
    assert loss.tolist() == pytest.approx([first, second], abs=1e-6)
    assert ce.tolist() == pytest.approx([math.log(2), math.log(4)]) and not ce.requires_grad
    assert correct.tolist() == [True, False]


def losses(draft: DSparkDraft, head: Head, chunk: int) -> tuple[Tensor, list[Tensor]]:
    rng = torch.Generator().manual_seed(1)
    hidden, taught = (torch.randn(7, 32, generator=rng, dtype=torch.float64) for _ in range(2))
    labels, previous = (torch.randint(0, 5, (7,), generator=rng) for _ in range(2))
    hidden.requires_grad_()
    loss, _, _ = draft.slot_losses(hidden, head, labels, previous, taught=taught, kind="dspark", chunk_slots=chunk)
    weights = [*draft.markov_head.parameters(), *draft.confidence_head.parameters()]
    return loss, list(torch.autograd.grad(loss.square().sum(), [hidden, *weights]))


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("seen", [None, [0, 1, 2, 3, 4]])
def test_chunks_change_neither_loss_nor_gradient(softcap: float | None, seen: list[int] | None) -> None:
    draft = draft_of().double()
    rows = torch.randn(6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    head = Head(rows, softcap=softcap)
    head = head if seen is None else head.restricted(torch.tensor(seen))
    loss, gradients = losses(draft, head, 0)
    assert all(bool((g != 0).any()) for g in gradients)
    for chunk in (1, 3, 7, 100):
        again, others = losses(draft, head, chunk)
        torch.testing.assert_close(again, loss, rtol=1e-13, atol=0)
        for one, other in zip(gradients, others, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-15)


def test_d6_a_batch_without_a_label_gives_gradients_of_zero(tmp_path: Path) -> None:
    drafter = opened(tmp_path, cls=DSparkDrafter)
    anchors, keep = torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, 1, dtype=torch.bool)
    assert drafter.trainer.backward(batch(0), anchors, keep).loss == 0
    assert all(p.grad is not None and not bool(p.grad.any()) for p in drafter.trainer.draft.parameters())


def test_the_last_hidden_states_are_needed(tmp_path: Path) -> None:
    check = Check("drafter", {"last_hidden": False})
    DSparkDrafter(DSparkDrafter.Config()).check(check)
    assert [(p.path, p.hint) for p in check.problems] == [("loss", "set last_hidden: true in the target")]
    with pytest.raises(ModelInvalid, match="last hidden states"):
        draft_of().slot_losses(*[torch.zeros(0)] * 4, taught=None, kind="dspark", chunk_slots=0)  # type: ignore[arg-type]


def test_muon_leaves_the_heads_to_adamw(tmp_path: Path) -> None:
    trainer = opened(tmp_path, cls=DSparkDrafter, optimizer="muon", init="target", num_hidden_layers=2).trainer
    assert isinstance(trainer.optimizer, MuonAdamW)
    matrices = {id(p) for p in trainer.optimizer.param_groups[0]["params"]}
    left = [name for name, p in trainer.draft.named_parameters() if p.ndim == 2 and id(p) not in matrices]
    assert left == [name for name in HEADS if not name.endswith("bias")] and matrices


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"markov_head_type": "gated"}, "markov_head_type"),
        ({"enable_confidence_head": False}, "enable_confidence_head"),
        ({"markov_rank": 0}, "markov_rank"),
        ({"markov_rank": None}, "markov_rank"),
        ({"mask_token_id": 4}, "mask_token_id"),
        ({"architectures": ["DFlashDraftModel", "Other"]}, ""),
        ({"architectures": ["Qwen3DSparkModel2"]}, "Qwen3DSparkModel2"),
    ],
)
def test_a_config_is_read_strictly(change: dict[str, Any], named: str) -> None:
    raw = zlab_config(CONFIG)
    assert config_from_zlab(raw) == CONFIG
    if not named:
        assert type(config_from_zlab({**raw, **change})) is DraftConfig
        return
    with pytest.raises(ModelInvalid, match=named):
        config_from_zlab({**raw, **change})


def test_there_is_no_such_draft_in_the_format_of_speculators_and_none_goes_on_as_another_kind(tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match="not for Qwen3DSparkModel: export it as zlab"):
        speculators_config(CONFIG, "owner/target", [])
    (checkpoint,) = opened(tmp_path, due=lambda step, reason: True).begin()
    with pytest.raises(ModelInvalid, match="architecture DFlashDraftModel instead of Qwen3DSparkModel"):
        opened(tmp_path, cls=DSparkDrafter).resume(checkpoint)


def test_i1_decoding_is_lossless_and_accepts_what_teacher_forcing_says(tmp_path: Path) -> None:
    decodes_losslessly(CONFIG, tmp_path)


def test_it_learns_a_batch_by_heart(tmp_path: Path) -> None:
    learns(DSparkDrafter, tmp_path)


def test_n10_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    resumes_exactly(DSparkDrafter, tmp_path, markov_rank=4)


def test_it_trains_is_measured_and_is_exported_with_its_own_keys(tmp_path: Path) -> None:
    raw = trains_and_exports(flowdflash_dspark, tmp_path, {"last_hidden": True}, type="dspark", markov_rank=8)
    assert raw["architectures"] == ["Qwen3DSparkModel"]
    own = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    assert [raw[name] for name in own] == [8, "vanilla", True, True]
    assert (raw["mask_token_id"], raw["target_layer_ids"]) == (127, raw["dflash_config"]["target_layer_ids"])
