"""``flowdflash export``, and a drafter that starts from what it wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import invoke
from drafter_fakes import draft_config
from safetensors.torch import load_file, save_file

from flowdflash.dflash.export import export_zlab
from flowdflash.dflash.model import DFlashDraft
from flowdflash.errors import ModelInvalid
from flowdflash.stage import Check, OpenContext, PlanSummary
from flowdflash.stages.dflash_drafter import DFlashDrafter
from flowdflash.target.load import load_embedding_and_head
from flowdflash.target.toy import ToyModel

TOY = ToyModel(num_layers=6)
CONFIG = draft_config(intermediate_size=64, num_hidden_layers=1, target_layer_ids=(1, 3), num_target_layers=6)


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all tests of a process: the toy target is built once."""
    return tmp_path_factory.getbasetemp() / "cache"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with one checkpoint."""
    folder = tmp_path / "run" / "checkpoints" / "step-000007"
    draft = DFlashDraft(CONFIG, seed=5)
    export_zlab(folder / "draft", CONFIG, draft.state_dict(), provenance={"target": TOY.ref, "step": 7})
    torch.save({"tensors": draft.state_dict(), "state": {}}, folder / "state.pt")
    (folder / "checkpoint.json").write_text("{}")
    (folder.parent / "latest").write_text("step-000007\n")
    return tmp_path / "run"


def weights(folder: Path) -> dict[str, Any]:
    return load_file(folder / "model.safetensors")


def config_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


def test_a_run_is_exported_and_converted_there_and_back(run: Path, tmp_path: Path, cache: Path) -> None:
    first, second, third = (tmp_path / name for name in ("zlab", "speculators", "back"))
    result = invoke("export", run, "-o", first, "--dtype", "float32", cache=cache)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{first}\n" and "14 tensors" in result.stderr and "mask token 260" in result.stderr
    assert torch.equal(weights(first)["fc.weight"], DFlashDraft(CONFIG, seed=5).fc.weight), "from the full precision"
    told = config_of(first)["flowdflash"]
    assert (told["target"], told["step"]) == (TOY.ref, 7) and told["version"]

    result = invoke("export", first, "--format", "speculators", "-o", second, "--dtype", "float32", cache=cache)
    assert result.exit_code == 0, result.stderr
    verifier = config_of(second)["speculators_config"]["verifier"]
    assert (Path(verifier["name_or_path"]) / "model.safetensors").is_file()
    assert verifier["architectures"] == ["LlamaForCausalLM"]
    assert config_of(second)["aux_hidden_state_layer_ids"] == [2, 4]

    result = invoke("export", second, "-o", third, "--dtype", "float32", cache=cache)
    assert result.exit_code == 0, result.stderr
    assert config_of(third) == config_of(first)
    assert all(torch.equal(t, weights(first)[name]) for name, t in weights(third).items())


def test_servers_may_know_the_target_by_another_name(run: Path, tmp_path: Path, cache: Path) -> None:
    hub = "no-such-owner/no-such-model"
    out = tmp_path / "out"
    result = invoke("export", run, "--format", "speculators", "-o", out, "--target", hub, cache=cache)
    assert result.exit_code == 0 and f"not compared with its target: {hub}" in result.stderr, result.stderr
    assert config_of(out)["speculators_config"]["verifier"] == {"name_or_path": hub, "architectures": []}
    assert config_of(out)["flowdflash"]["target"] == hub


@pytest.mark.parametrize(
    ("target", "named"),
    [
        (ToyModel(num_layers=6, vocab_size=280).ref, "vocab_size 272 is not the target's 280"),
        (ToyModel(num_layers=5).ref, "num_target_layers is 6, the target has 5"),
        (ToyModel(num_layers=6, hidden_size=48).ref, "hidden_size 32 is not the target's 48"),
    ],
)
def test_w4_a_draft_of_another_target_is_refused(
    run: Path, tmp_path: Path, cache: Path, target: str, named: str
) -> None:
    result = invoke("export", run, "-o", tmp_path / "out", "--target", target, cache=cache)
    assert result.exit_code == 1 and named in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_draft_that_names_no_target_needs_it_for_speculators(run: Path, tmp_path: Path, cache: Path) -> None:
    draft = run / "checkpoints" / "step-000007" / "draft"
    raw = config_of(draft)
    del raw["flowdflash"]
    foreign = tmp_path / "foreign"
    shutil.copytree(draft, foreign)
    (foreign / "config.json").write_text(json.dumps(raw))
    result = invoke("export", foreign, "--format", "speculators", "-o", tmp_path / "out", cache=cache)
    assert result.exit_code == 1 and "--target" in result.stderr and not (tmp_path / "out").exists()
    assert invoke("export", foreign, "-o", tmp_path / "out", cache=cache).exit_code == 0


def test_a_borrowed_head_is_left_out_only_if_it_is_the_targets(run: Path, tmp_path: Path, cache: Path) -> None:
    source = tmp_path / "speculators"
    assert invoke("export", run, "--format", "speculators", "-o", source, cache=cache).exit_code == 0
    head = load_embedding_and_head(TOY.ref, cache).head.bfloat16()
    tensors = weights(source)
    save_file({**tensors, "lm_head.weight": head.clone()}, source / "model.safetensors")
    result = invoke("export", source, "-o", tmp_path / "out", cache=cache)
    assert result.exit_code == 0 and "left out, as they are the target's: lm_head.weight" in result.stderr
    assert "lm_head.weight" not in weights(tmp_path / "out")
    save_file({**tensors, "lm_head.weight": head + 1}, source / "model.safetensors")
    result = invoke("export", source, "-o", tmp_path / "other", cache=cache)
    assert result.exit_code == 1 and "lm_head.weight is not the target's" in result.stderr


def test_no_checkpoint_and_no_free_folder_are_errors(run: Path, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "empty").mkdir()
    result = invoke("export", tmp_path / "empty", "-o", tmp_path / "out", cache=cache)
    assert result.exit_code == 1 and "neither an exported draft nor a checkpoint" in result.stderr
    for taken in (run, run / "checkpoints" / "step-000007" / "draft"):
        result = invoke("export", run, "-o", taken, cache=cache)
        assert result.exit_code == 1 and "name another folder" in result.stderr


def opened(tmp_path: Path, cache: Path, **options: Any) -> DFlashDrafter:
    """A drafter for the toy target, of the same shape as the run's."""
    config = {"block_size": 4, "num_hidden_layers": 1, "precision": "float32", "device": "cpu", **options}
    facts = {"model": TOY.ref, "layers": (1, 3), "num_features": 2}
    drafter = DFlashDrafter(DFlashDrafter.Config(**config))
    drafter.open(OpenContext("drafter", tmp_path, cache, seed=3, facts=facts, plan=PlanSummary(1, 8, 8)))
    return drafter


@pytest.mark.parametrize("style", ["run", "zlab", "speculators"])
def test_w10_training_goes_on_from_a_draft_of_either_format(run: Path, tmp_path: Path, cache: Path, style: str) -> None:
    source = run
    if style != "run":
        source = tmp_path / "export"
        assert invoke("export", run, "--format", style, "-o", source, "--dtype", "float32", cache=cache).exit_code == 0
    drafter = opened(tmp_path, cache, init_from=source, block_size=8)
    wanted = DFlashDraft(CONFIG, seed=5).state_dict()
    started = drafter.trainer.draft.state_dict()
    assert started.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in started.items())
    assert drafter.trainer.draft.fc.weight.requires_grad


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mask_token_id": 261}, "mask_token_id is 260 there and 261 here"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 1 there and 2 here"),
        ({"head_dim": 16}, "head_dim is 8 there and 16 here"),
    ],
)
def test_w10_another_draft_is_refused(
    run: Path, tmp_path: Path, cache: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelInvalid, match=named):
        opened(tmp_path, cache, init_from=run, **options)


def test_a_start_named_twice_or_not_there_is_a_problem(run: Path) -> None:
    def problems(**options: Any) -> list[str]:
        check = Check("drafter", {"model": TOY.ref, "layers": (1, 3), "num_layers": 6, "vocab_size": 272})
        DFlashDrafter(DFlashDrafter.Config(**options)).check(check)
        return [problem.message for problem in check.problems]

    assert problems(init_from=run) == []
    assert "init_from says already" in problems(init_from=run, init="target")[0]
    assert "there is no folder" in problems(init_from=run / "absent")[0]
