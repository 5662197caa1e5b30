"""Which decoder layers of a target are tapped. Ids are 0-based and mean "output of layer l". No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def auto_layers(num_layers: int, num_features: int) -> tuple[int, ...]:
    """The field's rule: evenly from the second to the third-to-last layer, rounded half to even.

    Raises:
        ValueError: the model is too shallow for that many different layers.
    """
    if num_features == 1:
        layers: tuple[int, ...] = (num_layers // 2,)
    else:
        layers = tuple(round(1 + j * (num_layers - 4) / (num_features - 1)) for j in range(num_features))
    wrong = layers_problem(layers, num_layers)
    if wrong:
        raise ValueError(
            f"the rule for {num_features} features gives layers {list(layers)} "
            f"in a model of {num_layers} decoder layers: {wrong}"
        )
    return layers


def layers_problem(layers: Sequence[int], num_layers: int | None) -> str:
    """What is wrong with a list of tapped layers; empty if nothing. ``num_layers`` None: depth not known yet.

    The last layer is refused: what a server captures there, and what transformers calls its hidden state, is the value
    after the final norm in some places and before it in others (pitfall L6).
    """
    if not layers:
        return "no layer is tapped"
    if any(b <= a for a, b in pairwise(layers)):
        return f"layers must be strictly increasing, got {list(layers)}"
    if layers[0] < 0:
        return f"layer {layers[0]} does not exist: ids count decoder layers from 0"
    if num_layers is not None and layers[-1] > num_layers - 2:
        return (
            f"layer {layers[-1]} cannot be tapped: the model has {num_layers} decoder layers, ids 0 to {num_layers - 2}"
        )
    return ""


def resolve_layers(layers: Sequence[int] | str, num_features: int, num_layers: int) -> tuple[int, ...]:
    """``auto`` or an explicit list, checked against the depth of the model.

    Raises:
        ValueError: the list cannot be used in a model of that depth.
    """
    if isinstance(layers, str):
        return auto_layers(num_layers, num_features)
    wrong = layers_problem(layers, num_layers)
    if wrong:
        raise ValueError(wrong)
    return tuple(layers)
