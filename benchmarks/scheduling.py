"""What planning an epoch costs, and what comes of it: flowdflash beside other batch schedulers, in one run.

All plan batches over the same lengths, log-normal up to 8,192 tokens, with at most 49,152 padded tokens in a batch;
what has batches of a fixed number of samples is given 15. Each planner runs in a process of its own, the quickest of
three rounds counts, and memory is what that process needs at its peak beyond the lengths themselves. The floor is
`numpy.argsort` of the lengths: nothing that looks at lengths is quicker. What is not installed is named (pip install
lhotse speculators). Exits with 1 if planning 1 M samples takes flowdflash more than 0.5 s or 10 M (--large) more than
6 s, in processor time, or either more than 100 bytes per sample.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flowdflash.data.lengths import BRIEF_EDGES, brief
from flowdflash.items import BatchTable, SampleTable
from flowdflash.runtime.order_metrics import noise_ratio, tokens_cv
from flowdflash.runtime.planner import PlanNames, Planner
from flowdflash.stage import Bucketer, Interleaver, Source

BUDGET, WINDOW, PER_BATCH, ROUNDS = 49152, 8, 15, 3
LIMIT_SECS = {1_000_000: 0.5, 10_000_000: 6.0}
LIMIT_BYTES = 100
Batches = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Samples, real tokens and padded tokens of each batch, in order."""


class Columns(Source):
    """A table that is there already."""

    type = "columns"

    def epochs(self) -> Iterator[SampleTable]:
        yield self.config


def flowdflash(bucketer: str, interleaver: str, **options: Any) -> Callable[[np.ndarray], Callable[[], Any]]:
    def prepare(lengths: np.ndarray) -> Callable[[], Any]:
        from flowdflash import stages
        from flowdflash.plugin.loader import load_plugins

        registry = load_plugins(builtin=[stages]).registry
        first, second = registry.get("bucketer", bucketer), registry.get("interleaver", interleaver)
        assert first is not None and second is not None
        samples = SampleTable(0, np.arange(len(lengths)), lengths, lengths)

        def plan() -> Any:
            chosen: Any = first(first.Config(token_budget=BUDGET, **options)), second(second.Config())
            assert isinstance(chosen[0], Bucketer) and isinstance(chosen[1], Interleaver)
            names = PlanNames("source", "bucketer", "interleaver")
            (block,) = Planner(Columns(samples), *chosen, names, seed=7, window=WINDOW).blocks()
            return block

        return plan

    return prepare


def argsort(lengths: np.ndarray) -> Callable[[], Any]:
    return lambda: np.argsort(lengths)


def batch_by_size(lengths: np.ndarray) -> Callable[[], Any]:
    """fairseq: sort by length, ties at random, cut where longest x count would exceed the budget, shuffle batches."""

    def plan() -> list[list[int]]:
        shuffled = np.random.default_rng(7).permutation(len(lengths))
        order = shuffled[np.argsort(lengths[shuffled], kind="mergesort")]
        batches: list[list[int]] = []
        batch: list[int] = []
        for i, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
            if length * (len(batch) + 1) > BUDGET:
                batches.append(batch)
                batch = []
            batch.append(i)
        batches.append(batch)
        random.Random(7).shuffle(batches)
        return batches

    return plan


def length_grouped(lengths: np.ndarray) -> Callable[[], Any]:
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    listed = lengths.tolist()

    def plan() -> list[list[int]]:
        generator = torch.Generator().manual_seed(7)
        order = list(LengthGroupedSampler(PER_BATCH, lengths=listed, generator=generator))
        return [order[i : i + PER_BATCH] for i in range(0, len(order), PER_BATCH)]

    return plan


def lhotse(lengths: np.ndarray) -> Callable[[], Any]:
    from lhotse import CutSet
    from lhotse.dataset import DynamicBucketingSampler
    from lhotse.testing.dummies import dummy_cut

    cuts = CutSet.from_cuts(dummy_cut(i, duration=float(length)) for i, length in enumerate(lengths.tolist()))

    def plan() -> list[list[int]]:
        sampler = DynamicBucketingSampler(cuts, max_duration=BUDGET, num_buckets=6, shuffle=True, seed=7)
        return [[int(cut.id.rsplit("-", 1)[-1]) for cut in batch] for batch in sampler]

    return plan


def multipack(lengths: np.ndarray) -> Callable[[], Any]:
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

    return lambda: list(MultipackDistributedBatchSamplerV2(BUDGET, lengths, num_replicas=1, rank=0, seed=7))


# What is planned, the package it needs, and the most samples it is asked for: objects per sample take long.
PLANNERS: dict[str, tuple[Callable[[np.ndarray], Callable[[], Any]], str, int]] = {
    "flowdflash length + stratified": (flowdflash("length", "stratified", edges=BRIEF_EDGES), "flowdflash", 10**8),
    "flowdflash optimal + stratified": (flowdflash("optimal", "stratified"), "flowdflash", 10**8),
    "flowdflash sorted_budget + golden_lattice": (flowdflash("sorted_budget", "golden_lattice"), "flowdflash", 10**7),
    "flowdflash packing + golden_lattice": (flowdflash("packing", "golden_lattice"), "flowdflash", 10**7),
    "numpy.argsort (floor)": (argsort, "numpy", 10**8),
    "fairseq batch_by_size, semantics": (batch_by_size, "numpy", 10**6),
    "transformers LengthGroupedSampler": (length_grouped, "transformers", 10**6),
    "lhotse DynamicBucketingSampler": (lhotse, "lhotse", 10**5),
    "speculators multipack, 1 rank": (multipack, "speculators", 10**5),
}
MINE = next(iter(PLANNERS))
PACKED = ("packing", "multipack")


def batches_of(made: Any, lengths: np.ndarray, packed: bool) -> Batches:
    if isinstance(getattr(made, "batches", None), BatchTable):
        table, order = made.batches, made.order
        return table.sizes[order], table.tokens[order], table.padded_tokens[order]
    sizes = np.array([len(batch) for batch in made])
    held = lengths[np.concatenate([np.asarray(batch, dtype=np.int64) for batch in made])]
    starts = np.cumsum(sizes) - sizes
    tokens = np.add.reduceat(held, starts)
    return sizes, tokens, tokens if packed else np.maximum.reduceat(held, starts) * sizes


def peak_bytes() -> int:
    """The most that this process has ever held, or since ``/proc/self/clear_refs`` was written to."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measure(name: str, count: int) -> dict[str, Any]:
    prepare, _, _ = PLANNERS[name]
    lengths = np.resize(np.random.default_rng(7).permutation(brief()), count)
    plan = prepare(lengths)
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")
    before = peak_bytes()
    wall, cpu = [], []
    for _ in range(ROUNDS if count < 5_000_000 else 1):
        made = None  # what the round before has made is not this round's memory
        began = time.perf_counter(), time.process_time()
        made = plan()
        wall.append(time.perf_counter() - began[0])
        cpu.append(time.process_time() - began[1])
    told = {"secs": min(wall), "cpu_secs": min(cpu), "bytes": (peak_bytes() - before) / count}
    if prepare is argsort:
        return told
    sizes, tokens, padded = batches_of(made, lengths, any(word in name for word in PACKED))
    told |= {"batches": len(sizes), "waste": 1 - tokens.sum() / padded.sum(), "dropped": count - int(sizes.sum())}
    return told | {"noise": noise_ratio(tokens / sizes, WINDOW), "tokens_cv": tokens_cv(tokens, WINDOW)}


def row(name: str, count: int) -> tuple[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, __file__, "--measure", name, "--samples", str(count)], capture_output=True, text=True
    )
    if done.returncode:
        return f"{name:<42} failed: {done.stderr.strip().splitlines()[-1]}", {}
    told = json.loads(done.stdout.splitlines()[-1])
    line = (
        f"{name:<42} {count:>10,} {told['secs']:>8.2f} {told['cpu_secs']:>8.2f} {count / told['cpu_secs'] / 1e6:>7.2f}"
    )
    line += f" {told['bytes']:>8.0f}"
    if "batches" in told:
        line += f" {told['batches']:>8,} {told['waste']:>6.1%} {told['dropped']:>7,} {told['noise']:>6.2f}"
        line += f" {told['tokens_cv']:>7.1%}"
    return line, told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000, help="samples of the epoch")
    parser.add_argument("--large", action="store_true", help="plan ten million samples with flowdflash as well")
    parser.add_argument("--only", default="", help="only planners whose name holds this")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.samples)))
        return 0
    print(
        f"{'planner':<42} {'samples':>10} {'wall s':>8} {'cpu s':>8} {'M/s':>7} {'B/sample':>8} {'batches':>8} "
        f"{'waste':>6} {'dropped':>7} {'noise':>6} {'tok. CV':>7}"
    )
    asked = [(name, min(args.samples, most), needs) for name, (_, needs, most) in PLANNERS.items()]
    asked += [(name, 10_000_000, needs) for name, _, needs in asked[:1] + asked[4:5] if args.large]
    passed = True
    for name, count, needs in asked:
        if args.only not in name:
            continue
        if importlib.util.find_spec(needs) is None:
            print(f"{name:<42} not installed: pip install {needs}", flush=True)
            continue
        line, told = row(name, count)
        print(line, flush=True)
        if name == MINE:
            limit = LIMIT_SECS.get(count, float("inf"))
            passed &= bool(told) and told["cpu_secs"] <= limit and told["bytes"] <= LIMIT_BYTES
    print(f"{MINE}: {'within' if passed else 'ABOVE'} its limits of time and memory")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
