"""The built-in drafter: a DFlash draft, its optimizer and its accumulation window."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from flowdflash.errors import ModelInvalid
from flowdflash.items import Checkpoint, FeatureBatch, StepRecord
from flowdflash.stage import Check, Drafter, OpenContext, StageConfig
from flowdflash.target.devices import OneDevice
from flowdflash.training.build import GEOMETRY, check_head, draft_size
from flowdflash.training.consumed import Consumed
from flowdflash.training.window import Window

AutoInt = Literal["auto"] | int
Share = Annotated[float, Field(ge=0, lt=1)]
Reason = Literal["start", "every", "final", "interrupted"]
COUNTERS = ("steps", "epoch", "skipped", "skipped_in_row", "samples_without_anchor")


class DFlashDrafter(Drafter):
    """Trains a DFlash draft: random anchors, block mask, weighted cross-entropy, normalised over the whole window."""

    type = "dflash"
    safe_to_change = frozenset({"max_skipped"})

    class Config(StageConfig):
        """Options of the drafter ``dflash``."""

        block_size: int = Field(16, ge=2, description="Slots of a block: the anchor and the drafted tokens.")
        num_hidden_layers: int = Field(5, ge=1, description="Draft layers.")
        num_attention_heads: AutoInt = Field("auto", description="Query heads; auto takes the target's.")
        num_key_value_heads: AutoInt = Field("auto", description="Key-value heads; auto takes the target's.")
        head_dim: AutoInt = Field("auto", description="Size of a head; auto takes the target's.")
        intermediate_size: AutoInt = Field("auto", description="Width of the MLP; auto takes the target's.")
        mask_token_id: AutoInt = Field(
            "auto", description="Embedding row that stands for 'unknown'; auto: the target's mask token or a spare row."
        )
        init: Literal["random", "target"] = Field(
            "random", description="Start the draft layers at random, or from the target's last layers (small budgets)."
        )
        num_anchors: int = Field(512, ge=1, description="Most anchors per sample, drawn anew at each visit.")
        anchor_slots: Literal["fixed", "tight"] = Field(
            "tight", description="Pad every batch to num_anchors (no recompilation on a GPU), or to what it needs."
        )
        gamma: Literal["auto", "none"] | float = Field("auto", description="Decay constant of the slot weights.")
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
        chunk_slots: int = Field(
            1024, ge=0, description="Slots whose logits exist at once; 0 for all. Changes no result."
        )
        precision: Literal["auto", "float32", "bfloat16"] = Field(
            "auto",
            description="Of the forward pass; parameters are fp32 always. auto: bfloat16 where that is fast.",
        )
        device: OneDevice = Field("auto", description="auto, cpu, cuda or cuda:N; auto is GPU 0 if there is one.")
        accumulate: int = Field(
            1, ge=1, description="Micro-batches per optimizer step; in planned order a window never crosses an epoch."
        )
        max_steps: int = Field(0, ge=0, description="Stop after so many optimizer steps; 0 for the whole plan.")
        lr: float = Field(6e-4, gt=0, description="Peak learning rate of AdamW.")
        betas: tuple[Share, Share] = Field((0.9, 0.999), description="Of AdamW, each below 1.")
        weight_decay: float = Field(0.0, ge=0, description="Of AdamW.")
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
        def _positive(self) -> DFlashDrafter.Config:
            for name in GEOMETRY:
                value = getattr(self, name)
                if isinstance(value, int) and value < 1:
                    raise ValueError(f"{name} must be auto or a positive number, got {value}")
            if isinstance(self.head_dim, int) and self.head_dim % 2:
                raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
            heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
            if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
                raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
            if isinstance(self.gamma, float) and self.gamma <= 0:
                raise ValueError(f"gamma must be auto, none or positive, got {self.gamma}")
            return self

    config: DFlashDrafter.Config

    def check(self, check: Check) -> Mapping[str, Any]:
        """Geometry against what is known of the target."""
        facts = check.facts
        vocab = facts.get("vocab_size")
        mask = self.config.mask_token_id
        if isinstance(mask, int) and vocab is not None and not 0 <= mask < vocab:
            check.refuse("mask_token_id", f"the target's embedding has {vocab} rows, there is no row {mask}")
        if self.config.init == "target" and facts.get("num_layers", math.inf) < self.config.num_hidden_layers:
            check.refuse("init", "the target has fewer layers than the draft is to take from it")
        if facts.get("max_length", math.inf) < self.config.block_size:
            check.refuse("block_size", f"a block is longer than the longest sample ({facts['max_length']} tokens)")
        cfg = self.config
        if cfg.on_nonfinite == "stop" and "max_skipped" in cfg.model_fields_set:
            check.refuse("max_skipped", "nothing is skipped with on_nonfinite: stop", "set skip_step, or remove it")
        if cfg.attention == "flex" and cfg.device == "cpu":
            check.refuse("attention", "flex cannot train on a CPU", "use auto or sdpa")
        told = {"block_size": cfg.block_size, "window": cfg.accumulate, "num_anchors": cfg.num_anchors}
        return {**told, **draft_size(cfg, facts)}

    def open(self, ctx: OpenContext) -> None:
        """Load embedding and head of the target, build draft, optimizer and schedule."""
        from flowdflash.training.setup import set_up, total_steps

        self.ctx = ctx
        self.total_steps = total_steps(ctx.plan, self.config)
        self.steps = self.epoch = self.skipped = self.skipped_in_row = self.samples_without_anchor = 0
        self.window = Window()
        self.consumed = Consumed()
        self.last_checkpoint: int | None = None
        self.pause_secs, self.last_waits = 0.0, dict(ctx.waits())
        self.trainer = set_up(self.config, ctx, self.total_steps)

    @property
    def on_cpu(self) -> bool:
        """It computes on the CPU."""
        return bool(self.trainer.device.type == "cpu")

    def begin(self) -> Iterator[StepRecord | Checkpoint]:
        """The untrained draft, if a sink wants it."""
        if self.ctx.checkpoint_due(0, "start"):
            yield self._snapshot("start")

    def step(self, batch: FeatureBatch) -> Iterator[StepRecord | Checkpoint]:
        """Add one micro-batch to the window; close the window when it is full or its epoch ends."""
        if batch.probe is not None:
            check_head(self.trainer.full_head, batch.probe, batch.features.dtype)
        wanted = self.trainer.draft.config.target_layer_ids
        if tuple(batch.layers) != wanted:
            raise ModelInvalid(f"features come from layers {batch.layers}, the draft expects {wanted}")
        began = time.monotonic()
        self._accumulate(batch)
        self.window.secs += time.monotonic() - began
        self.epoch = batch.info.epoch
        if len(self.window) >= self.config.accumulate or batch.info.last_of_epoch:
            yield from self._close_window()

    def _accumulate(self, batch: FeatureBatch) -> None:
        from flowdflash.dflash.anchors import draw_anchors

        tokens, info = batch.tokens, batch.info
        anchors, keep = draw_anchors(
            tokens.loss_mask,
            tokens.lengths,
            info.sample_ids,
            num_anchors=self.config.num_anchors,
            seed=self.ctx.seed,
            epoch=info.epoch,
            slots=self.config.anchor_slots,
        )
        self.window.without_anchor += int((~keep.any(dim=1)).sum())
        self.window.add(info, self.trainer.backward(batch, anchors, keep))

    def _close_window(self) -> Iterator[StepRecord | Checkpoint]:
        began = time.monotonic()
        window, self.window = self.window, Window()
        totals = window.totals()
        update = self.trainer.update(totals, self.steps)
        self.steps += 1
        self.consumed.add(info.seq for info in window.infos)
        self.samples_without_anchor += window.without_anchor
        pause_secs, self.pause_secs = self.pause_secs, 0.0
        yield totals.record(
            step=self.steps,
            lr=update.lr,
            grad_norm=update.grad_norm,
            grad_norm_clipped=update.grad_norm_clipped,
            skipped=update.skipped,
            step_secs=window.secs + time.monotonic() - began,
            pause_secs=pause_secs,
            waits_secs=self._waits(),
        )
        self._count_refusal(update.skipped, window)
        if self.ctx.checkpoint_due(self.steps, "every"):
            yield self._snapshot("every")

    def _count_refusal(self, reason: str, window: Window) -> None:
        if not reason:
            self.skipped_in_row = 0
            return
        self.skipped += 1
        if reason.startswith("no supervised"):
            return
        self.skipped_in_row += 1
        ids = [i for info in window.infos for i in info.sample_ids]
        text = f"step {self.steps}: {reason}; weights unchanged; samples {ids[:16]}{' ...' if len(ids) > 16 else ''}"
        if self.config.on_nonfinite == "stop" or self.skipped_in_row >= self.config.max_skipped:
            kept = "none was taken" if self.last_checkpoint is None else f"the last is of step {self.last_checkpoint}"
            raise FloatingPointError(f"{text} ({self.skipped_in_row} in a row; checkpoints: {kept})")
        self.ctx.report.warn(text)

    def _waits(self) -> dict[str, float]:
        now = dict(self.ctx.waits())
        since = {edge: secs - self.last_waits.get(edge, 0.0) for edge, secs in now.items()}
        self.last_waits = now
        return since

    def _snapshot(self, reason: Reason) -> Checkpoint:
        from flowdflash.dflash.export import zlab_config

        began = time.monotonic()
        weights, state = self.trainer.weights(), self.state()
        pause_secs = time.monotonic() - began
        self.pause_secs += pause_secs
        self.last_checkpoint = self.steps
        provenance = {"target": self.ctx.facts["model"], "step": self.steps}
        return Checkpoint(
            step=self.steps,
            epoch=self.epoch,
            reason=reason,
            draft_config=zlab_config(self.trainer.draft.config, provenance=provenance),
            draft_tensors=weights,
            state=state,
            ledger=self.consumed.as_dict(),
            pause_secs=pause_secs,
        )

    def state(self) -> Mapping[str, Any]:
        """Optimizer moments (copied) and counters; weights and ledger are kept beside it in a checkpoint."""
        return {"optimizer": self.trainer.moments(), **{name: getattr(self, name) for name in COUNTERS}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up optimizer and counters where ``state`` left them.

        Raises:
            ModelInvalid: an entry is missing, or of another draft.
        """
        missing = {"optimizer", *COUNTERS} - set(state)
        if missing:
            raise ModelInvalid(f"the saved training state lacks {', '.join(sorted(missing))}")
        self.trainer.load_moments(state["optimizer"])
        for name in COUNTERS:
            setattr(self, name, int(state[name]))

    def resume(self, checkpoint: Checkpoint) -> None:
        """Weights, optimizer, counters and ledger of a checkpoint. A window that was open then comes again.

        Raises:
            ModelInvalid: it is of another draft, or lacks something.
        """
        from flowdflash.dflash.export import config_from_zlab

        saved, own = asdict(config_from_zlab(checkpoint.draft_config)), asdict(self.trainer.draft.config)
        other = [f"{name} {saved[name]} instead of {own[name]}" for name in own if saved[name] != own[name]]
        if other:
            raise ModelInvalid(f"the checkpoint of step {checkpoint.step} is of another draft: {', '.join(other)}")
        self.trainer.load_weights(checkpoint.draft_tensors)
        self.restore(checkpoint.state)
        self.consumed = Consumed.of(checkpoint.ledger)
        self.last_checkpoint = checkpoint.step

    def finish(self, reason: Literal["final", "interrupted"]) -> Iterator[StepRecord | Checkpoint]:
        """Close (``final``) or drop (``interrupted``) an open window; a last checkpoint if a sink wants one."""
        if reason == "final" and len(self.window) and not self.done:
            yield from self._close_window()
        self.trainer.drop_gradients()
        if self.ctx.checkpoint_due(self.steps, reason):
            yield self._snapshot(reason)

    @property
    def done(self) -> bool:
        """``max_steps`` is reached."""
        return bool(self.config.max_steps) and self.steps >= self.config.max_steps

    def summary(self) -> Mapping[str, Any]:
        """What the optimizer did."""
        return {
            "steps": self.steps,
            "steps_skipped": self.skipped,
            "samples_without_anchor": self.samples_without_anchor,
        }
