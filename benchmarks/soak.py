"""Does memory grow while a run goes on? Resident memory of training on a toy target, over thousands of batches.

Prints a table; ``--csv`` keeps every sample and ``--plot`` draws them. Exits with 1 if memory grew after the warm-up by
more than the limit.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flowdflash import stages
from flowdflash.items import StepRecord
from flowdflash.plugin import hookimpl
from flowdflash.plugin.loader import load_plugins
from flowdflash.render.plan_plots import nice_ticks
from flowdflash.testing import run_pipeline

LIMIT_MIB = 16.0
ACCUMULATE = 2


def resident_mib() -> float:
    """Of this process, now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def tree(batches: int) -> dict[str, Any]:
    """Batches of two samples of 8 to 32 tokens, through every kind of stage; a checkpoint now and then."""
    source = {"samples": 1000, "law": "uniform", "min_length": 8, "max_length": 32, "vocab_size": 64}
    shape = {"block_size": 4, "num_hidden_layers": 1, "num_anchors": 4, "precision": "float32", "device": "cpu"}
    rate = {"accumulate": ACCUMULATE, "max_steps": batches // ACCUMULATE, "schedule": "constant"}
    epochs = -(-batches // 300)
    return {
        "name": "soak",
        "stages": {
            "corpus": {
                "kind": "source",
                "type": "synthetic_lengths",
                **source,
                "avoid_token_ids": [63],
                "epochs": epochs,
            },
            "buckets": {"kind": "bucketer", "type": "length", "inputs": "corpus", "buckets": 3, "token_budget": 64},
            "order": {"kind": "interleaver", "type": "stratified", "inputs": "buckets"},
            "dispatch": {"kind": "dispatcher", "type": "pull", "inputs": "order"},
            "target": {"kind": "target-forward", "type": "toy", "inputs": "dispatch", "vocab_size": 64, "replicas": 2},
            "drafter": {"kind": "drafter", "type": "dflash", "inputs": "target", **shape, **rate},
            "metrics": {"kind": "sink", "type": "jsonl", "inputs": "drafter.records"},
            "save": {"kind": "sink", "type": "checkpoint", "inputs": "drafter.checkpoints", "every_steps": 250},
        },
    }


def plot(samples: list[tuple[int, float]], warm_up: int, told: str) -> str:
    """Resident memory over the batches, from zero up; what lies left of the dashed line does not count."""
    wide, tall, left, top, base = 900, 320, 60, 40, 270
    last, most = samples[-1][0], max(mib for _, mib in samples) * 1.15

    def x(batches: float) -> float:
        return round(left + batches / last * (wide - left - 30), 1)

    def y(mib: float) -> float:
        return round(base - mib / most * (base - top), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" width="{wide}" height="{tall}">',
        '<style>text{font:13px system-ui,"Noto Sans","DejaVu Sans",sans-serif;fill:#1f2328}'
        "line{stroke:#d1d9e0}.e{text-anchor:end}.m{text-anchor:middle}</style>",
        f'<rect width="{wide}" height="{tall}" fill="#fff"/>',
        f'<text x="{left}" y="22">Resident memory in MiB: {told}</text>',
    ]
    for tick in (0, *nice_ticks(most)):
        parts.append(f'<line x1="{left}" x2="{wide - 30}" y1="{y(tick)}" y2="{y(tick)}"/>')
        parts.append(f'<text class="e" x="{left - 8}" y="{y(tick) + 4}">{tick:,.0f}</text>')
    parts += [f'<text class="m" x="{x(tick)}" y="{base + 20}">{tick:,.0f}</text>' for tick in nice_ticks(last)]
    line = " ".join(f"{x(batches)},{y(mib)}" for batches, mib in samples)
    parts += [
        f'<text class="m" x="{x(last / 2)}" y="{base + 40}">batches</text>',
        f'<line x1="{x(warm_up)}" x2="{x(warm_up)}" y1="{top}" y2="{base}" stroke-dasharray="4 3"/>',
        f'<polyline points="{line}" fill="none" stroke="#4a78c9" stroke-width="1.5"/>',
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=6000, help="batches in all")
    parser.add_argument("--warm-up", type=int, default=1000, help="batches before growth counts")
    parser.add_argument("--csv", type=Path, help="write batches and MiB, a line per ten batches")
    parser.add_argument("--plot", type=Path, help="draw them as SVG")
    options = parser.parse_args()
    samples: list[tuple[int, float]] = []

    @hookimpl
    def flowdflash_step(record: StepRecord) -> None:
        if record.step % (10 // ACCUMULATE) == 0:
            samples.append((record.step * ACCUMULATE, resident_mib()))

    watch = SimpleNamespace(flowdflash_step=flowdflash_step, __name__="watch")
    with tempfile.TemporaryDirectory() as folder:
        run_pipeline(tree(options.batches), run_dir=Path(folder) / "run", plugins=load_plugins(builtin=[stages, watch]))
    if options.csv:
        options.csv.write_text("batches,resident_mib\n" + "".join(f"{n},{mib:.2f}\n" for n, mib in samples))
    print(f"{'batches':>8} {'resident MiB':>13}")
    for batches, mib in samples[49::50]:
        print(f"{batches:>8,} {mib:>13.1f}")
    after = [mib for batches, mib in samples if batches >= options.warm_up]
    tenth = max(len(after) // 10, 1)
    growth = sum(after[-tenth:]) / tenth - sum(after[:tenth]) / tenth
    counted = samples[-1][0] - options.warm_up
    told = f"{growth:+.1f} MiB over {counted:,} batches after the warm-up, limit {LIMIT_MIB:.0f} MiB"
    if options.plot:
        options.plot.write_text(plot(samples, options.warm_up, told), "utf-8")
    print(told)
    return 1 if growth > LIMIT_MIB else 0


if __name__ == "__main__":
    sys.exit(main())
