"""The format of ``speculators``: exact keys, layers counted in its way, strict reading."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flowdflash.dflash.config import DraftConfig, tensor_shapes
from flowdflash.dflash.importing import load_draft
from flowdflash.dflash.speculators import config_from_speculators, export_speculators, speculators_config
from flowdflash.errors import ModelInvalid

Make = Callable[..., Any]


def foreign(config: DraftConfig, **changes: Any) -> dict[str, Any]:
    """A config as its own writer leaves it: without the depth of the target."""
    raw = json.loads(json.dumps(speculators_config(config, "owner/tiny", ["LlamaForCausalLM"])))
    del raw["num_target_layers"]
    return {**raw, **changes}


def test_the_config_holds_every_key_that_a_server_reads(config: DraftConfig) -> None:
    full = replace(config, eos_token_id=(2, 7), bos_token_id=1, pad_token_id=0)
    written = speculators_config(full, "owner/tiny", ["LlamaForCausalLM"], provenance={"target": "tiny"})
    nested = written.pop("transformer_layer_config")
    assert written == {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 3,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "owner/tiny", "architectures": ["LlamaForCausalLM"]},
        },
        "draft_vocab_size": 272,
        "block_size": 4,
        "aux_hidden_state_layer_ids": [1, 3],
        "mask_token_id": 260,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "num_target_layers": 4,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "flowdflash": {"target": "tiny"},
    }
    assert nested["model_type"] == "qwen3" and nested["layer_types"] == ["full_attention"] * 2
    assert nested["rope_theta"] == nested["rope_parameters"]["rope_theta"] == 10000.0
    assert not {"block_size", "dflash_config", "num_target_layers", "architectures"} & nested.keys()
    assert config_from_speculators({**written, "transformer_layer_config": nested}) == full


def test_l5_its_layer_ids_are_those_of_the_states_that_enter_a_layer(config: DraftConfig, make_target: Make) -> None:
    target, seen = make_target(1).float(), {}
    for i, layer in enumerate(target.model.layers):
        layer.register_forward_pre_hook(lambda _, args, i=i: seen.update({("enters", i): args[0]}))
        layer.register_forward_hook(lambda _, args, out, i=i: seen.update({("leaves", i): out}))
    target(torch.tensor([[3, 1, 4]]))
    ids = speculators_config(config, "owner/tiny", [])["aux_hidden_state_layer_ids"]
    for layer, capture in zip(config.target_layer_ids, ids, strict=True):
        assert torch.equal(seen["leaves", layer], seen["enters", capture])
        assert not torch.equal(seen["leaves", layer], seen["enters", layer])


def test_the_depth_of_the_target_comes_from_the_file_or_from_the_caller(config: DraftConfig) -> None:
    with pytest.raises(ModelInvalid, match="how many layers the target has"):
        config_from_speculators(foreign(config))
    assert config_from_speculators(foreign(config), num_target_layers=4) == config
    with pytest.raises(ModelInvalid, match="num_target_layers is 4 but that of the target is 5"):
        config_from_speculators(foreign(config, num_target_layers=4), num_target_layers=5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({"transformer_layer_config": None}, "transformer_layer_config is missing"),
        ({"block_size": None}, "block_size is missing"),
        ({"mask_token_id": None}, "mask_token_id is missing"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids"),
        ({"aux_hidden_state_layer_ids": [0, 2]}, "target layer -1 does not exist"),
        ({"aux_hidden_state_layer_ids": [1, 4]}, "target layer 3 is out of range"),
        ({"draft_vocab_size": 100}, "draft_vocab_size = 100"),
        ({"target_hidden_size": 64}, "target_hidden_size = 64"),
        ({"sample_from_anchor": True}, "sample_from_anchor = True"),
        ({"hidden_size": 64}, "hidden_size is 32 but hidden_size is 64"),
        ({"rope_theta": 5e5}, "rope_theta"),
    ],
)
def test_what_would_be_read_wrongly_is_refused(config: DraftConfig, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelInvalid, match=named):
        config_from_speculators(foreign(config, **changes), num_target_layers=4)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"block_size": 8}, "block_size"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_theta"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
    ],
)
def test_its_layers_are_read_as_strictly(config: DraftConfig, changes: dict[str, Any], named: str) -> None:
    raw = foreign(config)
    raw["transformer_layer_config"].update(changes)
    with pytest.raises(ModelInvalid, match=named):
        config_from_speculators(raw, num_target_layers=4)


def test_the_file_holds_exactly_the_drafts_tensors(make_draft: Make, tmp_path: Path) -> None:
    draft = make_draft()
    out = export_speculators(tmp_path / "out", draft.config, draft.state_dict(), target="owner/tiny", dtype="float32")
    stored = load_file(out / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in stored.items()} == tensor_shapes(draft.config)
    found = load_draft(out)
    assert (found.format, found.config, found.provenance) == ("speculators", draft.config, {"target": "owner/tiny"})
    assert all(torch.equal(t, draft.state_dict()[name]) for name, t in found.tensors.items())
