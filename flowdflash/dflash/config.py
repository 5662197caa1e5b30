"""Shape of a draft model, the rule for its layers, and the table of its tensors. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from flowdflash.errors import ModelInvalid

if TYPE_CHECKING:
    from flowdflash.dflash.model import DFlashDraft


def auto_layers(num_target_layers: int, n: int) -> tuple[int, ...]:
    """The ``n`` target layers to tap by default: evenly spaced from the second to the third-to-last.

    Layers are 0-based and mean "output of decoder layer l". A single layer is the middle one.

    Raises:
        ModelInvalid: the target has too few layers for ``n`` different taps.
    """
    if n < 1:
        raise ModelInvalid(f"a draft needs at least one target layer, got {n}")
    if n == 1:
        layers: tuple[int, ...] = (num_target_layers // 2,)
    else:
        span = num_target_layers - 4
        layers = tuple(round(1 + j * span / (n - 1)) for j in range(n))
    wrong = layers_problem(layers, num_target_layers)
    if wrong:
        raise ModelInvalid(
            f"a target of {num_target_layers} decoder layers is too shallow for {n} automatic layers: {wrong}"
        )
    return layers


def layers_problem(layers: Sequence[int], num_target_layers: int | None) -> str:
    """What is wrong with a list of tapped layers; empty if nothing. ``num_target_layers`` None: depth not known yet.

    The last layer is out of range: what most code calls its output has been through the final norm already (L6).
    """
    if not layers:
        return "at least one target layer is needed"
    if any(b <= a for a, b in pairwise(layers)):
        return f"target layers must be strictly increasing, without repeats, got {list(layers)}"
    if layers[0] < 0:
        return f"target layer {layers[0]} does not exist: layers are counted from 0"
    if num_target_layers is not None and layers[-1] > num_target_layers - 2:
        return (
            f"target layer {layers[-1]} is out of range: of {num_target_layers} decoder layers 0 to "
            f"{num_target_layers - 2} can be tapped (the last one's output is followed by the final norm)"
        )
    return ""


def check_layers(layers: Sequence[int], num_target_layers: int) -> None:
    """Refuse a list of tapped layers that is empty, not strictly increasing, or out of range.

    Raises:
        ModelInvalid: says what is wrong.
    """
    wrong = layers_problem(layers, num_target_layers)
    if wrong:
        raise ModelInvalid(f"{wrong} (of a target with {num_target_layers} decoder layers)")


def resolve_layers(layers: Sequence[int] | str, num_features: int, num_target_layers: int) -> tuple[int, ...]:
    """``auto`` or an explicit list, checked against the depth of the target.

    Raises:
        ModelInvalid: the list cannot be used in a target of that depth.
    """
    if isinstance(layers, str):
        return auto_layers(num_target_layers, num_features)
    check_layers(layers, num_target_layers)
    return tuple(layers)


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Everything that defines a draft model besides its weights.

    Another kind of draft is a class that derives from this one directly, with an ``architecture`` of its own: whatever
    reads a ``config.json`` finds it by that name once its module is loaded. Fields that it adds are keys at the top of
    the file.

    Attributes:
        architecture: what a ``config.json`` calls this kind of draft.
        first_slot: first slot that drafts a token: 1, after the anchor's; 0 where the anchor's drafts what follows it.
        hidden_size: width of draft and target, ``D``.
        intermediate_size: width of the MLP.
        num_hidden_layers: draft layers.
        num_attention_heads, num_key_value_heads, head_dim: attention of the draft, independent of the target's.
        vocab_size: rows of the target's embedding table, which the draft borrows.
        block_size: slots of a block, the anchor included.
        mask_token_id: the row of the target's table that stands for "unknown".
        target_layer_ids: tapped target layers, 0-based, "output of layer l", in the order of the feature columns.
        num_target_layers: decoder layers of the target.
        rms_norm_eps, rope_theta, max_position_embeddings, initializer_range: as in Qwen3.
        bos_token_id, eos_token_id, pad_token_id: of the target, for the exported config.
        final_logit_softcapping: bound of the target's logits, where it has one; the draft's are bounded alike.
    """

    architecture: ClassVar[str] = "DFlashDraftModel"
    first_slot: ClassVar[int] = 1

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position_embeddings: int = 40960
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    final_logit_softcapping: float | None = None

    def __post_init__(self) -> None:
        for field in fields(DraftConfig):
            self._check_number(field.name)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelInvalid(
                f"draft config: num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ModelInvalid(f"draft config: head_dim {self.head_dim} must be even for rotary positions")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ModelInvalid(
                f"draft config: mask_token_id {self.mask_token_id} is not a row of the embedding table "
                f"(vocab_size {self.vocab_size}); choose an existing row, resizing the table does not help"
            )
        check_layers(self.target_layer_ids, self.num_target_layers)

    def _check_number(self, name: str) -> None:
        """Refuse a value of the wrong type, or one that is not positive where it must be."""
        value = getattr(self, name)
        if name == "target_layer_ids":
            good = isinstance(value, tuple) and all(type(layer) is int for layer in value)
            wanted = "a tuple of integers"
        elif name.endswith("token_id") and name != "mask_token_id":
            good = value is None or type(value) is int or (isinstance(value, tuple) and name == "eos_token_id")
            wanted = "an integer or None"
        elif name == "final_logit_softcapping" and value is None:
            return
        elif name in ("final_logit_softcapping", "rms_norm_eps", "rope_theta", "initializer_range"):
            good, wanted = isinstance(value, int | float) and value > 0, "a positive number"
        elif name == "mask_token_id":
            good, wanted = type(value) is int, "an integer"
        else:
            good, wanted = type(value) is int and value > 0, "a positive integer"
        if not good:
            raise ModelInvalid(f"draft config: {name} should be {wanted}, got {value!r}")

    @property
    def num_features(self) -> int:
        """Tapped layers, ``K``."""
        return len(self.target_layer_ids)

    def span(self, block_size: int) -> int:
        """Tokens that the target verifies at once: the anchor and what a block of so many slots drafts."""
        return block_size + 1 - self.first_slot

    @classmethod
    def own_fields(cls) -> tuple[str, ...]:
        """Fields that this kind of draft adds."""
        return tuple(field.name for field in fields(cls))[len(fields(DraftConfig)) :]

    def own_keys(self) -> dict[str, Any]:
        """What the ``config.json`` says beside what that of a DFlash draft does."""
        return {name: getattr(self, name) for name in self.own_fields()}

    def own_tensors(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The table of ``tensor_shapes`` for this kind of draft; ``shapes`` is that of a DFlash draft."""
        return shapes

    def new_draft(self, *, seed: int | None = 0) -> DFlashDraft:
        """A draft of this kind and shape; see ``DFlashDraft``."""
        from flowdflash.dflash.model import DFlashDraft

        return DFlashDraft(self, seed=seed)

    def as_dict(self) -> dict[str, Any]:
        """All that two drafts can differ in."""
        return {"architecture": self.architecture, **asdict(self)}

    @property
    def num_parameters(self) -> int:
        """Parameters of the draft; embedding and head are the target's and do not count."""
        total = 0
        for shape in tensor_shapes(self).values():
            size = 1
            for side in shape:
                size *= side
            total += size
        return total


def tensor_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor, named as in published drafts; ``11 * num_hidden_layers + 3`` of a DFlash draft."""
    D, I, d = config.hidden_size, config.intermediate_size, config.head_dim  # noqa: E741
    q_rows, kv_rows = config.num_attention_heads * d, config.num_key_value_heads * d
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (D, config.num_features * D),
        "hidden_norm.weight": (D,),
        "norm.weight": (D,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (D,),
        "post_attention_layernorm": (D,),
        "self_attn.q_proj": (q_rows, D),
        "self_attn.k_proj": (kv_rows, D),
        "self_attn.v_proj": (kv_rows, D),
        "self_attn.o_proj": (D, q_rows),
        "self_attn.q_norm": (d,),
        "self_attn.k_norm": (d,),
        "mlp.gate_proj": (I, D),
        "mlp.up_proj": (I, D),
        "mlp.down_proj": (D, I),
    }
    for i in range(config.num_hidden_layers):
        shapes.update({f"layers.{i}.{name}.weight": shape for name, shape in layer.items()})
    return config.own_tensors(shapes)
