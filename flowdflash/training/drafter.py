"""Training of a draft, whatever kind it is: its optimizer and its accumulation window."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from flowdflash.errors import ModelInvalid
from flowdflash.items import Checkpoint, FeatureBatch, StepRecord
from flowdflash.stage import Check, OpenContext
from flowdflash.training.build import check_head, draft_size
from flowdflash.training.consumed import Consumed
from flowdflash.training.options import DrafterOptions
from flowdflash.training.window import Window

Reason = Literal["start", "every", "final", "interrupted"]
COUNTERS = ("steps", "epoch", "skipped", "skipped_in_row", "samples_without_anchor")


class DraftTraining:
    """What a drafter stage does: random anchors, block mask, weighted loss, normalised over the whole window.

    A drafter is ``class MyDrafter(DraftTraining, Drafter)`` with a name and a ``Config`` derived from
    ``DrafterOptions``, whose ``draft_kind`` says what kind of draft it trains.
    """

    safe_to_change: ClassVar[frozenset[str]] = frozenset({"max_skipped"})
    config: DrafterOptions

    def check(self, check: Check) -> Mapping[str, Any]:
        """Geometry against what is known of the target."""
        facts = check.facts
        vocab = facts.get("vocab_size")
        mask = self.config.mask_token_id
        if isinstance(mask, int) and vocab is not None and not 0 <= mask < vocab:
            check.refuse("mask_token_id", f"the target's embedding has {vocab} rows, there is no row {mask}")
        if self.config.init == "target" and facts.get("num_layers", math.inf) < self.config.num_hidden_layers:
            check.refuse("init", "the target has fewer layers than the draft is to take from it")
        if self.config.init_from is not None:
            if self.config.init != "random":
                check.refuse("init", "init_from says already what the draft starts as", "remove one of the two")
            if not self.config.init_from.is_dir():
                check.refuse("init_from", f"there is no folder {self.config.init_from}")
        if facts.get("max_length", math.inf) < self.config.block_size:
            check.refuse("block_size", f"a block is longer than the longest sample ({facts['max_length']} tokens)")
        cfg = self.config
        if cfg.on_nonfinite == "stop" and "max_skipped" in cfg.model_fields_set:
            check.refuse("max_skipped", "nothing is skipped with on_nonfinite: stop", "set skip_step, or remove it")
        if facts.get("packed") and cfg.anchor_slots == "fixed":
            check.refuse("anchor_slots", "a packed row has as many anchors as its samples need", "use tight")
        if facts.get("packed") and cfg.compile:
            check.refuse("compile", "packed rows of other numbers of samples would each be compiled anew", "remove it")
        if cfg.attention == "flex" and cfg.device == "cpu":
            check.refuse("attention", "flex cannot train on a CPU", "use auto or sdpa")
        for option, owner in (("gamma", "decay"), ("alpha", "dpace")):
            if cfg.weights != owner and option in cfg.model_fields_set:
                check.refuse(option, f"{option} has no effect on weights: {cfg.weights}", "remove it")
        self._check_distillation(check)
        if cfg.anchor_cost_tokens == "probe" and facts.get("cost_budget"):
            text = "batches under a cost_budget must not depend on a measurement: no two runs would have the same plan"
            check.refuse("anchor_cost_tokens", text, "run once without cost_budget, and write down what was measured")
        own = ("block_size", "num_anchors", "anchor_slots", "anchor_cost_tokens")
        span = cfg.block_size + 1 - cfg.draft_kind.first_slot
        told = {"window": cfg.accumulate, "span": span, **{name: getattr(cfg, name) for name in own}}
        return {**told, **draft_size(cfg, facts)}

    def _check_distillation(self, check: Check) -> None:
        carried = bool(check.facts.get("last_hidden"))
        if self.config.loss == "ce" and carried:
            check.warn("loss", "the target's last hidden states are carried for nothing", "set loss: kl, or tv")
        elif self.config.loss != "ce" and not carried and check.complete:
            check.refuse(
                "loss",
                f"{self.config.loss} needs the target's last hidden states",
                "set last_hidden: true in the target",
            )

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
        from flowdflash.dflash.anchors import draw_anchors, without_anchor

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
        self.window.without_anchor += without_anchor(anchors, keep, tokens.lengths)
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
        if template := self.ctx.facts.get("template_options"):
            provenance["template_options"] = dict(template)
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

        saved, own = config_from_zlab(checkpoint.draft_config).as_dict(), self.trainer.draft.config.as_dict()
        other = [f"{name} {saved.get(name)} instead of {own[name]}" for name in own if saved.get(name) != own[name]]
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
