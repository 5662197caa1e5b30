"""The built-in drafter: a DFlash draft, its optimizer and its accumulation window."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from flowdflash.errors import ModelInvalid
from flowdflash.items import Checkpoint, FeatureBatch, StepRecord
from flowdflash.stage import Check, Drafter, OpenContext, StageConfig
from flowdflash.training.build import (
    DraftOptions,
    check_head,
    choose_mask_token,
    draft_config,
    start_from_target,
    target_facts,
    training_head,
)
from flowdflash.training.window import Window

AutoInt = Literal["auto"] | int


class DFlashDrafter(Drafter):
    """Trains a DFlash draft: random anchors, block mask, weighted cross-entropy, normalised over the whole window."""

    type = "dflash"

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
        label_gap: Literal["cut", "keep"] = Field("cut", description="End a block at its first unsupervised token, or skip it.")
        softmax: Literal["full", "seen"] = Field(
            "full",
            description="Train against the whole vocabulary, or against the tokens that occur in the data (faster; "
            "evaluation always uses the whole).",
        )
        attention: Literal["auto", "sdpa", "eager", "flex"] = Field("auto", description="Attention backend; auto: flex on CUDA, else sdpa.")
        chunk_slots: int = Field(1024, ge=0, description="Slots whose logits exist at once; 0 for all. Changes no result.")
        precision: Literal["auto", "float32", "bfloat16"] = Field(
            "auto", description="Of the forward pass; parameters are always fp32. auto: bfloat16 where the device is fast at it."
        )
        device: str = Field("auto", description="auto, cpu, cuda or cuda:N.")
        accumulate: int = Field(1, ge=1, description="Micro-batches per optimizer step; a window never crosses an epoch.")
        max_steps: int = Field(0, ge=0, description="Stop after so many optimizer steps; 0 for the whole plan.")
        lr: float = Field(6e-4, gt=0, description="Peak learning rate of AdamW.")
        betas: tuple[float, float] = Field((0.9, 0.999), description="Of AdamW.")
        weight_decay: float = Field(0.0, ge=0, description="Of AdamW.")
        schedule: Literal["cosine", "linear", "constant", "wsd"] = Field("cosine", description="Learning rate over optimizer steps.")
        warmup: float = Field(0.04, ge=0, le=1, description="Share of the steps over which the learning rate rises.")
        clip: float = Field(1.0, gt=0, description="Largest gradient norm.")
        on_nonfinite: Literal["stop", "skip_step"] = Field("stop", description="What a loss or gradient that is not finite does.")
        max_skipped: int = Field(10, ge=1, description="With skip_step: so many in a row stop the run.")

        @model_validator(mode="after")
        def _positive(self) -> DFlashDrafter.Config:
            for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"):
                value = getattr(self, name)
                if isinstance(value, int) and value < 1:
                    raise ValueError(f"{name} must be auto or a positive number, got {value}")
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
        return {"block_size": self.config.block_size, "window": self.config.accumulate}

    def open(self, ctx: OpenContext) -> None:
        """Load embedding and head of the target, build draft, optimizer and schedule."""
        import torch

        from flowdflash.dflash.loss import Head
        from flowdflash.dflash.model import DFlashDraft
        from flowdflash.dflash.optim import Schedule, build_optimizer
        from flowdflash.dflash.training import LossOptions
        from flowdflash.target.load import choose_device, choose_dtype, load_embedding_and_head

        self.ctx, cfg, ref = ctx, self.config, ctx.facts["model"]
        vocabulary = ctx.plan.vocabulary if ctx.plan else None
        self.device = choose_device(cfg.device)
        self.dtype = choose_dtype(cfg.precision, self.device)
        facts = target_facts(ref, ctx.cache_dir, ctx.report)
        borrowed = load_embedding_and_head(ref, ctx.cache_dir, ctx.report)
        rows, width = borrowed.embed.shape
        options = self._options()
        mask = choose_mask_token(options.mask_token_id, ref, facts, rows, ctx.cache_dir, vocabulary)
        config = draft_config(options, ref, facts, self._layers(facts), (rows, width), mask)
        self.embed = borrowed.embed.to(self.device, self.dtype)
        self.full_head = borrowed.head.to(self.device, self.dtype)
        self.head = training_head(Head(self.full_head), cfg.softmax, vocabulary, mask)
        self.draft = DFlashDraft(config, seed=ctx.seed)
        if cfg.init == "target":
            start_from_target(self.draft, ref, ctx.cache_dir)
        self.draft.to(self.device).train()
        self.options = LossOptions(
            gamma=None if cfg.gamma == "none" else cfg.gamma,
            label_gap=cfg.label_gap,
            backend=self._backend(),
            chunk_slots=cfg.chunk_slots,
        )
        self.optimizer = build_optimizer(self.draft, lr=cfg.lr, betas=cfg.betas, weight_decay=cfg.weight_decay)
        planned = ctx.plan.steps if ctx.plan else 0
        self.total_steps = min(x for x in (planned, cfg.max_steps, math.inf) if x) if planned or cfg.max_steps else 0
        if not self.total_steps and cfg.schedule != "constant":
            raise ModelInvalid(f"schedule {cfg.schedule} needs the number of steps, which a streaming source does not tell: set max_steps")
        self.schedule = Schedule(cfg.schedule, total_steps=int(self.total_steps or 1), warmup_fraction=cfg.warmup)
        self.steps, self.epoch, self.skipped, self.skipped_in_row = 0, 0, 0, 0
        self.samples_without_anchor = 0
        self.window = Window(cfg.block_size)
        self.consumed: set[int] = set()
        self.prefix = 0
        self.pause_secs = 0.0
        self.last_waits = dict(ctx.waits())
        self.torch = torch
        ctx.report.info(
            f"draft: {config.num_parameters / 1e6:.1f} M parameters, block size {cfg.block_size}, target layers "
            f"{list(config.target_layer_ids)}, mask token {config.mask_token_id}, "
            f"softmax over {len(self.head.weight):,} tokens, {self.dtype} on {self.device}"
        )

    def _layers(self, facts: Mapping[str, Any]) -> tuple[int, ...]:
        from flowdflash.dflash.config import auto_layers

        if "layers" in self.ctx.facts:
            return tuple(self.ctx.facts["layers"])
        return auto_layers(int(facts["num_layers"]), int(self.ctx.facts["num_features"]))

    def _options(self) -> DraftOptions:
        cfg = self.config
        names = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "mask_token_id")
        own = {name: None if getattr(cfg, name) == "auto" else int(getattr(cfg, name)) for name in names}
        return DraftOptions(block_size=cfg.block_size, num_hidden_layers=cfg.num_hidden_layers, **own)

    def _backend(self) -> Any:
        if self.config.attention == "auto":
            return "flex" if self.device.type == "cuda" else "sdpa"
        return self.config.attention

    def begin(self) -> Iterator[StepRecord | Checkpoint]:
        """The untrained draft, if a sink wants it."""
        if self.ctx.checkpoint_due(0, "start"):
            yield self._snapshot("start")

    def step(self, batch: FeatureBatch) -> Iterator[StepRecord | Checkpoint]:
        """Add one micro-batch to the window; close the window when it is full or its epoch ends."""
        if batch.probe is not None:
            check_head(self.full_head, batch.probe, batch.features.dtype)
        if tuple(batch.layers) != self.draft.config.target_layer_ids:
            raise ModelInvalid(f"features come from layers {batch.layers}, the draft expects {self.draft.config.target_layer_ids}")
        began = time.monotonic()
        self._accumulate(batch)
        self.window.secs += time.monotonic() - began
        self.epoch = batch.info.epoch
        if len(self.window.infos) >= self.config.accumulate or batch.info.last_of_epoch:
            yield from self._close_window()

    def _accumulate(self, batch: FeatureBatch) -> None:
        torch = self.torch
        from flowdflash.dflash.anchors import draw_anchors
        from flowdflash.dflash.training import training_loss

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
        self.samples_without_anchor += int((~keep.any(dim=1)).sum())
        on = self.device
        with torch.autocast(on.type, dtype=torch.bfloat16, enabled=self.dtype is torch.bfloat16):
            sums = training_loss(
                self.draft,
                self.embed,
                self.head,
                torch.from_numpy(tokens.input_ids).to(on),
                torch.from_numpy(tokens.loss_mask).to(on),
                torch.from_numpy(tokens.lengths).to(on),
                batch.features.to(on),
                anchors.to(on),
                keep.to(on),
                self.options,
            )
        sums.num.backward()
        self.window.add(info, sums.detached())

    def _close_window(self) -> Iterator[StepRecord | Checkpoint]:
        from flowdflash.dflash.optim import clip_gradients, scale_gradients, set_lr

        began = time.monotonic()
        window, parameters = self.window, list(self.draft.parameters())
        scale_gradients(parameters, window.den)
        norm, clipped = clip_gradients(parameters, self.config.clip)
        reason = self._refusal(norm)
        lr = set_lr(self.optimizer, self.config.lr, self.schedule, self.steps)
        if not reason:
            self.optimizer.step()
        self.steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        self._note_consumed(i.seq for i in window.infos)
        window.secs += time.monotonic() - began
        yield window.record(
            step=self.steps,
            lr=lr,
            grad_norm=norm,
            grad_norm_clipped=clipped,
            skipped=reason,
            pause_secs=self.pause_secs,
            waits_secs=self._waits(),
        )
        self.pause_secs, self.window = 0.0, Window(self.config.block_size)
        self._count_refusal(reason, window)
        if self.steps != self.total_steps and self.ctx.checkpoint_due(self.steps, "every"):
            yield self._snapshot("every")

    def _refusal(self, norm: float) -> str:
        """Why no optimizer step may be taken, empty if it may."""
        if self.window.terms == 0:
            return "no supervised slot in the window"
        if not math.isfinite(self.window.loss):
            return f"loss is {self.window.loss}"
        return "" if math.isfinite(norm) else f"gradient norm is {norm}"

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
            raise FloatingPointError(f"{text} ({self.skipped_in_row} in a row)")
        self.ctx.report.warn(text)

    def _waits(self) -> dict[str, float]:
        now = dict(self.ctx.waits())
        since = {edge: secs - self.last_waits.get(edge, 0.0) for edge, secs in now.items()}
        self.last_waits = now
        return since

    def _note_consumed(self, seqs: Iterable[int]) -> None:
        self.consumed.update(seqs)
        while self.prefix in self.consumed:
            self.consumed.remove(self.prefix)
            self.prefix += 1

    def _snapshot(self, reason: Literal["start", "every", "final", "interrupted"]) -> Checkpoint:
        from flowdflash.dflash.export import zlab_config

        began = time.monotonic()
        tensors = {name: p.detach().to("cpu", copy=True) for name, p in self.draft.state_dict().items()}
        state = dict(self.state())
        self.pause_secs += time.monotonic() - began
        return Checkpoint(
            step=self.steps,
            epoch=self.epoch,
            reason=reason,
            draft_config=zlab_config(self.draft.config, provenance={"target": self.ctx.facts["model"], "step": self.steps}),
            draft_tensors=tensors,
            state=state,
            ledger={"prefix": self.prefix, "extras": sorted(self.consumed)},
            pause_secs=time.monotonic() - began,
        )

    def state(self) -> Mapping[str, Any]:
        """Optimizer moments (copied) and counters."""
        inner = self.optimizer.state_dict()
        copied = {
            i: {k: v.detach().to("cpu", copy=True) if hasattr(v, "detach") else v for k, v in slot.items()}
            for i, slot in inner["state"].items()
        }
        groups = [{k: v for k, v in g.items()} for g in inner["param_groups"]]
        return {
            "optimizer": {"state": copied, "param_groups": groups},
            "steps": self.steps,
            "epoch": self.epoch,
            "skipped": self.skipped,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up optimizer and counters where ``state`` left them.

        Raises:
            ModelInvalid: an entry is missing.
        """
        missing = {"optimizer", "steps", "epoch", "skipped"} - set(state)
        if missing:
            raise ModelInvalid(f"the saved training state lacks {', '.join(sorted(missing))}")
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self.epoch, self.skipped = int(state["steps"]), int(state["epoch"]), int(state["skipped"])

    def finish(self, reason: Literal["final", "interrupted"]) -> Iterator[StepRecord | Checkpoint]:
        """Close (``final``) or drop (``interrupted``) an open window; a last checkpoint if a sink wants one."""
        if reason == "final" and self.window.infos and not self.done:
            yield from self._close_window()
        self.optimizer.zero_grad(set_to_none=True)
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
