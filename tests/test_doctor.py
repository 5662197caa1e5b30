"""``flowdflash doctor`` on checkpoints that were broken on purpose: it names each fault, and no other."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_runs import invoke
from doctor_runs import (
    TOY,
    copied,
    draft_of,
    edit_config,
    edit_records,
    edit_weight,
    examined,
    faults,
    make_run,
    patient,
    resealed,
)
from drafter_fakes import draft_config
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowdflash.dflash import training
from flowdflash.dflash.export import export_zlab
from flowdflash.dflash.mask import AttentionMask, block_mask
from flowdflash.dflash.model import DFlashDraft
from flowdflash.dflash.rounds import SpeculativeBatch
from flowdflash.doctor import examine
from flowdflash.doctor import patient as patient_module
from flowdflash.doctor.rows import Row
from flowdflash.doctor.symptoms import data
from flowdflash.target.fetch import resolve_model
from flowdflash.target.toy import ToyModel


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    return make_run(tmp_path_factory.mktemp("doctor") / "healthy", cache)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def reaching(tokens: int) -> Callable[..., AttentionMask]:
    """The classic mistake: states from the anchor on are in sight, so many of them."""
    return lambda anchors, keep, **options: block_mask(anchors + tokens, keep, **options)


def crowded(anchors: Tensor, keep: Tensor, **options: Any) -> AttentionMask:
    """Blocks see each other."""
    mask = block_mask(anchors, keep, **options)
    assert mask.visible is not None
    mask.visible[..., options["context"] :] = True
    return mask


def test_a_healthy_run_passes_every_check(run: Path, cache: Path) -> None:
    found = examined(run, cache)
    looked_at = {finding.name for finding in found if finding.status == "ok"}
    assert faults(found) == {} and not [f for f in found if f.status in ("note", "skipped")]
    assert looked_at == {
        *("config", "tensors", "files", "target", "leak", "parity", "readings", "training", "acceptance", "data")
    }


BROKEN: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "shifted layers": (
        lambda draft: edit_config(draft, {"dflash_config.target_layer_ids": [0, 3]}),
        "target_layer_ids",
        "is (0, 3), the run's pipeline has (1, 4)",
    ),
    "layers out of order": (
        lambda draft: edit_config(draft, {"dflash_config.target_layer_ids": [4, 1]}),
        "config",
        "strictly increasing",
    ),
    "another mask token": (
        lambda draft: edit_config(draft, {"dflash_config.mask_token_id": 5}),
        "mask_token_id",
        "is 5, the run's pipeline has 63",
    ),
    "mask token outside the table": (
        lambda draft: edit_config(draft, {"dflash_config.mask_token_id": 64}),
        "config",
        "mask_token_id 64 is not a row",
    ),
    "another rope theta": (
        lambda draft: edit_config(draft, {"rope_theta": 1e6, "rope_parameters.rope_theta": 1e6}),
        "rope_theta",
        "is 1000000.0, the run's pipeline has 10000.0",
    ),
    "two rope thetas": (lambda draft: edit_config(draft, {"rope_theta": 1e6}), "config", "they must be equal"),
    "one spelling of rope theta": (
        lambda draft: edit_config(draft, {"rope_parameters": None}),
        "rope_theta",
        "rope_parameters.rope_theta is missing",
    ),
    "another block size": (
        lambda draft: edit_config(draft, {"block_size": 8, "dflash_config.block_size": 8}),
        "block_size",
        "is 8, the run's pipeline has 4",
    ),
    "no num_target_layers": (
        lambda draft: edit_config(draft, {"num_target_layers": None, "dflash_config.num_target_layers": None}),
        "config",
        "num_target_layers is missing",
    ),
    "config of a deeper target": (
        lambda draft: edit_config(draft, {"num_target_layers": 8, "dflash_config.num_target_layers": 8}),
        "num_target_layers",
        "is 8, the run's pipeline has 6",
    ),
    "config of a target with another vocabulary": (
        lambda draft: edit_config(draft, {"vocab_size": 80}),
        "vocab_size",
        "is 80, the run's pipeline has 64",
    ),
    "layer types of another depth": (
        lambda draft: edit_config(draft, {"layer_types": ["full_attention"] * 2}),
        "layer_types",
        "names 2 layers",
    ),
    "truncated tensors": (
        lambda draft: (draft / "model.safetensors").write_bytes((draft / "model.safetensors").read_bytes()[:-100]),
        "tensors",
        "model.safetensors cannot be read",
    ),
    "a weight that is not a number": (
        lambda draft: edit_weight(draft, "norm.weight", lambda w: w * float("nan"), in_state=True),
        "tensors",
        "norm.weight holds values that are not finite",
    ),
    "features in another order": (
        lambda draft: edit_weight(draft, "fc.weight", lambda w: w.roll(32, dims=1)),
        "feature order",
        "in the order of layers [4, 1], not [1, 4]",
    ),
    "a transposed matrix": (
        lambda draft: edit_weight(draft, "layers.0.self_attn.o_proj.weight", lambda w: w.T),
        "weights",
        "o_proj.weight is transposed",
    ),
    "a norm that was never updated": (
        lambda draft: edit_weight(draft, "hidden_norm.weight", torch.ones_like),
        "weights",
        "hidden_norm.weight differs",
    ),
    "a file changed later": (
        lambda draft: draft.with_name("records.jsonl").write_text("{}\n"),
        "files",
        "records.jsonl has",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_checkpoint_is_named_and_nothing_else(case: str, run: Path, cache: Path, tmp_path: Path) -> None:
    damage, name, sentence = BROKEN[case]
    broken = copied(run, tmp_path)
    damage(draft_of(broken))
    found = examined(broken, cache)
    assert list(faults(found)) == [name] and sentence in faults(found)[name]
    assert all(finding.advice for finding in found if finding.status == "fault")
    assert [f.name for f in found if f.status == "skipped"], "what would only show the same fault again is left out"


def reset_pipeline(run: Path, old: str, new: str) -> None:
    path = run / "pipeline.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


LAYERS = ("layers: [1, 4]", "layers: [0, 3]")
"""Of the target stage, as it is and as it was not."""

TAUGHT_OTHERWISE: dict[str, tuple[dict[str, Any], tuple[str, str], str]] = {
    "target_layer_ids": ({"dflash_config.target_layer_ids": [0, 3]}, LAYERS, "the states of layers [1, 4]"),
    "mask_token_id": ({"dflash_config.mask_token_id": 5}, ("mask_token_id: 63", "mask_token_id: 5"), "mask token 63"),
    "rope_theta": (
        {"rope_theta": 1e6, "rope_parameters.rope_theta": 1e6},
        ('rope_theta: "1e4"', 'rope_theta: "1e6"'),
        "rope_theta 10000",
    ),
}


@pytest.mark.parametrize("name", TAUGHT_OTHERWISE)
def test_the_weights_alone_tell_how_they_were_trained(name: str, run: Path, cache: Path, tmp_path: Path) -> None:
    """Config and pipeline agree with each other, and both are wrong."""
    changes, pipeline, sentence = TAUGHT_OTHERWISE[name]
    broken = copied(run, tmp_path)
    edit_config(draft_of(broken), changes)
    reset_pipeline(broken, *pipeline)
    found = faults(examined(resealed(broken), cache))
    assert list(found) == [name] and f"training had {sentence}" in found[name]


def test_weights_with_swapped_features_are_told_from_the_rows(run: Path, cache: Path, tmp_path: Path) -> None:
    broken = copied(run, tmp_path)
    edit_weight(draft_of(broken), "fc.weight", lambda w: w.roll(32, dims=1), in_state=True)
    found = faults(examined(resealed(broken), cache))
    assert list(found) == ["feature order"]
    assert "training had features in the order of layers [4, 1]" in found["feature order"]


@pytest.fixture(scope="module")
def leaked(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A draft that was trained under a leaking mask."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "block_mask", reaching(4))
        return make_run(tmp_path_factory.mktemp("doctor") / "leaked", cache)


def test_l1_a_draft_trained_with_a_leak_is_named(leaked: Path, cache: Path) -> None:
    found = faults(examined(leaked, cache))
    assert list(found) == ["leak"] and "the states of the drafted tokens themselves in sight" in found["leak"]


@pytest.mark.parametrize(
    ("mask", "sentence"), [(reaching(1), "at or after its anchor"), (crowded, "sees its neighbours")]
)
def test_l1_l2_code_that_leaks_is_named(
    mask: Any, sentence: str, run: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "block_mask", mask)
    found = faults(examined(run, cache))
    assert list(found) == ["leak"] and sentence in found["leak"]


def test_l8_code_that_decodes_otherwise_than_it_trains_is_named(
    run: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extend = DFlashDraft.extend
    monkeypatch.setattr(
        DFlashDraft, "extend", lambda self, kept, states, places: extend(self, kept, states.roll(1, dims=1), places)
    )
    found = faults(examined(run, cache))
    assert list(found) == ["parity"] and "training and decoding give logits that differ" in found["parity"]


def test_decoding_that_spoils_the_drafts_is_named(run: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    propose = SpeculativeBatch._propose
    monkeypatch.setattr(SpeculativeBatch, "_propose", lambda self, *given: propose(self, *given).roll(1, dims=-1))
    found = faults(examined(run, cache))
    assert list(found) == ["decoding"] and "tau_gen 1." in found["decoding"]


def test_w1_a_head_that_is_not_the_targets_is_named(run: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = patient_module.load_embedding_and_head

    def untied(*given: Any) -> Any:
        found = load(*given)
        return found._replace(head=found.head.roll(1, dims=0))

    monkeypatch.setattr(patient_module, "load_embedding_and_head", untied)
    found = faults(examined(run, cache))
    assert list(found) == ["head"] and "is not the target's" in found["head"]


def test_w1_an_export_that_brings_another_head_is_named(run: Path, cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = invoke("export", run, "--format", "speculators", "-o", out, cache=cache)
    assert result.exit_code == 0, result.stderr
    assert faults(examined(out, cache)) == {}
    tensors = load_file(out / "model.safetensors")
    save_file({**tensors, "lm_head.weight": torch.zeros(64, 32)}, out / "model.safetensors")
    found = faults(examined(out, cache))
    assert list(found) == ["head"] and "lm_head.weight is not the target's" in found["head"]


def test_an_export_is_no_checkpoint_whatever_its_folder_is_called(run: Path, cache: Path) -> None:
    # Of two levels only: no run can lie above it.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        result = invoke("export", run, "-o", Path(folder) / "draft", cache=cache)
        assert result.exit_code == 0, result.stderr
        found = patient(Path(folder) / "draft", cache)
        (Path(folder) / "config.json").write_bytes((found.folder / "config.json").read_bytes())
        assert found.checkpoint is found.run_dir is patient(Path(folder), cache).run_dir is None


def test_an_answer_of_one_token_is_not_looked_at(run: Path, cache: Path) -> None:
    found = patient(run, cache)
    short, long = Row.answered([1, 2], [3]), Row.answered([1, 2], [3, 4])
    found.__dict__.update(_sampled=([], None, ""), held_out=[[1, 2]], answered=[short, long])
    assert found.known_rows == [long]
    assert not found.fit.loss.isnan().any()


RECORDED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a loss that is that of guessing": ({"loss": 4.1}, "learning", "that of guessing 4.16 (ln V)"),
    "all slots alike": (
        {"accuracy_per_slot": [0.98, 0.97, 0.98]},
        "training",
        "saw their own labels (pitfalls L2, L3)",
    ),
    "a first slot that is always right": ({"accuracy_per_slot": [0.99, 0.8, 0.7]}, "training", "(L1, L4)"),
    "figures that the weights do not have": ({"accuracy_per_slot": [0.89, 0.8, 0.7]}, "training", "W1, W3, W5, L5, L8"),
    "slots of another block size": ({"accuracy_per_slot": [0.5, 0.4]}, "block_size", "recorded 2 slots"),
}


@pytest.mark.parametrize("case", RECORDED)
def test_records_that_cannot_be_are_named(case: str, run: Path, cache: Path, tmp_path: Path) -> None:
    changes, name, sentence = RECORDED[case]
    broken = copied(run, tmp_path)
    edit_records(broken, lambda record: changes)
    found = faults(examined(broken, cache))
    assert list(found) == [name] and sentence in found[name]


UNSEEN = np.random.default_rng(1).integers(0, 63, (4, 8)).tolist()


def test_d1_a_draft_that_knows_its_data_and_nothing_else_is_named(run: Path, cache: Path) -> None:
    sick = patient(run, cache)
    sick.held_out = UNSEEN
    found = faults(examine(sick))
    assert list(found) == ["data"] and "tau_gen 1.0" in found["data"] and "on the run's data" in found["data"]


def test_good_records_and_no_acceptance_are_named_where_the_data_is_gone(
    run: Path, cache: Path, tmp_path: Path
) -> None:
    broken = copied(run, tmp_path)
    provenance = json.loads((broken / "run.json").read_text())
    (broken / "run.json").write_text(json.dumps({**provenance, "pipeline_folder": str(tmp_path)}))
    sick = patient(broken, cache)
    sick.held_out = UNSEEN
    found = examine(sick)
    assert "training recorded" in faults(found).pop("training") and len(faults(found)) == 1
    told = {finding.name: finding.text for finding in found if finding.status == "skipped"}
    assert "rows.jsonl does not exist" in told["pipeline"]


def test_text_that_the_target_would_not_write_draws_a_notice(run: Path, cache: Path) -> None:
    well = patient(run, cache)
    rng = np.random.default_rng(3)
    well._sampled = (
        [Row.answered(row.ids[:8].tolist(), rng.integers(0, 63, 40).tolist()) for row in well.trained_on],
        None,
        "",
    )
    (note,) = data(well)
    assert note.status == "note" and "D1" in note.text


def test_an_export_alone_is_examined_against_its_target(run: Path, cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert invoke("export", run, "-o", out, cache=cache).exit_code == 0
    found = examined(out, cache)
    assert faults(found) == {}
    skipped = {finding.name for finding in found if finding.status == "skipped"}
    assert skipped == {"pipeline", "files", "readings", "training", "data"}
    other = ToyModel(num_layers=6, vocab_size=80).ref
    result = faults(examined(out, cache, target=other))
    assert list(result) == ["vocab_size"] and f"the target {other} has 80" in result["vocab_size"]
    result = faults(examined(out, cache, target=ToyModel(num_layers=5, vocab_size=64).ref))
    assert list(result) == ["config"] and "num_target_layers is 6, the target has 5" in result["config"]


def test_a_mask_token_that_means_something_else_is_named(cache: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(resolve_model(BYTES, cache), target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "eos_token_id": 260, "pad_token_id": 260}))
    found = faults(examined(untrained(tmp_path), cache, target=str(target)))
    assert list(found) == ["mask_token_id"] and "is the target's eos_token_id" in found["mask_token_id"]


BYTES = ToyModel(num_layers=6).ref
"""A toy with a tokenizer."""


def untrained(tmp_path: Path) -> Path:
    """The export of a draft that has learnt nothing."""
    config = draft_config(num_hidden_layers=1, target_layer_ids=(1, 3), num_target_layers=6)
    return export_zlab(tmp_path / "draft", config, DFlashDraft(config, seed=5).state_dict())


def test_the_command_tells_a_person_and_a_program(run: Path, cache: Path, tmp_path: Path) -> None:
    healthy = invoke("doctor", run, "--device", "cpu", cache=cache)
    assert healthy.exit_code == 0, healthy.stdout
    assert healthy.stdout.splitlines()[-1] == "healthy" and "FAULT" not in healthy.stdout
    broken = copied(run, tmp_path)
    edit_config(draft_of(broken), {"dflash_config.mask_token_id": 5})
    sick = invoke("doctor", broken, cache=cache)
    assert sick.exit_code == 1 and sick.stdout.splitlines()[-1] == "1 fault"
    assert "FAULT  mask_token_id: mask_token_id is 5" in sick.stdout and "do: write 63 into" in sick.stdout
    told = json.loads(invoke("doctor", broken, "--format", "json", cache=cache).stdout)
    assert (told["healthy"], told["target"], told["checkpoint"]) == (False, TOY, str(draft_of(broken)))
    assert [f["name"] for f in told["findings"] if f["status"] == "fault"] == ["mask_token_id"]


def test_prompts_can_be_named_and_what_cannot_be_examined_is_an_error(cache: Path, tmp_path: Path, run: Path) -> None:
    draft, prompts = untrained(tmp_path), tmp_path / "prompts.txt"
    prompts.write_text("tell me\nwhy?\n")
    result = invoke("doctor", draft, "--target", BYTES, "--prompts", prompts, cache=cache)
    assert result.exit_code == 0 and "on 2 held-out prompts" in result.stdout, result.stdout
    assert "name it (--target)" in invoke("doctor", draft, cache=cache).stderr
    assert "has no tokenizer to read" in invoke("doctor", run, "--prompts", prompts, cache=cache).stderr
    (tmp_path / "empty").mkdir()
    assert "neither an exported draft nor" in invoke("doctor", tmp_path / "empty", cache=cache).stderr
    both = [run, "--gate", "p.yaml"]
    for arguments in ([], both, [run, "--set", "a=b"], [run, "--steps", 9], [*both[1:], "--target", "x"]):
        assert invoke("doctor", *arguments, cache=cache).exit_code == 2
