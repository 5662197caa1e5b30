from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flowdflash.stages.toy_target import ToyTarget
from flowdflash.target.load import load_embedding_and_head

from .models import batch_of, context, problems, random_rows


def stage(**options: Any) -> ToyTarget:
    return ToyTarget(ToyTarget.Config(**options))


def test_downstream_loads_the_same_toy_from_the_fact_alone(tmp_path: Path, cache: Path) -> None:
    target = stage(family="qwen3", model_seed=5)
    found, facts = problems(target)
    assert found == []
    assert facts["layers"] == (1, 3)
    assert (facts["mask_token_id"], facts["vocab_size"], facts["num_layers"]) == (260, 272, 6)
    target.open(context(tmp_path, cache))
    out = target.forward(batch_of(random_rows([11, 4])))
    assert out.features.shape == (2, 11, 64)
    assert out.layers == facts["layers"]
    head = load_embedding_and_head(facts["model"], cache).head
    assert out.probe is not None
    torch.testing.assert_close(out.probe.hidden @ head.T, out.probe.logits, atol=1e-4, rtol=1e-4)
    assert target.forward(batch_of([[1]], seq=1)).probe is None
    assert target.summary() == {"samples_computed": 3}
    target.close()


@pytest.mark.parametrize(
    ("options", "facts", "path"),
    [
        ({"heads": 3}, {}, ""),
        ({"mask_token_id": 500}, {}, ""),
        ({"layers": [5]}, {}, "layers"),
        ({"num_features": 5}, {}, "num_features"),
        ({}, {"tokenizer": "SmolLM2-135M-Instruct"}, "vocab_size"),
        ({}, {"max_length": 9999}, "max_position_embeddings"),
    ],
)
def test_impossible_toys_and_foreign_data_are_refused(
    options: dict[str, Any], facts: dict[str, Any], path: str
) -> None:
    found, _ = problems(stage(**options), **facts)
    assert [place for place, _ in found] == [path]


def test_any_toys_byte_tokenizer_fits_a_toy() -> None:
    assert problems(stage(num_layers=6), tokenizer="toy:{}")[0] == []
