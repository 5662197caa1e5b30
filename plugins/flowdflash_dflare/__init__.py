"""DFlare drafts: every layer of the draft reads a mix of the target's layers of its own.

A DFlash draft fuses the tapped layers into one context (``fc``) that all its layers share. Here draft layer i attends
to ``hidden_norm(sum_j softmax(w_i)_j * tap_j)``, with a row ``w_i`` of ``layer_fusion_weights`` to itself, through keys
and values projected apart from those of its block (``k_proj_target``, ``v_proj_target``). Loss, anchors and decoding
are those of DFlash. Published drafts tap nine layers, every fourth, with seven layers of their own::

    target:  {kind: target-forward, type: transformers, ..., num_features: 9}
    drafter: {kind: drafter, type: dflare, inputs: target, num_hidden_layers: 7}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from flowdflash.dflash.config import DraftConfig
from flowdflash.plugin import hookimpl
from flowdflash.stage import Drafter
from flowdflash.training.drafter import DraftTraining
from flowdflash.training.options import DrafterOptions, DraftKind

if TYPE_CHECKING:
    from flowdflash_dflare.draft import DFlareDraft


@dataclass(frozen=True)
class DFlareConfig(DraftConfig):
    """Shape of a DFlare draft: that of a DFlash draft, with other tensors."""

    architecture: ClassVar[str] = "QwenDFlareDraftModel"

    def own_tensors(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """No ``fc``; a row of weights per layer, and projections of the context."""
        del shapes["fc.weight"]
        shapes["layer_fusion_weights"] = (self.num_hidden_layers, self.num_features)
        for i in range(self.num_hidden_layers):
            for name in ("k_proj", "v_proj"):
                shapes[f"layers.{i}.self_attn.{name}_target.weight"] = shapes[f"layers.{i}.self_attn.{name}.weight"]
        return shapes

    def new_draft(self, *, seed: int | None = 0) -> DFlareDraft:
        """A draft of this shape."""
        from flowdflash_dflare.draft import DFlareDraft

        return DFlareDraft(self, seed=seed)


class DFlareDrafter(DraftTraining, Drafter):
    """Trains a DFlare draft: per-layer mixes of the target's layers, and a projection of the context of their own."""

    type = "dflare"

    class Config(DrafterOptions):
        """Options of the drafter ``dflare``."""

        draft_kind: ClassVar[DraftKind] = DFlareConfig

        init: Literal["random"] = Field(
            "random", description="Start at random; the target has no layer that reads a context as these do."
        )


@hookimpl
def flowdflash_register(registry: Any) -> None:
    """Adds the drafter ``dflare``."""
    registry.register(DFlareDrafter)
