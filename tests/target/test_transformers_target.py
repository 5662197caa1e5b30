from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flowdflash.errors import ModelInvalid
from flowdflash.items import FeatureBatch, TokenBatch
from flowdflash.stages.transformers_target import TransformersTarget
from flowdflash.target.hidden import batch_features
from flowdflash.target.load import LoadedTarget

from .models import TOY_REF, batch_of, context, llama_folder, problems, random_rows


def stage(**options: Any) -> TransformersTarget:
    defaults: dict[str, Any] = {"model": TOY_REF, "layers": [0, 2], "dtype": "float32", "device": "cpu"}
    return TransformersTarget(TransformersTarget.Config(**{**defaults, **options}))


def run(target: TransformersTarget, ctx: Any, batches: list[TokenBatch]) -> list[FeatureBatch]:
    try:
        target.open(ctx)
        return [target.forward(batch) for batch in batches]
    finally:
        target.close()


def test_facts_are_known_without_weights() -> None:
    found, facts = problems(stage(model="SmolLM2-135M-Instruct", layers="auto", dtype="auto"))
    assert found == []
    assert facts["layers"] == (1, 8, 14, 20, 27)
    assert (facts["hidden_size"], facts["num_layers"], facts["vocab_size"], facts["mask_token_id"]) == (
        576,
        30,
        49152,
        16,
    )
    assert "dtype" not in facts
    found, facts = problems(stage(model="owner/unknown", layers="auto"))
    assert found == []
    assert "layers" not in facts
    assert facts["dtype"] == "float32"


@pytest.mark.parametrize("layers", [[4], [3], [-1], [2, 2], [2, 0], []])
def test_39_wrong_layers_are_refused_at_validation(layers: list[int]) -> None:
    found, facts = problems(stage(layers=layers))
    assert [path for path, _ in found] == ["layers"]
    assert "layers" not in facts


@pytest.mark.parametrize(
    ("options", "facts", "path"),
    [
        ({}, {"tokenizer": "Qwen/Qwen3-8B"}, "model"),
        ({}, {"task": "generate"}, ""),
        ({}, {"max_length": 5000}, "model"),
        ({"model": "NoSuchModel"}, {}, "model"),
        ({"layers": "auto", "num_features": 5}, {}, "num_features"),
        ({"num_features": 3}, {}, "num_features"),
        ({"max_bytes": "1GiB"}, {}, "max_bytes"),
        ({"keep_dir": "/tmp/x"}, {}, "keep_dir"),
        ({"device": "cuda:1", "replicas": 2}, {}, "device"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], facts: dict[str, Any], path: str) -> None:
    found, _ = problems(stage(**options), **facts)
    assert [place for place, _ in found] == [path]


def test_the_same_tokenizer_and_a_fitting_length_pass() -> None:
    assert problems(stage(), tokenizer="toy:{}", max_length=4096, task="train")[0] == []
    assert problems(stage(keep="disk", max_bytes="1GiB", keep_dir="kept"))[0] == []


def test_features_and_one_probe_per_replica(tmp_path: Path, cache: Path, toy: LoadedTarget) -> None:
    batches = [batch_of(random_rows([23, 9])), batch_of(random_rows([5], seed=1), seq=1)]
    first, second = run(stage(), context(tmp_path, cache), batches)
    assert torch.equal(first.features, batch_features(toy, (0, 2), batches[0]))
    assert first.layers == (0, 2)
    assert first.tokens is batches[0]
    assert first.probe is not None
    assert first.probe.logits.shape == (8, 272)
    assert second.probe is None
    assert not first.features.requires_grad


def test_auto_layers_are_resolved_when_the_depth_becomes_known(tmp_path: Path, cache: Path) -> None:
    folder = llama_folder(tmp_path / "model")
    (out,) = run(
        stage(model=str(folder), layers="auto", num_features=1), context(tmp_path, cache), [batch_of([[1, 2]])]
    )
    assert out.layers == (2,)
    with pytest.raises(ModelInvalid, match="4 decoder layers"):
        run(stage(model=str(folder), layers="auto", num_features=3), context(tmp_path, cache), [])


def test_kept_features_are_what_was_computed_in_any_order(tmp_path: Path, cache: Path) -> None:
    rows = random_rows([23, 61, 40, 8])
    keep = {"keep": "disk", "keep_dir": str(tmp_path / "kept"), "dtype": "bfloat16"}
    first = stage(**keep)
    (a, b) = run(first, context(tmp_path, cache), [batch_of(rows[:2]), batch_of(rows[2:], seq=1)])
    assert first.summary()["samples_computed"] == 4
    assert first.summary()["kept_bytes"] > 0
    second = stage(**keep)
    order = [3, 0, 2, 1]
    (again,) = run(second, context(tmp_path, cache), [batch_of([rows[i] for i in order])])
    assert second.summary()["samples_read"] == 4
    assert second.summary()["samples_computed"] == 0
    for place, i in enumerate(order):
        source, row = (a, i) if i < 2 else (b, i - 2)
        assert torch.equal(again.features[place, : len(rows[i])], source.features[row, : len(rows[i])])
        assert not again.features[place, len(rows[i]) :].any()
    assert (again.layers, again.features.dtype) == (a.layers, a.features.dtype)
    assert again.probe is not None
    assert a.probe is not None
    assert torch.equal(again.probe.logits, a.probe.logits)


def test_the_last_states_are_carried_and_kept_where_they_are_asked_for(tmp_path: Path, cache: Path) -> None:
    batch, folder = batch_of(random_rows([23, 9])), {"keep": "disk", "keep_dir": str(tmp_path / "kept")}
    (plain,) = run(stage(), context(tmp_path, cache), [batch])
    (first,) = run(stage(last_hidden=True, **folder), context(tmp_path, cache), [batch])
    second = stage(last_hidden=True, **folder)
    (again,) = run(second, context(tmp_path, cache), [batch])
    assert second.summary()["samples_computed"] == 0
    assert plain.last_hidden is None and torch.equal(plain.features, first.features)
    assert first.last_hidden.shape == (2, 23, 32) and first.nbytes == plain.nbytes + 2 * 23 * 32 * 4
    assert torch.equal(first.last_hidden, again.last_hidden) and torch.equal(first.features, again.features)
    assert not first.last_hidden[1, 9:].any() and not first.last_hidden.requires_grad
    with pytest.raises(ModelInvalid, match="last_hidden: kept True, this run absent"):
        run(stage(**folder), context(tmp_path, cache), [batch])


def test_a_second_epoch_reads(tmp_path: Path, cache: Path) -> None:
    rows = random_rows([12, 7, 30])
    target = stage(keep="disk", keep_dir=str(tmp_path / "kept"))
    epochs = [batch_of(rows), batch_of(rows, seq=1, epoch=1)]
    first, second = run(target, context(tmp_path, cache), epochs)
    assert torch.equal(first.features, second.features)
    assert (target.summary()["samples_computed"], target.summary()["samples_read"]) == (3, 3)


def test_a_batch_with_one_new_row_is_computed_whole_and_kept(tmp_path: Path, cache: Path) -> None:
    rows = random_rows([12, 7, 30])
    target = stage(keep="disk", keep_dir=str(tmp_path / "kept"))
    batches = [batch_of(rows[:1]), batch_of(rows[:2], seq=1), batch_of(rows[1:2], seq=2)]
    run(target, context(tmp_path, cache), batches)
    assert (target.summary()["samples_computed"], target.summary()["samples_read"]) == (3, 1)


def test_a_run_whose_samples_are_all_kept_does_not_load_the_target(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flowdflash.target import tapped

    rows = random_rows([12, 7])
    keep = {"keep": "disk", "keep_dir": str(tmp_path / "kept")}
    run(stage(**keep), context(tmp_path, cache, samples=2), [batch_of(rows)])
    loads: list[bool] = []
    real = tapped.load_target
    monkeypatch.setattr(tapped, "load_target", lambda *a, **k: (loads.append(k["while_running"]), real(*a, **k))[1])
    run(stage(**keep), context(tmp_path, cache, samples=2), [batch_of(rows)])
    assert loads == []
    run(stage(**keep), context(tmp_path, cache, samples=3), [batch_of(rows)])
    assert loads == [False]
    unknown = batch_of(random_rows([5], seed=9))
    (out,) = run(stage(**keep), context(tmp_path, cache, samples=2), [unknown])
    assert loads == [False, True]
    assert out.features.any()


def test_features_of_other_layers_in_keep_dir_are_refused(tmp_path: Path, cache: Path) -> None:
    keep = {"keep": "disk", "keep_dir": str(tmp_path / "kept")}
    run(stage(**keep), context(tmp_path, cache), [batch_of([[1, 2]])])
    with pytest.raises(ModelInvalid, match=r"layers: kept \[0, 2\], this run \[0, 1\]"):
        run(stage(**keep, layers=[0, 1]), context(tmp_path, cache), [])


def test_without_keep_dir_each_setting_has_a_folder_in_the_cache(tmp_path: Path) -> None:
    for layers in ([0, 2], [0, 1]):
        run(stage(keep="disk", layers=layers), context(tmp_path, tmp_path / "cache"), [batch_of([[1, 2]])])
    assert len(list((tmp_path / "cache" / "features").iterdir())) == 2


def test_max_bytes_is_obeyed_and_told(tmp_path: Path, cache: Path) -> None:
    rows = random_rows([60, 50])
    target = stage(keep="disk", keep_dir=str(tmp_path / "kept"), max_bytes=20_000)
    run(target, context(tmp_path, cache), [batch_of(rows)])
    assert "max_bytes" in target.summary()["keeping_stopped"]
    assert target.summary()["kept_bytes"] <= 20_000


def test_close_after_a_failed_open_is_harmless(tmp_path: Path, cache: Path) -> None:
    target = stage(model=str(tmp_path / "absent"))
    with pytest.raises(ModelInvalid, match="no folder"):
        target.open(context(tmp_path, cache))
    target.close()
    assert target.summary() == {}
