"""The options of a drafter."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from flowdflash.dflash.config import DraftConfig
from flowdflash.stage import PipelinePath, StageConfig
from flowdflash.target.devices import OneDevice
from flowdflash.training.build import GEOMETRY

AutoInt = Literal["auto"] | int
# A stage has an attribute named `type`, in whose place annotations of a nested Config are looked up.
DraftKind = type[DraftConfig]
Share = Annotated[float, Field(ge=0, lt=1)]


class DrafterOptions(StageConfig):
    """Options of a drafter; a derived class adds those of another kind of draft, under the names of its fields."""

    draft_kind: ClassVar[DraftKind] = DraftConfig

    block_size: int = Field(16, ge=2, description="Slots of a block: the anchor and the drafted tokens.")
    num_hidden_layers: int = Field(5, ge=1, description="Draft layers.")
    num_attention_heads: AutoInt = Field("auto", description="Query heads; auto takes the target's.")
    num_key_value_heads: AutoInt = Field("auto", description="Key-value heads; auto takes the target's.")
    head_dim: AutoInt = Field("auto", description="Size of a head; auto takes the target's.")
    intermediate_size: AutoInt = Field("auto", description="Width of the MLP; auto takes the target's.")
    rope_theta: Literal["auto"] | float = Field(
        "auto", description="Base of the draft's rotary positions; auto takes the target's."
    )
    mask_token_id: AutoInt = Field(
        "auto", description="Embedding row that stands for 'unknown'; auto: the target's mask token or a spare row."
    )
    init: Literal["random", "target"] = Field(
        "random", description="Start the draft layers at random, or from the target's last layers (small budgets)."
    )
    init_from: PipelinePath | None = Field(
        None,
        description="Go on from a draft instead: folder of a run, of a checkpoint or of an export in either format. "
        "It must be the draft that these options describe, save for block_size.",
    )
    num_anchors: int = Field(512, ge=1, description="Most anchors per sample, in a packed row on average; drawn anew.")
    anchor_slots: Literal["fixed", "tight"] = Field(
        "tight", description="Pad every batch to num_anchors (no recompilation on a GPU), or to what it needs."
    )
    anchor_cost_tokens: Literal["probe"] | Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="Target tokens that take as much time as one anchor, for the cost of a batch (dispatch, "
        "cost_budget); probe measures it before training and says what it found.",
    )
    loss: Literal["ce", "kl", "tv"] = Field(
        "ce",
        description="ce learns the tokens of the data; kl and tv the target's distribution (target: last_hidden).",
    )
    weights: Literal["decay", "dpace", "auf"] = Field(
        "decay",
        description="Weight of a slot: falling by place, what it adds to the expected accepted run (dpace), or 1 up to "
        "the first wrong one (auf).",
    )
    gamma: Literal["auto", "none"] | float = Field("auto", description="Decay constant of weights: decay.")
    alpha: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Of weights: dpace; 0 trusts the draft's probabilities alone, 1 the place alone.",
    )
    label_gap: Literal["cut", "keep"] = Field(
        "cut", description="End a block at its first unsupervised token, or skip it."
    )
    softmax: Literal["full", "seen"] = Field(
        "full",
        description="Train against the whole vocabulary, or against the tokens that occur in the data (faster; "
        "evaluation always uses the whole).",
    )
    attention: Literal["auto", "sdpa", "eager", "flex"] = Field(
        "auto", description="Attention backend; auto: flex on CUDA, else sdpa."
    )
    chunk_slots: int = Field(1024, ge=0, description="Slots whose logits exist at once; 0 for all. Changes no result.")
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Of the forward pass; parameters are fp32 always. auto: bfloat16 where that is fast.",
    )
    device: OneDevice = Field("auto", description="auto, cpu, cuda or cuda:N; auto is GPU 0 if there is one.")
    accumulate: int = Field(
        1, ge=1, description="Micro-batches per optimizer step; in planned order a window never crosses an epoch."
    )
    max_steps: int = Field(0, ge=0, description="Stop after so many optimizer steps; 0 for the whole plan.")
    compile: bool = Field(False, description="Compile the draft with torch.compile before training begins.")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="adamw for all weights; muon for matrices and adamw for the rest, at the same lr."
    )
    lr: float = Field(6e-4, gt=0, description="Peak learning rate.")
    betas: tuple[Share, Share] = Field((0.9, 0.999), description="Of AdamW, each below 1.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="Learning rate over optimizer steps."
    )
    warmup: float = Field(0.04, ge=0, le=1, description="Share of the steps over which the learning rate rises.")
    clip: float = Field(1.0, gt=0, description="Largest gradient norm.")
    on_nonfinite: Literal["stop", "skip_step"] = Field(
        "stop", description="What a loss or gradient that is not finite does."
    )
    max_skipped: int = Field(10, ge=1, description="With skip_step: so many in a row stop the run.")

    @model_validator(mode="after")
    def _positive(self) -> DrafterOptions:
        for name in GEOMETRY:
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name} must be auto or a positive number, got {value}")
        if isinstance(self.head_dim, int) and self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
            raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        for name in ("gamma", "rope_theta"):
            value = getattr(self, name)
            if isinstance(value, float) and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        return self
