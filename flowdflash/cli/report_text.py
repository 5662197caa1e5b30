"""Texts about a run for a person: the plan, a step, the account at the end."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowdflash.items import StepRecord

if TYPE_CHECKING:
    from flowdflash.runtime.planner import Plan


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns aligned to the right, the first to the left."""
    cells = [[str(c) for c in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = []
    for row in cells:
        first, *rest = (c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        lines.append("  ".join([first, *rest]).rstrip())
    return "\n".join(lines)


def plan_text(plan: Plan) -> str:
    """The plan: per bucket samples, batches, tokens, lengths; steps of the run."""
    buckets = plan.bucket_rows()
    rows = [
        (
            b.bucket if b.bucket >= 0 else "all",
            f"{b.samples:,}",
            f"{b.sample_share:.1%}",
            f"{b.batches:,}",
            f"{b.batch_share:.1%}",
            f"{b.tokens:,}",
            f"{1 - b.tokens / b.padded_tokens:.1%}",
            f"{b.mean_length:.0f}",
            b.max_length,
        )
        for b in buckets
    ]
    head = ("bucket", "samples", "share", "batches", "share", "tokens", "padding", "mean length", "max length")
    steps = plan.steps()
    samples, batches, tokens = (sum(getattr(b, name) for b in buckets) for name in ("samples", "batches", "tokens"))
    lines = [f"plan: {len(plan.epochs)} epochs, {steps:,} optimizer steps of {plan.window} batches; over all epochs:"]
    lines += [table(head, rows), f"total   {samples:,} samples, {batches:,} batches, {tokens:,} tokens"]
    lines += [f"dropped: {count:,} samples ({reason})" for reason, count in plan.dropped.items()]
    return "\n".join(lines)


def step_text(record: StepRecord) -> str:
    """One optimizer step, short."""
    if record.skipped:
        return f"skipped: {record.skipped}"
    return (
        f"loss {record.loss:.3f}  accuracy {record.accuracy:.3f}  grad norm {record.grad_norm:.2f}  lr {record.lr:.2e}"
    )


def outcome_text(outcome: Any, run_dir: Path) -> str:
    """The account of a run."""
    rate = outcome.tokens / outcome.wall_secs if outcome.wall_secs else 0.0
    lines = [
        f"{outcome.status}: {outcome.steps:,} optimizer steps, {outcome.batches:,} batches, "
        f"{outcome.samples:,} samples, {outcome.tokens:,} tokens in {outcome.wall_secs:.1f} s ({rate:,.0f} tokens/s)"
    ]
    if outcome.resumed_at_step is not None and outcome.steps:
        lines.append(f"resumed after step {outcome.resumed_at_step:,}: all but the steps counts from there")
    if outcome.batches_per_bucket:
        lines.append("batches per bucket: " + ", ".join(f"{k}: {v:,}" for k, v in outcome.batches_per_bucket.items()))
    if outcome.order_distance:
        lines.append(f"order: batches came up to {outcome.order_distance:,} places away from their place in the plan")
    lines += [f"dropped: {count:,} samples ({reason})" for reason, count in outcome.dropped.items()]
    lines += ["", _stage_table(outcome), f"bottleneck: {outcome.bottleneck or 'none'}"]
    for name, summary in outcome.summaries.items():
        lines += _summary_lines(name, summary)
    if outcome.abandoned:
        lines.append(f"left behind in a call that cannot be interrupted: {', '.join(outcome.abandoned)}")
    lines.append(f"run folder: {run_dir}")
    if outcome.status == "interrupted":
        lines.append("interrupted at a step boundary" + ("; no checkpoint was written" if outcome.aborted else ""))
    return "\n".join(lines)


def resume_text(run_dir: Path) -> str:
    """How to go on with a run."""
    return f"go on with: flowdflash run --resume {shlex.quote(str(run_dir))}"


def _stage_table(outcome: Any) -> str:
    rows = [
        (
            f"{s.stage}{f' ×{s.replicas}' if s.replicas > 1 else ''}",
            f"{s.taken:,}",
            f"{s.busy_secs:.1f}",
            f"{s.wait_in_secs:.1f}",
            f"{s.wait_out_secs:.1f}",
            f"{100 * s.busy_share:.0f} %",
        )
        for s in outcome.stages
    ]
    return table(("stage", "items", "busy s", "waiting for input s", "blocked on output s", "busy"), rows)


def _summary_lines(name: str, summary: Mapping[str, Any]) -> list[str]:
    if "evaluations" in summary:
        lines = [line for e in summary["evaluations"] for line in evaluation_lines(name, e)]
        left_out = ", ".join(map(str, summary.get("steps_left_out", ())))
        return lines + ([f"{name}: steps that were not measured: {left_out}"] if left_out else [])
    shown = ", ".join(f"{key} {_short(value)}" for key, value in summary.items() if value not in (None, [], {}, ""))
    return [f"{name}: {shown}"] if shown else []


def evaluation_lines(name: str, e: Mapping[str, Any]) -> list[str]:
    """One evaluation, for a person."""
    slots = " ".join(_figure(x, 2) for x in e["acceptance_per_slot"])
    tau, pooled, eal, walk = (_figure(e[key], 3) for key in ("tau_gen", "tau_pooled", "eal", "eal_walk"))
    how = f"{e['identical']} of {e['prompts']} identical to plain greedy decoding"
    if e["temperature"]:
        how = f"sampled at temperature {e['temperature']:g}, top_p {e['top_p']:g}, top_k {e['top_k']}"
    lines = [
        f"{name}: step {e['step']}: acceptance length τ = {tau} (pooled {pooled}) on {e['prompts']} prompts, "
        f"{e['new_tokens']:,} tokens in {e['passes']:,} passes; {how}",
        f"  passes that committed 1, 2, ... tokens: {' '.join(map(str, e['histogram']))}; accepted per slot: {slots}",
    ]
    if e["answers"]:
        lines.append(f"  teacher forced on {e['answers']} answers: eal {eal}, where decoding puts its blocks {walk}")
    for speed in filter(None, (e, e["alone"])):
        lines.append(
            f"  batches of {speed['batch_size']}: τ {_figure(speed['tau_gen'], 3)}, {speed['secs']:.1f} s; without the "
            f"draft {speed['plain_secs']:.1f} s: speedup {speed['speedup']:.2f}"
        )
    return lines


def _figure(value: float | None, digits: int) -> str:
    """A number, or a dash where there was nothing to measure."""
    return "–" if value is None else f"{value:.{digits}f}"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_short(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_short, value))
    return str(value)
