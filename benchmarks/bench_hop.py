"""What one hand-over costs: our channel against ``queue.Queue``, in one run on one machine.

Two threads pass small items through one channel. Rounds of both alternate, so that a change of clock or load meets both
alike; the median of the rounds counts. Exits with 1 if the ratio is above the limit.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable

from flowdflash.runtime.channel import END, Channel, OrderedChannel

LIMIT = 1.5


def _timed(
    items: int, put: Callable[[int], object], get: Callable[[], object], finish: Callable[[], object], end: object
) -> float:
    def produce() -> None:
        for i in range(items):
            put(i)
        finish()

    producer = threading.Thread(target=produce)
    begin = time.perf_counter()
    producer.start()
    taken = 0
    while get() is not end:
        taken += 1
    elapsed = time.perf_counter() - begin
    producer.join()
    assert taken == items
    return elapsed / items * 1e6


def hop_queue(items: int, capacity: int) -> float:
    """Microseconds per item through ``queue.Queue``."""
    it: queue.Queue[int | None] = queue.Queue(capacity)
    return _timed(items, it.put, it.get, lambda: it.put(None), None)


def hop_channel(items: int, capacity: int) -> float:
    """Microseconds per item through ``Channel``."""
    it: Channel[int] = Channel("hop", capacity)
    return _timed(items, it.put, it.get, it.finish, END)


def hop_ordered(items: int, capacity: int) -> float:
    """Microseconds per item through ``OrderedChannel``."""
    it: OrderedChannel[int] = OrderedChannel("hop", capacity)
    return _timed(items, lambda i: it.put(i, i), it.get, it.finish, END)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=20_000, help="items per round")
    parser.add_argument("--rounds", type=int, default=9, help="rounds; the median counts")
    args = parser.parse_args()
    hops = {"queue.Queue": hop_queue, "Channel": hop_channel, "OrderedChannel": hop_ordered}
    print(f"{'capacity':>8}  {'through':<15} {'us/item':>8} {'min':>7} {'max':>7} {'ratio':>6}")
    worst = 0.0
    for capacity in (2, 64):
        rounds: dict[str, list[float]] = {name: [] for name in hops}
        for _ in range(args.rounds):
            for name, hop in hops.items():
                rounds[name].append(hop(args.items, capacity))
        base = statistics.median(rounds["queue.Queue"])
        for name, times in rounds.items():
            middle = statistics.median(times)
            ratio = middle / base
            worst = max(worst, ratio if name == "Channel" else 0.0)
            print(f"{capacity:>8}  {name:<15} {middle:>8.2f} {min(times):>7.2f} {max(times):>7.2f} {ratio:>6.2f}")
    print(f"Channel: {worst:.2f} times queue.Queue at worst, limit {LIMIT}")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
