from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flowdflash.target.catalogue import KNOWN, facts_of, ref_problem, same_model
from flowdflash.target.toy import ToyModel


def test_known_models_have_the_shapes_of_their_drafts() -> None:
    facts = facts_of("SmolLM2-135M-Instruct")
    assert facts is not None
    assert (facts["hidden_size"], facts["num_layers"], facts["vocab_size"], facts["mask_token_id"]) == (
        576,
        30,
        49152,
        16,
    )
    # Parameters of a five-layer, five-feature draft, as published for these models, in millions.
    published = {"Qwen/Qwen3-8B": 1048.6, "Qwen/Qwen3-4B": 537.4, "Qwen/Qwen3-1.7B": 272.7, "Qwen/Qwen3-0.6B": 83.9}
    for ref, millions in published.items():
        f = KNOWN[ref]
        D, d, I = f["hidden_size"], f["head_dim"], f["intermediate_size"]  # noqa: E741
        attention = 2 * D * f["num_heads"] * d + 2 * D * f["num_kv_heads"] * d
        count = 5 * (attention + 3 * D * I + 2 * D + 2 * d) + 5 * D * D + 2 * D
        assert round(count / 1e6, 1) == pytest.approx(millions, abs=0.11), ref


def test_folder_facts_come_from_the_text_tower(tmp_path: Path) -> None:
    text = {
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "vocab_size": 99,
        "rope_parameters": {"rope_theta": 5e5},
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "wrapper", "text_config": text}))
    facts = facts_of(str(tmp_path))
    assert facts is not None
    assert (facts["hidden_size"], facts["num_layers"], facts["head_dim"], facts["num_kv_heads"]) == (64, 6, 16, 4)
    assert facts["rope_theta"] == 5e5
    assert "mask_token_id" not in facts


@pytest.mark.parametrize(("text", "known"), [("{", None), ("[1]", None)])
def test_a_broken_config_gives_no_facts(tmp_path: Path, text: str, known: None) -> None:
    (tmp_path / "config.json").write_text(text)
    assert facts_of(str(tmp_path)) is known


def test_unknown_models_are_named_with_the_nearest_one(tmp_path: Path) -> None:
    message, hint = ref_problem("SmolLM2-135M-Instrct")
    assert "SmolLM2-135M-Instrct" in message
    assert "did you mean SmolLM2-135M-Instruct" in hint
    assert "no folder" in ref_problem(str(tmp_path / "absent"))[0]
    assert "config.json" in ref_problem(str(tmp_path))[0]
    assert "not JSON" in ref_problem("toy:{")[0]
    assert ref_problem("owner/name") == ("", "")


def test_models_are_the_same_under_another_spelling() -> None:
    assert same_model("SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert same_model("toy:{}", ToyModel().ref)
    assert not same_model("toy:{}", 'toy:{"seed":1}')
    assert not same_model("a/b", "a/c")


def test_facts_and_checks_import_no_torch() -> None:
    code = (
        "import sys, flowdflash.target.catalogue, flowdflash.target.devices, flowdflash.dflash.config\n"
        "import flowdflash.target.fingerprint\n"
        "import flowdflash.stages.transformers_target, flowdflash.stages.toy_target\n"
        "import flowdflash.stages.transformers_generator, flowdflash.stages.responses\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
