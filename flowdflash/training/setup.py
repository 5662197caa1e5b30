"""From the options of a drafter to a draft in training, with the matrices that it borrows from the target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowdflash.dflash.config import auto_layers
from flowdflash.dflash.head import Head
from flowdflash.dflash.mask import Backend
from flowdflash.dflash.optim import Schedule, build_optimizer
from flowdflash.dflash.training import LossOptions
from flowdflash.errors import ModelInvalid
from flowdflash.stage import OpenContext, PlanSummary
from flowdflash.target.load import choose_device, choose_dtype, load_embedding_and_head, use_device
from flowdflash.training.build import (
    choose_mask_token,
    draft_config,
    draft_options,
    start_from_draft,
    start_from_target,
    target_facts,
    training_head,
)
from flowdflash.training.trainer import Trainer


def set_up(options: Any, ctx: OpenContext, steps: int) -> Trainer:
    """A draft for the target of ``ctx.facts``, ready to train on the calling thread.

    Args:
        options: the ``Config`` of the drafter.
        ctx: what the drafter was opened with.
        steps: optimizer steps that the schedule is made for; 0 where nobody knows.

    Raises:
        ModelInvalid: target and options do not fit, or a device or a model is not there.
    """
    ref = ctx.facts["model"]
    device = use_device(choose_device(options.device))
    dtype = choose_dtype(options.precision, device)
    loss = _loss_options(options, device.type)
    facts = target_facts(ref, ctx.cache_dir, ctx.report)
    borrowed = load_embedding_and_head(ref, ctx.cache_dir, ctx.report)
    rows, width = borrowed.embed.shape
    vocabulary = ctx.plan.vocabulary if ctx.plan else None
    own = draft_options(options)
    mask = choose_mask_token(own.mask_token_id, ref, facts, rows, ctx.cache_dir, vocabulary)
    config = draft_config(own, ref, facts, _layers(ctx.facts, facts), (rows, width), mask)
    full_head = Head(borrowed.head.to(device, dtype), softcap=config.final_logit_softcapping)
    head = training_head(full_head, options.softmax, vocabulary, mask)
    draft = config.new_draft(seed=ctx.seed)
    if options.init == "target":
        start_from_target(draft, ref, facts, ctx.cache_dir)
    if options.init_from is not None:
        start_from_draft(draft, options.init_from, borrowed)
        ctx.report.info(f"the draft starts as that of {options.init_from}")
    draft.to(device).train()
    optimizer = build_optimizer(
        draft, kind=options.optimizer, lr=options.lr, betas=options.betas, weight_decay=options.weight_decay
    )
    schedule = Schedule(options.schedule, total_steps=steps or 1, warmup_fraction=options.warmup)
    ctx.report.info(
        f"draft: {config.num_parameters / 1e6:.1f} M parameters, block size {config.block_size}, target layers "
        f"{list(config.target_layer_ids)}, mask token {mask}, softmax over {len(head.weight):,} tokens, "
        f"{dtype} on {device}"
    )
    embed = borrowed.embed.to(device, dtype)
    trainer = Trainer(draft, embed, head, full_head, loss, optimizer, schedule, options.lr, options.clip, device, dtype)
    if options.compile:
        trainer.compile()
    return trainer


def total_steps(plan: PlanSummary | None, options: Any) -> int:
    """Optimizer steps of the whole run, 0 where nobody knows.

    Raises:
        ModelInvalid: the schedule needs to know.
    """
    known = [steps for steps in (plan.steps if plan else 0, options.max_steps) if steps]
    if not known and options.schedule != "constant":
        raise ModelInvalid(
            f"schedule {options.schedule} needs the number of steps, which a streaming source does not tell: "
            "set max_steps"
        )
    return min(known, default=0)


def _layers(flowing: Mapping[str, Any], known: Mapping[str, Any]) -> tuple[int, ...]:
    """The tapped layers: of the target stage, or by the same rule once the depth of the model is known."""
    if "layers" in flowing:
        return tuple(flowing["layers"])
    return auto_layers(int(known["num_layers"]), int(flowing["num_features"]))


def _loss_options(options: Any, device_type: str) -> LossOptions:
    backend: Backend = "sdpa" if device_type != "cuda" else "flex"
    if options.attention != "auto":
        backend = options.attention
    if backend == "flex" and device_type != "cuda":
        raise ModelInvalid(f"attention: flex cannot train on {device_type}; use auto or sdpa")
    gamma = None if options.gamma == "none" else options.gamma
    return LossOptions(
        kind=options.loss,
        gamma=gamma,
        alpha=options.alpha,
        weights=options.weights,
        label_gap=options.label_gap,
        backend=backend,
        chunk_slots=options.chunk_slots,
    )
