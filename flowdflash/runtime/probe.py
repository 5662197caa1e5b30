"""What an anchor of the draft costs beside a token of the target: a short measurement before training.

It runs on stages of its own, which are closed again, so that it leaves nothing in the run: neither order nor counters
nor random numbers nor weights. What was measured is kept in the run's folder, where a run that is resumed finds it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from flowdflash.errors import FlowdflashError
from flowdflash.graph import Graph, Node
from flowdflash.items import BatchInfo, FloatArray, TokenBatch
from flowdflash.runtime.draft_shape import DraftShape
from flowdflash.runtime.rundir import write_atomically
from flowdflash.stage import Drafter, OpenContext, PlanSummary, SilentReport, TargetForward, Vocabulary

NAME = "cost.json"
LEAST_ROUNDS, LIMIT_SECS = 2, 5.0
"""Each batch is timed so often at least, and again while there is time; the quickest counts."""

DEFAULT_TOKENS, DEFAULT_LENGTH = 4096, 1024
"""Of a batch and of a sample, where bucketer and source do not say."""

PASSIVE = {"keep": "none", "accumulate": sys.maxsize}
"""Options of the stages that are timed: no features are kept, and no window closes, so no optimizer step is taken."""


def measured(graph: Graph, shape: DraftShape, vocabulary: Vocabulary | None, ctx: OpenContext) -> DraftShape:
    """The shape with the cost of an anchor: as the run's folder has it, or measured and put there."""
    path = ctx.run_dir / NAME
    if path.is_file():
        return replace(shape, anchor_cost_tokens=json.loads(path.read_text(encoding="utf-8"))["anchor_cost_tokens"])
    token_secs, anchor_secs = _solve(*_timed(graph, shape, vocabulary, ctx))
    # Two digits: a third would differ from one measurement to the next.
    cost = float(f"{anchor_secs / token_secs:.2g}")
    kept = {"anchor_cost_tokens": cost, "token_secs": token_secs, "anchor_secs": anchor_secs}
    write_atomically(path, json.dumps(kept, indent=2) + "\n")
    ctx.report.info(
        f"probe: anchor_cost_tokens is {cost:g} ({token_secs * 1e6:.3g} µs per target token, "
        f"{anchor_secs * 1e6:.3g} µs per anchor)"
    )
    return replace(shape, anchor_cost_tokens=cost)


def _solve(sizes: FloatArray, secs: FloatArray) -> tuple[float, float]:
    """Seconds per token and per anchor, by least squares; an anchor that is lost in the noise costs nothing."""
    token_secs, anchor_secs = np.linalg.lstsq(sizes, secs, rcond=None)[0].tolist()
    if token_secs <= 0:
        text = f"times of {secs.tolist()} s cannot be explained by tokens and anchors {sizes.tolist()}"
        raise FlowdflashError(f"{text}; try again on an idle machine, or give anchor_cost_tokens a number")
    return token_secs, max(anchor_secs, 0.0)


def _timed(
    graph: Graph, shape: DraftShape, vocabulary: Vocabulary | None, ctx: OpenContext
) -> tuple[FloatArray, FloatArray]:
    """Padded tokens and anchors ``[4, 2]`` of batches that differ in both, and the seconds ``[4]`` that each takes."""
    import torch

    drafting = graph.of_kind("drafter")[0]
    forward = graph.nodes[drafting.inputs[0].source]
    batches = _batches(graph, drafting, vocabulary)
    with ExitStack() as closing, torch.random.fork_rng(devices=[]):
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        plan = PlanSummary(1, 1, 1, vocabulary=vocabulary)
        own = replace(ctx, run_dir=folder, report=SilentReport(), plan=plan)
        target, drafter = (_opened(node, own, closing) for node in (forward, drafting))
        best, began = np.full(len(batches), np.inf), time.perf_counter()
        for number in count():
            secs = [_pass(target, drafter, batch) for batch in batches]
            if number:  # the first round compiles, allocates and fills caches
                best = np.minimum(best, secs)
            if number >= LEAST_ROUNDS and time.perf_counter() - began > LIMIT_SECS:
                break
    sizes = [[b.info.padded_tokens, shape.computed(np.array(b.info.supervised)).sum()] for b in batches]
    return np.array(sizes, dtype=np.float64), best


def _opened(node: Node, ctx: OpenContext, closing: ExitStack) -> Any:
    passive = {name: value for name, value in PASSIVE.items() if name in type(node.config).model_fields}
    stage = node.cls(node.config.model_copy(update=passive))
    closing.callback(stage.close)
    stage.open(replace(ctx, stage=node.name, facts=node.facts))
    return stage


def _batches(graph: Graph, drafting: Node, vocabulary: Vocabulary | None) -> list[TokenBatch]:
    """Long rows and short ones, all supervised or hardly: tokens and anchors vary independently."""
    (bucketer,) = graph.of_kind("bucketer")
    facts = drafting.facts
    budget = int(getattr(bucketer.config, "token_budget", DEFAULT_TOKENS))
    longest = min(int(facts.get("max_length", DEFAULT_LENGTH)), budget)
    ids = np.arange(1, facts["vocab_size"] // 2) if vocabulary is None else vocabulary.supervised_token_ids
    return [
        _batch(rows, length, supervised, ids, bool(facts.get("packed")))
        for rows, length in ((budget // longest, longest), (4 * (budget // longest), max(longest // 4, 2)))
        for supervised in (length, 2)
    ]


def _batch(rows: int, length: int, supervised: int, ids: Any, packed: bool) -> TokenBatch:
    tokens = np.random.default_rng(0).choice(ids, (rows, length)).astype(np.int64)
    mask = np.broadcast_to(np.arange(length) >= length - supervised, tokens.shape).copy()
    lengths = np.full(rows, length, dtype=np.int64)
    sizes, counts = (length,) * rows, (supervised,) * rows
    info = BatchInfo(0, 0, 0, -1, tuple(range(rows)), sizes, counts, rows * length, rows * length, 0.0, packed=packed)
    if packed:
        tokens, mask = tokens.reshape(1, -1), mask.reshape(1, -1)
    return TokenBatch(info, tokens, mask, lengths)


def _pass(target: TargetForward, drafter: Drafter, batch: TokenBatch) -> float:
    """Seconds for one micro-batch, forward and backward."""
    import torch

    began = time.perf_counter()
    with torch.no_grad():
        features = target.forward(batch)
    for _ in drafter.step(features):
        pass
    if features.features.device.type == "cuda":
        torch.cuda.synchronize(features.features.device)
        torch.cuda.synchronize()
    return time.perf_counter() - began
