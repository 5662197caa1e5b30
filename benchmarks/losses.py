"""Acceptance length after the same number of steps with each kind of slot weights, several seeds each.

Runs the default pipeline once per kind and seed, on fewer rows; the target's features are computed once and read from
disk afterwards. A run that has finished is not run again, so the command can be stopped and given anew.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from bench_runs import PIPELINE, told, trained

FIGURES = ("tau_gen", "tau_pooled", "eal", "eal_walk")


def run(folder: Path, weights: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run, or what it left behind when it was run before."""
    # A window holds four samples; one epoch more than needed, as the last window of each may hold fewer.
    epochs = math.ceil(4 * options.steps / options.rows) + 1
    settings = {
        "seed": seed,
        "stages.corpus.limit_rows": options.rows,
        "stages.corpus.epochs": epochs,
        "stages.drafter.weights": weights,
        "stages.drafter.max_steps": options.steps,
        "stages.wandb.mode": "disabled",
        "stages.save.every_steps": options.steps,
        "stages.save.keep": 1,
        "stages.acceptance.at_start": "false",
        "stages.acceptance.num_prompts": options.prompts,
    }
    found = trained(folder, options.pipeline, settings)
    if found["step"] != options.steps:
        sys.exit(f"{folder}: the data ended before step {options.steps}; give more --rows or fewer --steps")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", nargs="+", default=["decay", "dpace", "auf"], help="kinds to compare")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each run")
    parser.add_argument("--rows", type=int, default=600, help="rows of the training file")
    parser.add_argument("--prompts", type=int, default=32, help="held-out prompts to decode at the end")
    parser.add_argument("--pipeline", type=Path, default=PIPELINE)
    parser.add_argument("--out", type=Path, default=Path("runs/losses"), help="folder of the runs")
    options = parser.parse_args()
    print(f"{options.steps} steps, {options.rows} rows, {options.prompts} prompts, seeds {options.seeds}")
    print(f"{'weights':8} " + " ".join(f"{name:>18}" for name in FIGURES) + "   tau_gen by seed")
    for weights in options.weights:
        rows = []
        for seed in options.seeds:
            name = f"{weights}-seed{seed}-{options.steps}steps-{options.rows}rows-{options.prompts}prompts"
            rows.append(run(options.out / name, weights, seed, options))
        print(f"{weights:8} " + " ".join(f"{told([row[name] for row in rows]):>18}" for name in FIGURES), end="   ")
        print(" ".join(f"{row['tau_gen']:.3f}" for row in rows), flush=True)


if __name__ == "__main__":
    main()
