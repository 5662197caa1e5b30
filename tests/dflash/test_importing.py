"""Drafts of any origin come in whole or not at all, and an export never harms what lies where it is to go."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flowdflash.dflash import folder as folder_module
from flowdflash.dflash.config import DraftConfig
from flowdflash.dflash.export import export_zlab, zlab_config
from flowdflash.dflash.importing import check_borrowed, check_same_draft, load_draft
from flowdflash.dflash.model import DFlashDraft
from flowdflash.dflash.speculators import speculators_config
from flowdflash.errors import ModelInvalid

Make = Callable[..., Any]
OURS = {"target": "tiny"}


def put(folder: Path, raw: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """A folder as another program would write it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def torchspec(draft: DFlashDraft) -> tuple[dict[str, Any], dict[str, Any]]:
    """A draft as TorchSpec keeps it."""
    config = draft.config
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    more = ("head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings", "rope_theta", "mask_token_id")
    raw = {
        "model_type": "dflash",
        **{key: getattr(config, key) for key in (*keys, *more, "block_size")},
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": len(config.target_layer_ids),
        "target_num_hidden_layers": config.num_target_layers,
        "target_hidden_size": config.hidden_size,
    }
    names = {"fc": "context_proj", "hidden_norm": "context_norm", "norm": "final_norm"}
    tensors = draft.state_dict()
    for ours, theirs in names.items():
        tensors[f"{theirs}.weight"] = tensors.pop(f"{ours}.weight")
    return raw, {**tensors, "embed_tokens.weight": torch.randn(config.vocab_size, config.hidden_size)}


def test_a_run_a_checkpoint_and_its_export_are_the_same_draft(make_draft: Make, tmp_path: Path) -> None:
    draft, run = make_draft(), tmp_path / "run"
    checkpoint = run / "checkpoints" / "step-000003"
    export_zlab(checkpoint / "draft", draft.config, draft.state_dict(), provenance={"target": "tiny", "step": 3})
    (run / "checkpoints" / "latest").write_text("step-000003\n")
    for place in (run, checkpoint, checkpoint / "draft"):
        found = load_draft(place)
        assert (found.folder, found.config, found.format) == (checkpoint / "draft", draft.config, "zlab")
        assert found.provenance == {"target": "tiny", "step": 3}
        assert found.tensors["fc.weight"].dtype is torch.bfloat16
    torch.save({"tensors": draft.state_dict(), "state": {}}, checkpoint / "state.pt")
    found = load_draft(run)
    assert all(torch.equal(t, draft.state_dict()[name]) for name, t in found.tensors.items()), "in full precision"
    (checkpoint / "state.pt").write_bytes(b"no")
    with pytest.raises(ModelInvalid, match=r"state\.pt cannot be read"):
        load_draft(run)


def test_a_folder_without_a_draft_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match="neither an exported draft nor a checkpoint"):
        load_draft(tmp_path)


def test_torchspecs_names_and_counts_are_understood(make_draft: Make, tmp_path: Path) -> None:
    draft = make_draft()
    raw, tensors = torchspec(draft)
    found = load_draft(put(tmp_path / "theirs", raw, tensors))
    assert (found.format, found.config, set(found.borrowed)) == ("torchspec", draft.config, {"embed_tokens.weight"})
    assert all(torch.equal(t, draft.state_dict()[name]) for name, t in found.tensors.items())
    with pytest.raises(ModelInvalid, match="block_size is missing"):
        load_draft(put(tmp_path / "without", {**raw, "block_size": None}, tensors))
    with pytest.raises(ModelInvalid, match="target_hidden_size = 64"):
        load_draft(put(tmp_path / "wider", {**raw, "target_hidden_size": 64}, tensors))


def test_w10_a_tensor_missing_or_too_many_is_an_error_in_every_format(make_draft: Make, tmp_path: Path) -> None:
    draft = make_draft()
    tensors = draft.state_dict()
    raws = {
        "zlab": zlab_config(draft.config),
        "speculators": speculators_config(draft.config, "owner/tiny", []),
        "torchspec": torchspec(draft)[0],
    }
    for name, raw in raws.items():
        own = torchspec(draft)[1] if name == "torchspec" else tensors
        with pytest.raises(ModelInvalid, match=r"layers\.1\.mlp\.up_proj\.weight is missing"):
            load_draft(put(tmp_path / name, raw, {n: t for n, t in own.items() if n != "layers.1.mlp.up_proj.weight"}))
        with pytest.raises(ModelInvalid, match=r"d2t does not belong to a draft"):
            load_draft(put(tmp_path / f"{name}-more", raw, {**own, "d2t": torch.zeros(3)}))
    with pytest.raises(ModelInvalid, match=r"lm_head\.weight does not belong"):
        load_draft(put(tmp_path / "head", raws["zlab"], {**tensors, "lm_head.weight": torch.zeros(272, 32)}))


def test_w3_a_borrowed_matrix_must_be_the_targets(make_draft: Make, make_rows: Make, tmp_path: Path) -> None:
    draft, rows = make_draft(), make_rows([9])
    raw = speculators_config(draft.config, "owner/tiny", [])
    tensors = {**draft.state_dict(), "lm_head.weight": rows.head.bfloat16()}
    found = load_draft(put(tmp_path / "equal", raw, tensors))
    assert set(found.borrowed) == {"lm_head.weight"} and "lm_head.weight" not in found.tensors
    check_borrowed(found, rows.embed, rows.head)
    with pytest.raises(ModelInvalid, match=r"lm_head\.weight is not the target's"):
        check_borrowed(found, rows.head, rows.embed)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mask_token_id": 259}, "mask_token_id is 260 there and 259 here"),
        ({"target_layer_ids": (0, 1)}, r"target_layer_ids is \(0, 2\) there"),
        ({"rope_theta": 5e5}, "rope_theta"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        ({"num_target_layers": 5}, "num_target_layers"),
        ({"vocab_size": 280}, "vocab_size is 272 there and 280 here"),
        ({"num_hidden_layers": 1}, "num_hidden_layers"),
    ],
)
def test_w10_another_draft_is_not_gone_on_with(
    make_draft: Make, config: DraftConfig, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    found = load_draft(export_zlab(tmp_path / "draft", config, make_draft().state_dict()))
    check_same_draft(found, make_draft(block_size=8, eos_token_id=2).config)
    with pytest.raises(ModelInvalid, match=named):
        check_same_draft(found, make_draft(**changes).config)


def test_the_depth_of_another_target_is_refused(make_draft: Make, tmp_path: Path) -> None:
    draft = make_draft()
    with pytest.raises(ModelInvalid, match="num_target_layers is 4, the target has 6"):
        load_draft(export_zlab(tmp_path / "out", draft.config, draft.state_dict()), num_target_layers=6)


def test_an_export_replaces_one_of_ours_and_nothing_else(make_draft: Make, tmp_path: Path) -> None:
    first, second = make_draft(0), make_draft(1)
    out = tmp_path / "out"
    out.mkdir()
    for draft in (first, second):
        export_zlab(out, draft.config, draft.state_dict(), dtype="float32", provenance=OURS)
        assert torch.equal(load_draft(out).tensors["fc.weight"], draft.fc.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "nothing is left beside it"
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1, "weights are as readable as the config"

    def refused(place: Path, *files: str) -> None:
        place.mkdir(parents=True, exist_ok=True)
        for name in files:
            (place / name).write_text("{}")
        before = {path.name: path.read_bytes() for path in place.iterdir()}
        with pytest.raises(ModelInvalid, match="name another folder"):
            export_zlab(place, first.config, first.state_dict(), provenance=OURS)
        assert {path.name: path.read_bytes() for path in place.iterdir()} == before

    refused(tmp_path / "model", "config.json", "model.safetensors")
    refused(tmp_path / "notes", "notes.txt")
    refused(out, "tokenizer.json")
    export_zlab(tmp_path / "step-000001" / "draft", first.config, first.state_dict(), provenance=OURS)
    (tmp_path / "step-000001" / "checkpoint.json").write_text("{}")
    refused(tmp_path / "step-000001" / "draft")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ModelInvalid, match="name another folder"):
        export_zlab(tmp_path / "file", first.config, first.state_dict(), provenance=OURS)


def test_an_export_that_fails_leaves_the_old_one(
    make_draft: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_draft(0), make_draft(1)
    out = export_zlab(tmp_path / "out", first.config, first.state_dict(), dtype="float32", provenance=OURS)

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder_module, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        export_zlab(out, second.config, second.state_dict(), provenance=OURS)
    assert torch.equal(load_draft(out).tensors["fc.weight"], first.fc.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_w3_a_mask_token_that_servers_treat_specially_is_refused(make_draft: Make, tmp_path: Path) -> None:
    for name, value in (("eos_token_id", (2, 260)), ("pad_token_id", 260), ("bos_token_id", 260)):
        draft = make_draft(**{name: value})
        with pytest.raises(ModelInvalid, match="mask_token_id 260 is also"):
            export_zlab(tmp_path / "out", draft.config, draft.state_dict())
