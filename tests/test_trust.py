"""What is read runs no code and leads nowhere else; secrets of the environment are written nowhere."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import ROOT, TINY, invoke, overrides
from pipeline_fakes import PIPELINE, FakePlugins

from flowdflash.cli.common import exit_codes
from flowdflash.config.changes import changes
from flowdflash.config.check import load, load_text
from flowdflash.dflash.importing import find_draft, load_draft
from flowdflash.errors import ModelInvalid, PipelineInvalid, Problem
from flowdflash.secrets import hidden, is_secret
from flowdflash.target.weights import tensor_files

SOURCES = [*(ROOT / "flowdflash").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")]


BETWEEN_OUR_PROCESSES = [
    # The contract of a config, that it can cross a border between processes, is tried out by authors' tests.
    *(ROOT / "flowdflash" / "testing").glob("*.py"),
    # Nothing but a process and its children hold the pipes; no file and no socket is read.
    ROOT / "flowdflash" / "data" / "encoding_process.py",
]


def calls(path: Path) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Dotted name, constant keyword arguments and line of every call in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            given = {k.arg or "**": k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
            yield ast.unparse(node.func), given, node.lineno


def test_nothing_is_read_in_a_way_that_can_run_code() -> None:
    assert len(SOURCES) > 100
    for path in SOURCES:
        for name, given, line in calls(path):
            where = f"{path}:{line}: {name}"
            if name == "torch.load":
                assert given.get("weights_only") is True, where
            assert not given.get("allow_pickle") and not given.get("trust_remote_code") and not given.get("shell"), (
                where
            )
            assert name not in ("eval", "exec", "os.system", "yaml.load", "marshal.loads", "shelve.open"), where
            assert not name.startswith(("pickle.", "dill.", "joblib.")) or path in BETWEEN_OUR_PROCESSES, where
        assert "unsafe" not in path.read_text(encoding="utf-8"), path


def test_code_in_the_weights_of_a_draft_does_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    draft = tmp_path / "step-000001" / "draft"
    draft.mkdir(parents=True)
    (draft / "config.json").write_text(json.dumps(DRAFT))
    torch.save({"tensors": {"norm.weight": Trap()}, "state": {}}, draft.with_name("state.pt"))
    with pytest.raises(ModelInvalid, match=r"state\.pt cannot be read"):
        load_draft(draft)
    assert not (tmp_path / "ran").exists()


DRAFT = {
    "model_type": "qwen3",
    "architectures": ["DFlashDraftModel"],
    "num_target_layers": 4,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 32,
    "vocab_size": 64,
    "block_size": 4,
    "dflash_config": {"mask_token_id": 63, "target_layer_ids": [1]},
}


@pytest.mark.parametrize("name", ["../elsewhere", "/tmp", "..", "a/b"])
def test_the_newest_checkpoint_of_a_run_lies_inside_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "config.json").write_text("{}")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text(f"{name}\n")
    with pytest.raises(ModelInvalid, match="no folder beside it"):
        find_draft(tmp_path)


def test_the_shards_of_a_model_lie_beside_their_index(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "secret.safetensors").write_bytes(b"")
    index = {"weight_map": {"w": "../secret.safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelInvalid, match="does not lie beside it"):
        tensor_files(tmp_path / "model")


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "OPENAI_APIKEY", "secret_x", "BASIC_AUTH"],
)
def test_a_secret_is_known_by_the_name_of_its_variable(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "MAX_TOKENS", "KEYBOARD", "SSH_AUTH_SOCK", "HF_TOKEN_PATH", "AUTHOR", "HOME"]
)
def test_other_variables_are_none(name: str) -> None:
    assert not is_secret(name)


def test_longer_secret_is_hidden_before_one_that_it_contains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "abcdefgh")
    monkeypatch.setenv("B_TOKEN", "abcdefgh-ijkl")
    monkeypatch.setenv("SHORT_KEY", "abc")
    assert hidden("abcdefgh-ijkl abcdefgh abc") == "${env:B_TOKEN} ${env:A_TOKEN} abc"


SECRET = 'pl4nted-"s3cret"-${x}'


def test_resolved_pipeline_refers_to_a_secret_and_loads_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_TOKEN", SECRET)
    monkeypatch.setenv("PLANTED", "no-secret")
    text = PIPELINE.replace("block_size: 8", 'block_size: 8, tag: "a-${vars.t}-b"').replace(
        "vars: {", "vars: {t: '${env:PLANTED_TOKEN}', "
    )
    (tmp_path / "p.yaml").write_text(text.replace("project: demo", 'project: "${env:PLANTED}"'))
    first = load(tmp_path / "p.yaml", FakePlugins())
    assert first.graph.nodes["drafter"].config.tag == f"a-{SECRET}-b"
    assert 'tag: "a-${env:PLANTED_TOKEN}-b"' in first.text and "project: no-secret" in first.text
    assert "pl4nted" not in first.text
    again = load_text(first.text, FakePlugins(), tmp_path)
    assert again.graph.nodes["drafter"].config.tag == f"a-{SECRET}-b" and changes(first, again) == []
    monkeypatch.delenv("PLANTED_TOKEN")
    with pytest.raises(PipelineInvalid, match="environment variable PLANTED_TOKEN is not set"):
        load_text(first.text, FakePlugins(), tmp_path)


def test_secret_in_a_wrong_place_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_TOKEN", SECRET)
    (tmp_path / "p.yaml").write_text(PIPELINE.replace("type: pull", 'type: "${env:PLANTED_TOKEN}"'))
    with pytest.raises(PipelineInvalid) as caught:
        load(tmp_path / "p.yaml", FakePlugins())
    assert "pl4nted" not in str(caught.value) and "PLANTED_TOKEN" in str(caught.value)


def test_secret_in_a_problem_is_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLANTED_TOKEN", SECRET)
    with pytest.raises(SystemExit), exit_codes():
        raise PipelineInvalid([Problem(f"{SECRET} when the run began, nothing now", path="stages.metrics.project")])
    told = capsys.readouterr().err
    assert "pl4nted" not in told and "${env:PLANTED_TOKEN} when the run began" in told


def test_secret_too_short_to_be_hidden_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_TOKEN", "hunter2")
    (tmp_path / "p.yaml").write_text(PIPELINE.replace("project: demo", 'project: "${env:PLANTED_TOKEN}"'))
    with pytest.raises(PipelineInvalid, match="too short to be kept out of logs"):
        load(tmp_path / "p.yaml", FakePlugins())


TELLTALE = """
import os
from flowdflash.plugin import hookimpl

@hookimpl
def flowdflash_step(record):
    raise RuntimeError("the server refuses " + os.environ["PLANTED_PASSWORD"])
"""


@pytest.mark.timeout(300)
def test_planted_secrets_are_in_no_file_of_a_run_and_on_no_line_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = {
        "HF_TOKEN": "hf_PL4NTEDpl4ntedPL4NTED",
        "WANDB_API_KEY": "pl4nted" * 5 + "abcde",
        "PLANTED_PASSWORD": "correct-pl4nted-horse",
        "PLANTED_KEY": "pl4nted-in-the-pipeline",
    }
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "telltale.py").write_text(TELLTALE)
    text, _, _ = (
        TINY.read_text(encoding="utf-8").replace("seed: 7", "seed: 7\nplugins: [telltale.py]").partition("  save:")
    )
    board = '{kind: sink, type: wandb, inputs: drafter.records, mode: offline, name: "x-${env:PLANTED_KEY}"}'
    (tmp_path / "p.yaml").write_text(f"{text}  board: {board}\n")
    run = tmp_path / "run"
    monkeypatch.setattr("sys.argv", ["flowdflash", "run", "--set", f"a={planted['PLANTED_PASSWORD']}"])
    result = invoke(
        "run",
        tmp_path / "p.yaml",
        "--run-dir",
        run,
        *overrides({"stages.corpus.samples": 24, "stages.corpus.epochs": 1}),
        cache=tmp_path / "cache",
    )
    assert result.exit_code == 0, result.stderr
    assert "the server refuses ${env:PLANTED_PASSWORD}" in result.stderr
    assert 'name: "x-${env:PLANTED_KEY}"' in (run / "pipeline.yaml").read_text()
    assert "a=${env:PLANTED_PASSWORD}" in json.loads((run / "run.json").read_text())["command"]
    files = [path for path in run.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    for value in planted.values():
        assert [path for path in files if value.encode() in path.read_bytes()] == []
        assert value not in result.stdout + result.stderr
    drawn = invoke("graph", tmp_path / "p.yaml", "--format", "json").stdout
    assert planted["PLANTED_KEY"] not in drawn and "x-${env:PLANTED_KEY}" in drawn
