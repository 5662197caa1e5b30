"""Shape of a draft, the rule for its layers, the table of its tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowdflash.dflash.config import (
    DraftConfig,
    auto_layers,
    check_layers,
    layers_problem,
    resolve_layers,
    tensor_shapes,
)
from flowdflash.errors import ModelInvalid

TABLE = {
    16: ((1, 13), (1, 7, 13), (1, 4, 7, 10, 13)),
    24: ((1, 21), (1, 11, 21), (1, 6, 11, 16, 21)),
    28: ((1, 25), (1, 13, 25), (1, 7, 13, 19, 25)),
    32: ((1, 29), (1, 15, 29), (1, 8, 15, 22, 29)),
    36: ((1, 33), (1, 17, 33), (1, 9, 17, 25, 33)),
    40: ((1, 37), (1, 19, 37), (1, 10, 19, 28, 37)),
    48: ((1, 45), (1, 23, 45), (1, 12, 23, 34, 45)),
    64: ((1, 61), (1, 31, 61), (1, 16, 31, 46, 61)),
}


@pytest.mark.parametrize("num_target_layers", TABLE)
def test_auto_layers_gives_the_published_choices(num_target_layers: int) -> None:
    assert tuple(auto_layers(num_target_layers, n) for n in (2, 3, 5)) == TABLE[num_target_layers]
    assert auto_layers(num_target_layers, 1) == (num_target_layers // 2,)


@pytest.mark.parametrize(("num_target_layers", "n"), [(4, 2), (4, 5), (3, 2), (6, 5), (1, 1), (2, 1), (16, 0)])
def test_auto_layers_refuses_a_target_that_is_too_shallow(num_target_layers: int, n: int) -> None:
    with pytest.raises(ModelInvalid):
        auto_layers(num_target_layers, n)


@given(st.integers(2, 120), st.integers(1, 12))
def test_the_rule_gives_usable_layers_or_names_the_layer_count(depth: int, count: int) -> None:
    try:
        layers = auto_layers(depth, count)
    except ModelInvalid as error:
        assert f"{depth} decoder layers" in str(error)
    else:
        assert len(layers) == count
        assert layers_problem(layers, depth) == ""


@pytest.mark.parametrize("layers", [[4], [-1], [2, 2], [2, 0], [], [3], [0, 3]])
def test_39_bad_layer_lists_are_refused_naming_the_layer_count(layers: list[int]) -> None:
    with pytest.raises(ModelInvalid, match="4 decoder layers"):
        check_layers(layers, 4)
    with pytest.raises(ModelInvalid, match="4 decoder layers"):
        resolve_layers(layers, 5, 4)


def test_l6_good_layer_lists_pass() -> None:
    check_layers([0, 2], 4)
    check_layers([1], 4)
    assert resolve_layers([0, 2], 5, 4) == (0, 2)
    assert resolve_layers("auto", 2, 6) == (1, 3)


def test_order_is_checked_where_the_depth_is_not_known() -> None:
    assert layers_problem([3, 1], None)
    assert not layers_problem([1, 300], None)


QWEN3_8B = DraftConfig(4096, 12288, 5, 32, 8, 128, 151936, 16, 151669, (1, 9, 17, 25, 33), 36)


@pytest.mark.parametrize(
    ("config", "millions"),
    [
        (QWEN3_8B, 1048.6),
        (replace(QWEN3_8B, hidden_size=2560, intermediate_size=9728), 537.4),
        (replace(QWEN3_8B, hidden_size=2048, intermediate_size=6144, num_attention_heads=16), 272.7),
        (replace(QWEN3_8B, hidden_size=1024, intermediate_size=3072, num_attention_heads=16), 83.9),
        (
            DraftConfig(896, 4864, 5, 14, 2, 64, 151936, 16, 151669, (1, 6, 11, 16, 21), 24),
            78.6,
        ),
    ],
)
def test_parameter_counts_of_published_drafts(config: DraftConfig, millions: float) -> None:
    assert config.num_parameters / 1e6 == pytest.approx(millions, abs=0.06)


@pytest.mark.parametrize("layers", [1, 2, 5, 8])
def test_eleven_tensors_per_layer_and_three_more(config: DraftConfig, layers: int) -> None:
    assert len(tensor_shapes(replace(config, num_hidden_layers=layers))) == 11 * layers + 3


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mask_token_id": 272}, "mask_token_id 272"),
        ({"mask_token_id": 300}, "mask_token_id 300"),
        ({"mask_token_id": -1}, "mask_token_id -1"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": True}, "block_size"),
        ({"hidden_size": 32.0}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"target_layer_ids": [0, 2]}, "target_layer_ids"),
        ({"target_layer_ids": (2, 0)}, "strictly increasing"),
        ({"rope_theta": 0.0}, "rope_theta"),
        ({"eos_token_id": "2"}, "eos_token_id"),
    ],
)
def test_w3_unusable_values_are_refused_by_name(config: DraftConfig, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelInvalid, match=named):
        replace(config, **changes)


def test_a_mask_token_in_the_padding_rows_of_the_table_is_allowed(config: DraftConfig) -> None:
    assert replace(config, mask_token_id=271).mask_token_id == 271
