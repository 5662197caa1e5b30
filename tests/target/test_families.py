"""Decoders of many families go through one adapter, and what cannot be a target is refused with the reason."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from flowdflash.dflash.slots import TargetView
from flowdflash.errors import ModelInvalid
from flowdflash.items import StepRecord
from flowdflash.stage import OpenContext, PlanSummary
from flowdflash.stages.dflash_drafter import DFlashDrafter
from flowdflash.stages.transformers_target import TransformersTarget
from flowdflash.target.catalogue import config_facts
from flowdflash.target.load import load_target
from flowdflash.training.build import target_facts

from .models import batch_of, context, family_folder, problems, random_rows

LAYERS = (0, 2)
OF_ITS_OWN: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 48},
    "qwen3_moe": {"intermediate_size": 48},
    "gpt2": {"intermediate_size": 48, "rope_theta": 10000.0},
}
"""What a draft cannot copy from a target of these families."""


def target_of(ref: str, tmp_path: Path) -> TransformersTarget:
    options = {"layers": LAYERS, "dtype": "float32", "device": "cpu", "last_hidden": True}
    stage = TransformersTarget(TransformersTarget.Config(model=ref, **options))
    stage.open(context(tmp_path, tmp_path / "cache"))
    return stage


def drafter_of(ref: str, tmp_path: Path, **options: Any) -> DFlashDrafter:
    small = {"block_size": 4, "num_hidden_layers": 1, "precision": "float32", "device": "cpu", "mask_token_id": 260}
    drafter = DFlashDrafter(DFlashDrafter.Config(**{**small, **options}))
    facts = {"model": ref, "layers": LAYERS}
    drafter.open(OpenContext("drafter", tmp_path, tmp_path / "cache", facts=facts, plan=PlanSummary(1, 1, 1)))
    return drafter


@pytest.mark.parametrize(
    "family",
    ["llama", "padded", "llava", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "mixtral", "qwen3_moe", "gpt2"],
)
def test_a_draft_trains_for_a_target_of_every_family(tmp_path: Path, family: str) -> None:
    """The step compares the head with the target's own logits first."""
    ref = str(family_folder(family, tmp_path / "model"))
    target, rows = target_of(ref, tmp_path), random_rows([23, 14])
    together, alone = target.forward(batch_of(rows)), target.forward(batch_of(rows[1:]))
    for ours, theirs in ((together.features, alone.features), (together.last_hidden, alone.last_hidden)):
        torch.testing.assert_close(ours[1:, :14], theirs, atol=1e-4, rtol=0)
    drafter = drafter_of(ref, tmp_path, loss="kl", **OF_ITS_OWN.get(family, {}))
    assert together.probe is not None
    (record,) = drafter.step(together)
    assert isinstance(record, StepRecord) and math.isfinite(record.loss) and record.terms > 0 and not record.skipped
    trainer, loaded = drafter.trainer, load_target(ref, tmp_path, dtype="float32", device="cpu")
    logits = loaded.model(input_ids=torch.tensor(rows[:1]), use_cache=False).logits
    torch.testing.assert_close(trainer.full_head.logits(together.last_hidden[0]), logits[0], atol=1e-4, rtol=1e-4)
    assert torch.equal(trainer.embed, loaded.model.get_input_embeddings().weight)
    assert trainer.draft.config.vocab_size == loaded.vocab_size == (320 if family == "padded" else 272)


def test_w8_a_scaled_target_lends_its_raw_rows_in_training_and_in_serving(tmp_path: Path) -> None:
    """Gemma's embedding multiplies by the root of the width: no server tells a draft, so neither does training."""
    ref = str(family_folder("gemma", tmp_path / "model"))
    trainer = drafter_of(ref, tmp_path).trainer
    loaded = load_target(ref, tmp_path, dtype="float32", device="cpu")
    view, ids = TargetView(loaded.model), torch.arange(20)
    assert torch.equal(trainer.embed, view.embedding)
    torch.testing.assert_close(loaded.model.get_input_embeddings()(ids), trainer.embed[ids] * math.sqrt(32))
    states = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(trainer.full_head.logits(states), view.head(states))


def test_w8_a_soft_cap_is_trained_with_and_exported(tmp_path: Path) -> None:
    from flowdflash.dflash.export import config_from_zlab, zlab_config

    drafter = drafter_of(str(family_folder("gemma2", tmp_path / "model")), tmp_path, softmax="full")
    config = drafter.trainer.draft.config
    assert config.final_logit_softcapping == drafter.trainer.head.softcap == 2.0
    written = zlab_config(config)
    assert written["dflash_config"]["final_logit_softcapping"] == 2.0 and config_from_zlab(written) == config
    with pytest.raises(ModelInvalid, match="must be equal"):
        config_from_zlab({**written, "final_logit_softcapping": 3.0})


@pytest.mark.parametrize(
    ("family", "reason"),
    [("granite", "multiplies its logits"), ("t5", "has an encoder"), ("mamba", "recurrent state")],
)
def test_i3_what_cannot_be_a_target_is_refused_with_the_reason(tmp_path: Path, family: str, reason: str) -> None:
    ref = str(family_folder(family, tmp_path / "model"))
    with pytest.raises(ModelInvalid, match=f"cannot be a target: .*{reason}"):
        target_of(ref, tmp_path)
    if family == "mamba":  # its config does not say so
        return
    found, _ = problems(TransformersTarget(TransformersTarget.Config(model=ref, layers=LAYERS)))
    assert [path for path, _ in found] == ["model"] and reason in found[0][1]
    with pytest.raises(ModelInvalid, match=reason):
        drafter_of(ref, tmp_path)


def test_i3_layers_that_keep_a_state_are_refused_by_the_config_alone() -> None:
    facts = config_facts({"text_config": {"layer_types": ["linear_attention", "full_attention"]}})
    assert "linear_attention layers keep a state" in facts["unfit"]
    assert "unfit" not in config_facts({"layer_types": ["sliding_attention", "full_attention"], "logit_scale": 1.0})


def test_w1_a_head_with_a_bias_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match="output head has a bias"):
        drafter_of(str(family_folder("phi", tmp_path / "model")), tmp_path)


def test_what_a_draft_cannot_copy_must_be_said(tmp_path: Path) -> None:
    for family, missing in (("mixtral", "intermediate_size"), ("gpt2", "intermediate_size")):
        ref = str(family_folder(family, tmp_path / family))
        with pytest.raises(ModelInvalid, match=f"set {missing}"):
            drafter_of(ref, tmp_path)
    with pytest.raises(ModelInvalid, match="set rope_theta"):
        drafter_of(ref, tmp_path, intermediate_size=48)
    with pytest.raises(ModelInvalid, match=r"gelu_new, the draft's silu; set init: random"):
        drafter_of(ref, tmp_path, init="target", **OF_ITS_OWN["gpt2"])


def test_defaults_that_a_config_file_leaves_out_are_known_at_run_time(tmp_path: Path) -> None:
    folder = family_folder("llava", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]["num_key_value_heads"], config["text_config"]["rms_norm_eps"]
    (folder / "config.json").write_text(json.dumps(config))
    facts = target_facts(str(folder), tmp_path, context(tmp_path, tmp_path).report)
    assert (facts["num_kv_heads"], facts["rms_norm_eps"], facts["num_layers"]) == (4, 1e-6, 4)


def test_rotary_bases_by_kind_of_layer_give_that_of_the_layers_that_see_all() -> None:
    kinds = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6}}
    assert config_facts({"rope_parameters": kinds})["rope_theta"] == 1e6
    assert config_facts({"rope_parameters": {"rope_theta": 5e5}})["rope_theta"] == 5e5
