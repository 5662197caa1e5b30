"""What batch order does to a training run: the same samples in skewed buckets, and in what is to repair them.

Trains the default target's drafter under four plans, several seeds each: `shuffle`, whose last bucket has about a fifth
of the samples and makes over half of the batches; `tijdeman`, the same batches in another order; `cross_bucket`,
neighbouring buckets merged; `packing`, no buckets at all. Every run sees each sample equally often, so all train on the
same tokens, and an optimizer step takes about as many of them under every plan. Writes a table and a plot.

The target's features are computed once and read from disk afterwards. A run that has finished is not run again, so the
command can be stopped and given anew.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from bench_runs import PIPELINE, flowdflash, json_lines, told, trained

NEIGHBOURS = 12
"""Windows on either side that a window is compared with."""

# No shipped row is longer than 171 tokens: the last bound lies far above, so that a batch of the last bucket is sized
# for samples that it never has. That bucket has 22 % of the first 1800 rows and makes 53 % of the batches.
_EDGES = {"edges": [98, 124, 142, 162, 164, 620], "token_budget": 620}
STRATEGIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "shuffle": ("shuffle", {"type": "length", **_EDGES}),
    "tijdeman": ("tijdeman", {"type": "length", **_EDGES}),
    "cross_bucket": ("shuffle", {"type": "cross_bucket", **_EDGES}),
    "packing": ("shuffle", {"type": "packing", "token_budget": 620}),
}


class Roughness(NamedTuple):
    """How uneven a series is beyond its trend.

    Attributes:
        residuals: of each window, the log of its value over the median of it and its neighbours on both sides; the
            first and last windows, which have fewer, are not in it.
        variance: of the residuals.
        ladder: where the longest run of windows above the median begins in the residuals, and how long it is.
    """

    residuals: list[float]
    variance: float
    ladder: tuple[int, int]


def roughness(values: Sequence[float]) -> Roughness:
    """Variance and longest run of a series of positive values, with the trend taken out by a running median."""
    least = 2 * NEIGHBOURS + 2
    if len(values) < least:
        raise SystemExit(f"{len(values)} whole windows; give more --rows or --epochs for at least {least}")
    logs = [math.log(value) for value in values]
    residuals = [
        logs[i] - statistics.median(logs[i - NEIGHBOURS : i + NEIGHBOURS + 1])
        for i in range(NEIGHBOURS, len(logs) - NEIGHBOURS)
    ]
    runs = [list(run) for above, run in groupby(range(len(residuals)), lambda i: residuals[i] > 0) if above]
    longest = max(runs, key=len, default=[])
    return Roughness(residuals, statistics.pvariance(residuals), (longest[0] if longest else 0, len(longest)))


def windows(path: Path, batches: int) -> list[dict[str, Any]]:
    """The optimizer steps of whole windows, from the metrics of a run; the last window of an epoch may be smaller."""
    return [row for row in json_lines(path) if row["batches"] == batches and not row["skipped"]]


def settings(strategy: str, options: argparse.Namespace) -> dict[str, Any]:
    """What the plan sets in the pipeline, apart from the seed."""
    order, bucketer = STRATEGIES[strategy]
    return {
        "stages.corpus.limit_rows": options.rows,
        "stages.corpus.epochs": options.epochs,
        "stages.buckets": json.dumps({"kind": "bucketer", "inputs": "corpus", **bucketer}),
        "stages.order.type": order,
        "stages.wandb.mode": "disabled",
        "stages.save.keep": 1,
        "stages.acceptance.at_start": "false",
        "stages.acceptance.num_prompts": options.prompts,
    }


def planned(strategy: str, options: argparse.Namespace) -> dict[str, Any]:
    """What ``flowdflash plan`` says of the strategy."""
    command = flowdflash("plan", options.pipeline, settings(strategy, options), "--format", "json")
    plan = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    found: dict[str, Any] = plan["strategies"][plan["chosen"]]
    return found


def skew(plan: Mapping[str, Any]) -> str:
    """The bucket with most batches."""
    if len(plan["buckets"]) < 2:
        return ""
    most = max(plan["buckets"], key=lambda bucket: bucket["batch_share"])
    return f"; bucket {most['bucket']}: {most['sample_share']:.1%} of samples, {most['batch_share']:.1%} of batches"


class Run(NamedTuple):
    """What one run came to."""

    steps: int
    tokens: int
    step_tokens: float
    loss: Roughness
    grad_norm: Roughness
    tau: float


def run(strategy: str, seed: int, batches: int, options: argparse.Namespace) -> Run:
    """Train with ``batches`` to an optimizer step, or read what that left behind when it was done before."""
    size = f"{options.rows}rows-{options.epochs}epochs-{batches}batches-{options.prompts}prompts"
    folder: Path = options.out / f"{strategy}-seed{seed}-{size}"
    all_settings = {"seed": seed, "stages.drafter.accumulate": batches, **settings(strategy, options)}
    tau = trained(folder, options.pipeline, all_settings)["tau_gen"]
    everything, rows = json_lines(folder / "metrics.jsonl"), windows(folder / "metrics.jsonl", batches)
    loss, grad_norm = (roughness([row[name] for row in rows]) for name in ("loss", "grad_norm"))
    step_tokens = statistics.mean(row["tokens"] for row in rows)
    return Run(len(everything), sum(row["tokens"] for row in everything), step_tokens, loss, grad_norm, tau)


def table_row(strategy: str, runs: Sequence[Run]) -> str:
    """A line of the table: means over seeds."""
    figures = (
        f"{statistics.mean(run.steps for run in runs):.0f}",
        f"{statistics.mean(run.tokens for run in runs):,.0f}",
        f"{statistics.mean(run.step_tokens for run in runs):,.0f}",
        told([1000 * run.loss.variance for run in runs], 2),
        told([1000 * run.grad_norm.variance for run in runs], 1),
        f"{told([run.loss.ladder[1] for run in runs], 1)} of {len(runs[0].loss.residuals)}",
        told([run.tau for run in runs]),
    )
    return f"{strategy:14}" + "".join(f"{text:>{wide}}" for text, wide in zip(figures, WIDTHS, strict=True))


HEADINGS = ("steps", "tokens", "tokens/step", "loss var x1000", "grad var x1000", "ladder", "tau")
WIDTHS = (7, 10, 13, 17, 17, 18, 17)

_STYLE = (
    'text{font:13px system-ui,"Noto Sans","DejaVu Sans",sans-serif;fill:#1f2328}.b{font-weight:600}.s{fill:#59636e}'
    ".e{text-anchor:end}.g{stroke:#d1d9e0}.l{fill:none;stroke:#4a78c9;stroke-width:1.3}.r{stroke:#c9413f;stroke-width:3}"
)


def plot(runs: Mapping[str, Run], seed: int) -> str:
    """Loss of each window over its trend, a panel per strategy on one scale; the longest ladder is red."""
    wide, tall, left, across, top = 1000, 150, 60, 920, 46
    most = max(abs(value) for run in runs.values() for value in run.loss.residuals) or 1
    height = top + tall * len(runs) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {height}" width="{wide}" height="{height}">',
        f'<style>{_STYLE}</style><rect width="{wide}" height="{height}" fill="#fff"/>',
        f'<text class="b" x="{left}" y="20">Loss of each window over the running median of {2 * NEIGHBOURS + 1} windows'
        f', seed {seed}</text><text class="s" x="{left}" y="38">Same samples and tokens, from the first window to the '
        "last. Red: the longest run of windows above the median.</text>",
    ]
    for place, (name, run) in enumerate(runs.items()):
        residuals, (begin, length) = run.loss.residuals, run.loss.ladder
        middle, reach = top + tall * place + 88, 52
        step = across / max(len(residuals) - 1, 1)
        points = [f"{left + i * step:.1f},{middle - value / most * reach:.1f}" for i, value in enumerate(residuals)]
        for value in (-most, 0, most):
            y = middle - value / most * reach
            parts.append(f'<line class="g" x1="{left}" x2="{left + across}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="s e" x="{left - 8}" y="{y + 4:.1f}">{math.expm1(value):+.0%}</text>')
        caption = f"variance of the log {run.loss.variance:.5f}, longest ladder {length} of {len(residuals)} windows"
        parts.append(
            f'<text x="{left}" y="{middle - reach - 10}"><tspan class="b">{escape(name)}</tspan>'
            f'<tspan class="s" dx="10">{caption}, tau {run.tau:.2f}</tspan></text>'
            f'<polyline class="l" points="{" ".join(points)}"/>'
            f'<polyline class="l r" points="{" ".join(points[begin : begin + length])}"/>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rows", type=int, default=500, help="rows of the training file")
    parser.add_argument("--epochs", type=int, default=3, help="times that each row is trained on")
    parser.add_argument("--step-tokens", type=int, default=1280, help="tokens of an optimizer step, about")
    parser.add_argument("--prompts", type=int, default=8, help="held-out prompts to decode at the end")
    parser.add_argument("--pipeline", type=Path, default=PIPELINE)
    parser.add_argument("--out", type=Path, default=Path("runs/whiplash"), help="folder of the runs and the plot")
    options = parser.parse_args()
    plans = {strategy: planned(strategy, options) for strategy in options.strategies}
    for strategy, plan in plans.items():
        print(f"{strategy}: {plan['batches']} batches an epoch{skew(plan)}")
    print(f"{options.rows} rows, {options.epochs} epochs, {options.prompts} prompts, seeds {options.seeds}; mean +- sd")
    print(f"{'':14}" + "".join(f"{text:>{wide}}" for text, wide in zip(HEADINGS, WIDTHS, strict=True)), flush=True)
    first = {}
    for strategy, plan in plans.items():
        batches = max(1, round(options.step_tokens * plan["batches"] / plan["tokens"]))
        runs = [run(strategy, seed, batches, options) for seed in options.seeds]
        first[strategy] = runs[0]
        print(table_row(strategy, runs), flush=True)
    print(
        f"Variances are of the log of a window's value over the running median of {2 * NEIGHBOURS + 1} windows; the\n"
        f"first and last {NEIGHBOURS} and incomplete windows are left out. Ladder: longest run of windows above that\n"
        "median loss, of so many; n fair coin flips would have one of about log2(n) - 0.67."
    )
    path = options.out / "whiplash.svg"
    path.write_text(plot(first, options.seeds[0]), "utf-8")
    print(f"plot: {path}")


if __name__ == "__main__":
    main()
