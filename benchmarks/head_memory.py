"""Peak memory and time of the output head under its loss, forward and backward, with a vocabulary of 150,000 rows.

Each line is a process of its own: ``plain`` is torch's linear layer and cross-entropy, ``whole`` our head with all rows
at once, ``chunked`` our head some rows at a time. Memory is what the process grew by, over head and states.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def measure(kind: str, slots: int, vocabulary: int, width: int, chunk: int, steps: int) -> dict[str, float]:
    """Of this process; torch is loaded and the inputs are made before the first look at the memory."""
    import torch
    from torch.nn.functional import cross_entropy, linear

    from flowdflash.dflash.head import Head, head_loss

    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(vocabulary, width, generator=draw) * width**-0.5
    hidden = torch.randn(slots, width, generator=draw).requires_grad_()
    labels = torch.randint(0, vocabulary, (slots,), generator=draw)

    def step(rows: int) -> float:
        if kind == "plain":
            loss = cross_entropy(linear(hidden[:rows], weight), labels[:rows], reduction="sum")
        else:
            some = 0 if kind == "whole" else chunk
            loss = head_loss(hidden[:rows], Head(weight), labels[:rows], chunk_slots=some)[0].sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    step(8)
    before, secs, total = resident_mib(), [], 0.0
    for _ in range(steps):
        hidden.grad = None
        began = time.perf_counter()
        total = step(slots)
        secs.append(time.perf_counter() - began)
    assert hidden.grad is not None
    return {
        "peak_mib": peak_mib() - before,
        "secs": min(secs),
        "loss": total / slots,
        "gradient": float(hidden.grad.norm()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=150_000, help="rows of the head")
    parser.add_argument("--width", type=int, default=128, help="hidden size")
    parser.add_argument("--slots", type=int, nargs="+", default=[512, 2048], help="loss terms per step, in turn")
    parser.add_argument("--chunk", type=int, default=64, help="slots whose logits exist at once, where chunked")
    parser.add_argument("--steps", type=int, default=2, help="steps per process; the fastest counts")
    parser.add_argument("--one", nargs=2, metavar=("KIND", "SLOTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = (options.vocabulary, options.width, options.chunk, options.steps)
    if options.one:
        kind, slots = options.one
        print(json.dumps(measure(kind, int(slots), *shape)))
        return
    print(f"{options.vocabulary:,} rows x {options.width}, chunks of {options.chunk} slots")
    print(f"{'head':8} {'slots':>6} {'memory MiB':>11} {'secs/step':>10} {'loss':>10} {'gradient norm':>14}")
    for slots in options.slots:
        for kind in ("plain", "whole", "chunked"):
            command = [sys.executable, __file__, *sys.argv[1:], "--one", kind, str(slots)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            row = json.loads(done.stdout)
            print(
                f"{kind:8} {slots:>6} {row['peak_mib']:>11,.0f} {row['secs']:>10.2f} {row['loss']:>10.6f} "
                f"{row['gradient']:>14.6f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
