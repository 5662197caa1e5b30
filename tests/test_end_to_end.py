"""The default pipeline on the real model, a few steps of it: features kept, draft exported, reloaded, lossless."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cli_runs import ROOT, invoke, json_lines, overrides

from flowdflash.cache import cache_dir
from flowdflash.dflash.export import load_zlab
from flowdflash.errors import ModelInvalid
from flowdflash.target.fetch import resolve_model

MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def model() -> Path:
    """The model's folder in the user's cache, fetched the first time."""
    try:
        return Path(resolve_model(MODEL, cache_dir()))
    except ModelInvalid as error:
        if "could not download" not in str(error):
            raise
        pytest.skip(f"the real model cannot be fetched here: {error}")


@pytest.mark.timeout(280)
def test_the_default_pipeline_trains_exports_and_decodes_losslessly(model: Path, tmp_path: Path) -> None:
    few = {
        "stages.corpus.limit_rows": 12,
        "stages.corpus.epochs": 2,
        "stages.corpus.max_length": 96,
        "stages.buckets.buckets": 2,
        "stages.buckets.token_budget": 384,
        "stages.target.keep_dir": tmp_path / "features",
        "stages.drafter.accumulate": 2,
        "stages.save.every_steps": 2,
        "stages.acceptance.num_prompts": 2,
        "stages.acceptance.max_new_tokens": 16,
    }
    run = tmp_path / "run"
    result = invoke("run", ROOT / "pipelines" / "dflash.yaml", "--run-dir", run, *overrides(few))
    assert result.exit_code == 0, result.stderr
    assert not [line for line in result.stderr.splitlines() if "%|" in line or "it/s" in line], result.stderr

    records = json_lines(run / "metrics.jsonl")
    outcome = json.loads((run / "outcome.json").read_text())
    assert len(records) == outcome["steps"] >= 2 and all(r["loss"] > 0 and not r["skipped"] for r in records)
    target = outcome["summaries"]["target"]
    assert target["samples_computed"] == target["samples_read"] > 0, "the second epoch reads what the first computed"
    assert target["kept_bytes"] > 0 and any((tmp_path / "features").iterdir())

    newest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()
    config, draft = load_zlab(newest / "draft")
    assert (config.hidden_size, config.vocab_size, config.num_target_layers) == (576, 49152, 30)
    saved = torch.load(newest / "state.pt", weights_only=True)["tensors"]
    stored = draft.state_dict()
    assert set(stored) == set(saved)
    assert all(torch.equal(stored[name], saved[name].to(torch.bfloat16)) for name in saved)

    before, after = json_lines(run / "evaluations.jsonl")
    for evaluation in (before, after):
        assert (evaluation["identical"], evaluation["prompts"]) == (2, 2)
        assert evaluation["tau_gen"] >= 1 and evaluation["new_tokens"] <= 32
    assert after["step"] == outcome["steps"] == json.loads((newest / "checkpoint.json").read_text())["step"]
