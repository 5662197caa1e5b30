"""The overfit gate: a pipeline's own drafter on one answer of its own target, until it knows it by heart, and decoded.

If anything is wrong on the way from tokens to features, loss, export and decoding, the draft is not accepted in full on
the very text that it was trained on (pitfall I6).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowdflash.dflash.acceptance import mean
from flowdflash.dflash.decode import greedy, speculative_decode
from flowdflash.dflash.export import config_from_zlab, export_zlab, load_zlab
from flowdflash.doctor.rows import Row, batch_of, samples
from flowdflash.errors import FlowdflashError
from flowdflash.graph import Graph, Node
from flowdflash.items import Checkpoint, FeatureBatch, StepRecord
from flowdflash.stage import OpenContext, PlanSummary, Report, Vocabulary
from flowdflash.target.load import load_target

PATIENCE, LEARNT = 10, 0.05
"""Training ends early after so many steps in a row with every slot right and a loss below this."""

OWN = {"accumulate": 1, "softmax": "full", "anchor_cost_tokens": 0.0}
"""What the gate does in its own way: one row teaches nothing of the tokens that a softmax over seen ones leaves out."""


@dataclass(frozen=True, slots=True)
class GateResult:
    """What came of it.

    Attributes:
        steps, loss, accuracy: optimizer steps taken, and the last one's loss and share of right slots.
        span: most tokens that a pass can commit.
        produced: tokens committed by each pass of the target on the row's prompt.
        tau: their mean, the last pass left out, which the end of the text cuts short.
        passed: every pass but the last committed a full block.
    """

    steps: int
    loss: float
    accuracy: float
    span: int
    produced: tuple[int, ...]
    tau: float
    passed: bool


def overfit(
    graph: Graph,
    *,
    steps: int,
    new_tokens: int,
    cache_dir: Path,
    report: Report,
    seed: int = 0,
    told: Callable[[StepRecord], object] = lambda record: None,
) -> GateResult:
    """Train a pipeline's drafter on one prompt of its source with its target's greedy answer; export, reload, decode.

    Args:
        graph: of a checked pipeline with one drafter that reads from its target.
        steps: most optimizer steps.
        new_tokens: length of the answer.
        cache_dir: the user's cache.
        report: told about progress.
        seed: of the pipeline.
        told: gets the record of each step.

    Raises:
        FlowdflashError: the pipeline has no such drafter, or one of its stages fails.
    """
    drafters = graph.of_kind("drafter")
    forward = graph.nodes[drafters[0].inputs[0].source] if len(drafters) == 1 else None
    if forward is None or forward.kind != "target-forward":
        raise FlowdflashError("the gate needs a pipeline with one drafter that reads from a target-forward stage")
    if new_tokens < (least := graph.returned.get(drafters[0].name, {}).get("span", 0) + 2):
        raise FlowdflashError(f"an answer of {new_tokens} tokens holds no whole block and more: take {least} or more")
    report.info("overfit gate: one prompt, and the target's greedy answer")
    (sample, *_), _ = samples(graph, 1, cache_dir, report, seed)
    prompt = sample.ids[: sample.start].tolist()
    target = load_target(drafters[0].facts["model"], cache_dir, dtype="float32", report=report)
    (answer,) = greedy(target.model, [prompt], max_new_tokens=new_tokens)
    row = Row.answered(prompt, answer)
    with ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        vocabulary = Vocabulary(np.unique(row.ids), np.unique(row.ids[row.start :]))
        ctx = OpenContext(
            stage="",
            run_dir=folder,
            cache_dir=cache_dir,
            seed=seed,
            report=report,
            plan=PlanSummary(1, steps, steps, vocabulary=vocabulary),
            checkpoint_due=lambda step, reason: reason == "final",
        )
        features = _opened(forward, ctx, closing, {"keep": "none"}).forward(batch_of(row))
        drafter = _opened(drafters[0], ctx, closing, {**OWN, "max_steps": steps})
        record, checkpoint = _trained(drafter, features, row, steps, told)
        exported = export_zlab(folder / "draft", config_from_zlab(checkpoint.draft_config), checkpoint.draft_tensors)
        config, draft = load_zlab(exported)
    draft.to(target.device, torch.float32).eval()
    (result,) = speculative_decode(target.model, draft, [prompt], max_new_tokens=new_tokens)
    whole, span = result.produced[:-1], config.span(config.block_size)
    passed = bool(whole) and set(whole) == {span} and result.tokens == answer
    return GateResult(record.step, record.loss, record.accuracy, span, result.produced, mean(whole), passed)


def _opened(node: Node, ctx: OpenContext, closing: ExitStack, changes: dict[str, Any]) -> Any:
    known = {name: value for name, value in changes.items() if name in type(node.config).model_fields}
    stage = node.cls(node.config.model_copy(update=known))
    closing.callback(stage.close)
    stage.open(replace(ctx, stage=node.name, facts=node.facts))
    return stage


def _trained(
    drafter: Any, features: FeatureBatch, row: Row, steps: int, told: Callable[[StepRecord], object]
) -> tuple[StepRecord, Checkpoint]:
    """The last step's record, and the draft."""
    record: StepRecord | None = None
    learnt = 0
    for step in range(steps):
        # Another epoch draws other anchors.
        batch = replace(features, tokens=batch_of(row, epoch=step), probe=None if step else features.probe)
        for item in drafter.step(batch):
            if isinstance(item, StepRecord):
                record = item
                told(record)
                learnt = learnt + 1 if record.accuracy == 1 and record.loss < LEARNT else 0
        if learnt >= PATIENCE:
            break
    checkpoint = next((item for item in drafter.finish("final") if isinstance(item, Checkpoint)), None)
    if record is None or checkpoint is None:
        raise FlowdflashError("the drafter gave no record of a step, or no draft at the end")
    return record, checkpoint
