"""DSpark drafts: tokens of a block drafted one after the other, by a light head over states computed all at once.

To a DFlash draft it adds

- a draft in the anchor's slot too: B slots draft B tokens, slot k the one at anchor + k + 1;
- a Markov head: the token before adds ``markov_w2[markov_w1[token]]``, a product of low rank, to a slot's logits;
- a confidence head: the chance that the target accepts a slot's draft, for a server under load to cut a block short by;
- a loss against the target's distribution p: ``.1 CE + .9 |p - q| + BCE(confidence, 1 - |p - q| / 2)``.

It needs the target's last hidden states::

    target:  {kind: target-forward, type: transformers, ..., last_hidden: true}
    drafter: {kind: drafter, type: dspark, inputs: target, block_size: 7, markov_rank: 256}

Like a DFlash draft it is exported without embedding and head, which are the target's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from flowdflash.dflash.config import DraftConfig
from flowdflash.errors import ModelInvalid
from flowdflash.plugin import hookimpl
from flowdflash.stage import Drafter
from flowdflash.training.drafter import DraftTraining
from flowdflash.training.options import DrafterOptions, DraftKind

if TYPE_CHECKING:
    from flowdflash_dspark.draft import DSparkDraft


@dataclass(frozen=True)
class DSparkConfig(DraftConfig):
    """Shape of a DSpark draft.

    Attributes:
        markov_rank: rank of the Markov head.
        markov_head_type, enable_confidence_head, confidence_head_with_markov: what else such drafts are published as;
            only the values below are supported.
    """

    architecture: ClassVar[str] = "Qwen3DSparkModel"
    first_slot: ClassVar[int] = 0

    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.markov_rank) is not int or self.markov_rank < 1:
            raise ModelInvalid(f"draft config: markov_rank should be a positive integer, got {self.markov_rank!r}")
        for name in self.own_fields()[1:]:
            value, only = getattr(self, name), getattr(DSparkConfig, name)
            if value != only:
                raise ModelInvalid(f"draft config: {name} {value!r} is not supported, only {only!r}")

    def own_keys(self) -> dict[str, Any]:
        """Its servers look for these two at the top as well."""
        flat = {"mask_token_id": self.mask_token_id, "target_layer_ids": list(self.target_layer_ids)}
        return {**super().own_keys(), **flat}

    def own_tensors(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Those of a DFlash draft, and of the two heads."""
        return {
            **shapes,
            "markov_head.markov_w1.weight": (self.vocab_size, self.markov_rank),
            "markov_head.markov_w2.weight": (self.vocab_size, self.markov_rank),
            "confidence_head.proj.weight": (1, self.hidden_size + self.markov_rank),
            "confidence_head.proj.bias": (1,),
        }

    def new_draft(self, *, seed: int | None = 0) -> DSparkDraft:
        """A draft of this shape."""
        from flowdflash_dspark.draft import DSparkDraft

        return DSparkDraft(self, seed=seed)


class DSparkDrafter(DraftTraining, Drafter):
    """Trains a DSpark draft: a DFlash draft with a Markov head and a confidence head, against the target's choices."""

    type = "dspark"

    class Config(DrafterOptions):
        """Options of the drafter ``dspark``."""

        draft_kind: ClassVar[DraftKind] = DSparkConfig

        loss: Literal["dspark"] = Field(  # type: ignore[assignment]
            "dspark", description="Cross-entropy, distance and confidence, .1 : .9 : 1; needs the target's last_hidden."
        )
        markov_rank: int = Field(256, ge=1, description="Rank of what the token before adds to a slot's logits.")


@hookimpl
def flowdflash_register(registry: Any) -> None:
    """Adds the drafter ``dspark``."""
    registry.register(DSparkDrafter)
