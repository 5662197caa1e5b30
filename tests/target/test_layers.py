from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowdflash.target.layers import auto_layers, layers_problem, resolve_layers


@pytest.mark.parametrize(
    ("depth", "count", "layers"),
    [
        (16, 5, (1, 4, 7, 10, 13)),
        (24, 5, (1, 6, 11, 16, 21)),
        (28, 3, (1, 13, 25)),
        (28, 5, (1, 7, 13, 19, 25)),
        (30, 5, (1, 8, 14, 20, 27)),
        (32, 5, (1, 8, 15, 22, 29)),
        (36, 5, (1, 9, 17, 25, 33)),
        (40, 5, (1, 10, 19, 28, 37)),
        (48, 5, (1, 12, 23, 34, 45)),
        (64, 5, (1, 16, 31, 46, 61)),
        (36, 2, (1, 33)),
        (28, 1, (14,)),
    ],
)
def test_rule_gives_the_published_layers(depth: int, count: int, layers: tuple[int, ...]) -> None:
    assert auto_layers(depth, count) == layers


@given(st.integers(2, 120), st.integers(1, 12))
def test_rule_gives_usable_layers_or_names_the_block_count(depth: int, count: int) -> None:
    try:
        layers = auto_layers(depth, count)
    except ValueError as error:
        assert f"{depth} decoder layers" in str(error)
    else:
        assert len(layers) == count
        assert layers_problem(layers, depth) == ""


@pytest.mark.parametrize("layers", [[4], [3], [-1], [2, 2], [2, 0], []])
def test_39_wrong_layer_lists_are_refused(layers: list[int]) -> None:
    with pytest.raises(ValueError):
        resolve_layers(layers, 5, 4)


def test_39_a_layer_out_of_range_names_the_block_count() -> None:
    assert "4 decoder layers" in layers_problem([0, 3], 4)


def test_order_is_checked_where_the_depth_is_not_known() -> None:
    assert layers_problem([3, 1], None)
    assert not layers_problem([1, 300], None)
