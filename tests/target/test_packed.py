"""Packed rows in the target: the features of a document are those that it has alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from flowdflash.errors import ModelInvalid
from flowdflash.items import TokenBatch
from flowdflash.stage import SilentReport
from flowdflash.stages.transformers_target import TransformersTarget
from flowdflash.target import packed
from flowdflash.target.features import FeatureCache
from flowdflash.target.tapped import TappedTarget

from .models import TOY_REF, batch_of, context, family_folder, random_rows

LENGTHS = [23, 1, 40, 8]


def packed_batch(rows: list[list[int]], first_id: int = 0) -> TokenBatch:
    batch = batch_of(rows, first_id=first_id)
    ids = np.concatenate([np.array(row) for row in rows])[None]
    info = replace(batch.info, packed=True, padded_tokens=ids.size)
    return TokenBatch(info, ids, np.ones_like(ids, dtype=bool), batch.lengths)


def windowed_folder(folder: Path) -> Path:
    """Every layer sees the last five tokens only."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8}
    config = MistralConfig(
        **shape, num_key_value_heads=2, intermediate_size=64, vocab_size=272, sliding_window=5, initializer_range=0.2
    )
    MistralForCausalLM(config).save_pretrained(folder)
    return folder


def tapped(ref: str, cache: Path, *, is_packed: bool = True, **options: Any) -> TappedTarget:
    given: dict[str, Any] = {"layers": (0, 2), "num_features": 2, "last_hidden": False, "dtype": "float32"} | options
    return TappedTarget(ref, cache, device="cpu", packed=is_packed, replica=0, report=SilentReport(), **given)


def model_ref(kind: str, folder: Path) -> str:
    made = {"gpt2": partial(family_folder, "gpt2"), "windowed": windowed_folder}
    return str(made[kind](folder / "model")) if kind in made else kind


@pytest.mark.parametrize("kind", [TOY_REF, 'toy:{"family":"qwen3"}', "gpt2", "windowed"])
@pytest.mark.parametrize("last_hidden", [False, True])
def test_l7_features_of_a_document_are_those_that_it_has_alone(
    kind: str, last_hidden: bool, tmp_path: Path, cache: Path
) -> None:
    ref, rows = model_ref(kind, tmp_path), random_rows(LENGTHS)
    one = tapped(ref, cache, is_packed=False, last_hidden=last_hidden)
    batch = packed_batch(rows)
    together = tapped(ref, cache, last_hidden=last_hidden).features(batch)[0]
    assert together.shape == (72, 96 if last_hidden else 64)
    for row, (_, columns) in zip(rows, batch.info.places, strict=True):
        torch.testing.assert_close(together[columns], one.features(batch_of([row]))[0], atol=2e-5, rtol=1e-5)


def test_l7_rows_of_their_own_are_read_as_before(cache: Path) -> None:
    batch = batch_of(random_rows([9, 30]))
    assert torch.equal(tapped(TOY_REF, cache).features(batch), tapped(TOY_REF, cache, is_packed=False).features(batch))


def test_l7_a_target_that_does_not_isolate_documents_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose layers hand on a state of their own would not."""

    def over_all(*args: Any, documents: Any = (), **options: Any) -> Any:
        return isolated(*args, **options)

    isolated = packed._by_document
    monkeypatch.setattr(packed, "_by_document", over_all)
    with pytest.raises(ModelInvalid, match=r"cannot read packed rows: .* use a bucketer that pads"):
        tapped(TOY_REF, cache).load()


def test_bfloat16_is_not_taken_for_a_leak(cache: Path) -> None:
    tapped(TOY_REF, cache, dtype="bfloat16").load()


def test_a_packed_batch_that_no_bucketer_announced_is_refused(cache: Path) -> None:
    with pytest.raises(ModelInvalid, match="packed: True"):
        tapped(TOY_REF, cache, is_packed=False).features(packed_batch([[1, 2], [3]]))


def test_a_row_may_be_longer_than_the_target_reads_but_no_document(tmp_path: Path, cache: Path) -> None:
    target = tapped(str(family_folder("gpt2", tmp_path / "model")), cache)
    assert target.features(packed_batch(random_rows([200, 200]))).shape == (1, 400, 64)
    with pytest.raises(ModelInvalid, match="sample of 300 tokens"):
        target.features(packed_batch(random_rows([10, 300])))


def test_features_kept_from_packed_rows_are_read_in_any_batch(tmp_path: Path, cache: Path) -> None:
    rows = random_rows(LENGTHS)
    options: dict[str, Any] = {"model": TOY_REF, "layers": (0, 2), "dtype": "float32", "device": "cpu"}
    config = TransformersTarget.Config(**options, keep="disk", keep_dir=tmp_path / "kept")
    stage = TransformersTarget(config)
    stage.open(context(tmp_path, cache, packed=True))
    computed = stage.forward(packed_batch(rows)).features
    padded = stage.forward(batch_of(rows[::-1])).features
    again = stage.forward(packed_batch([rows[2], rows[0]])).features
    assert dict(stage.summary())["samples_computed"] == 4 and dict(stage.summary())["samples_read"] == 6
    stage.close()
    for place, (_, columns) in enumerate(packed_batch(rows).info.places):
        assert torch.equal(padded[3 - place, : LENGTHS[place]], computed[0, columns])
        assert not padded[3 - place, LENGTHS[place] :].any()
    assert torch.equal(again[0, :40], computed[0, 24:64]) and torch.equal(again[0, 40:], computed[0, :23])
    kept = FeatureCache(tmp_path / "kept", stage_fingerprint(tmp_path / "kept"))
    assert len(kept) == 4


def stage_fingerprint(folder: Path) -> Any:
    import json

    return json.loads((folder / "manifest.json").read_text())
