"""Who gets the next batch."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime_fakes import Pipeline, in_thread

from flowdflash.errors import PluginBroken, StageFailed
from flowdflash.items import BatchInfo
from flowdflash.runtime.channel import END, Channel, ChannelAborted
from flowdflash.runtime.dispatch import Dispatch
from flowdflash.stage import Dispatcher, ReplicaLoad
from flowdflash.stages.least_outstanding import LeastOutstanding
from flowdflash.stages.pull import Pull
from flowdflash.stages.round_robin import RoundRobin

pytestmark = pytest.mark.timeout(20)


def info(seq: int, cost: float = 1.0) -> BatchInfo:
    return BatchInfo(seq, 0, seq, 0, (seq,), (1,), (1,), 1, 1, cost)


def dispatch(policy: Dispatcher, infos: Sequence[BatchInfo], replicas: int, capacity: int = 3) -> Dispatch:
    plan: Channel[BatchInfo] = Channel("plan", max(len(infos), 1))
    for item in infos:
        plan.put(item)
    plan.finish()
    return Dispatch(policy, "dispatch", plan, replicas, capacity)


def blocked_take(it: Dispatch) -> tuple[threading.Thread, list[Any]]:
    waiting = threading.Event()
    original = it._changed.wait

    def wait(timeout: float | None = None) -> bool:
        waiting.set()
        return original(timeout)

    it._changed.wait = wait  # type: ignore[method-assign]
    thread, result = in_thread(it.take)
    assert waiting.wait(5)
    return thread, result


POLICIES = (Pull, LeastOutstanding, RoundRobin)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_batches_reach_all_idle_replicas_in_order(policy: type[Dispatcher]) -> None:
    it = dispatch(policy(policy.Config()), [info(i) for i in range(8)], 4)
    routed = [it.take() for _ in range(8)]
    assert [r.replica for r in routed] == [0, 1, 2, 3, 0, 1, 2, 3]  # type: ignore[union-attr]
    assert [r.ticket for r in routed] == [0] * 4 + [1] * 4  # type: ignore[union-attr]
    assert it.take() is END


@pytest.mark.parametrize("policy", POLICIES)
def test_four_threads_share_one_cursor(policy: type[Dispatcher]) -> None:
    for _ in range(50):
        it = dispatch(policy(policy.Config()), [info(i) for i in range(16)], 4, capacity=16)
        start = threading.Barrier(4)

        def take_four(it: Dispatch = it, start: threading.Barrier = start) -> list[Any]:
            start.wait(5)
            return [it.take() for _ in range(4)]

        threads = [in_thread(take_four) for _ in range(4)]
        for thread, _ in threads:
            thread.join(5)
        routed = sorted((r for _, (found,) in threads for r in found), key=lambda r: r.info.seq)
        assert [r.replica for r in routed] == [0, 1, 2, 3] * 4


def test_pull_gives_a_slow_replica_no_more_than_it_can_hold() -> None:
    it = dispatch(Pull(Pull.Config()), [info(i) for i in range(20)], 2)
    taken = []
    for _ in range(20):
        routed = it.take()
        assert routed is not END
        taken.append(routed.replica)
        if routed.replica == 1:
            it.settle(1, routed.info)
    assert taken.count(0) <= 3


class Watching(LeastOutstanding):
    """Keeps what it was told of the replicas when it was last asked."""

    def route(self, loads: Sequence[ReplicaLoad], batch: BatchInfo) -> int | None:
        self.told = tuple(loads)
        return super().route(loads, batch)


def test_load_is_counted_in_cost() -> None:
    policy = Watching(Watching.Config())
    it = dispatch(policy, [info(0, 64.0)] + [info(i, 1.0) for i in range(1, 7)], 2, 9)
    assert [it.take().replica for _ in range(7)] == [0, 1, 1, 1, 1, 1, 1]  # type: ignore[union-attr]
    assert [load.outstanding_cost for load in policy.told] == [64.0, 5.0]


def test_settled_load_is_exactly_zero_again() -> None:
    policy = Watching(Watching.Config())
    it = dispatch(policy, [info(i, 0.1) for i in range(4)], 1)
    routed = [it.take() for _ in range(3)]
    for r in routed:
        it.settle(0, r.info)  # type: ignore[union-attr]
    it.take()
    assert policy.told == (ReplicaLoad(0, 0, 0.0, 3, 3),)


def test_all_full_waits_until_a_load_changes() -> None:
    it = dispatch(Pull(Pull.Config()), [info(i) for i in range(3)], 2, capacity=1)
    first = it.take()
    it.take()
    thread, result = blocked_take(it)
    it.settle(0, first.info)  # type: ignore[union-attr]
    thread.join(5)
    assert (result[0].replica, result[0].info.seq) == (0, 2) and result[0].blocked_secs > 0


def test_a_full_replica_that_was_named_is_waited_for_and_the_policy_is_asked_once() -> None:
    it = dispatch(RoundRobin(RoundRobin.Config()), [info(i) for i in range(5)], 2, capacity=1)
    first, second = it.take(), it.take()
    thread, result = blocked_take(it)
    it.settle(1, second.info)  # type: ignore[union-attr]
    assert not result
    it.settle(0, first.info)  # type: ignore[union-attr]
    thread.join(5)
    assert result[0].replica == 0 and it.take().replica == 1  # type: ignore[union-attr]


class Odd(Dispatcher):
    type = "odd"

    def route(self, loads: Sequence[ReplicaLoad], batch: BatchInfo) -> Any:
        return self.config


@pytest.mark.parametrize(
    ("answer", "text"),
    [(7, "replica 7 of 2"), (-1, "replica -1 of 2"), ("a", "str"), (None, "every replica is idle"), (0.5, "float")],
)
def test_an_impossible_answer_is_blamed_on_the_policy(answer: Any, text: str) -> None:
    it = dispatch(Odd(answer), [info(3)], 2)
    with pytest.raises(StageFailed, match=text) as caught:
        it.take()
    assert (caught.value.stage, caught.value.batch, caught.value.sample_ids) == ("dispatch", 3, (3,))
    assert isinstance(caught.value.cause, PluginBroken | TypeError)


def test_abort_and_cancel_free_a_thread_that_waits_for_a_replica() -> None:
    for end in ("abort", "cancel"):
        it = dispatch(Pull(Pull.Config()), [info(0), info(1)], 1, capacity=1)
        it.take()
        thread, result = blocked_take(it)
        it.abort(ValueError("boom")) if end == "abort" else it.cancel()
        thread.join(5)
        assert isinstance(result[0], ChannelAborted) if end == "abort" else result == [END]


def utilisation(policy: Dispatcher, speeds: Sequence[float], costs: Sequence[float], capacity: int = 3) -> float:
    """What replicas of such speeds get done, as a share of what they could: a run in simulated time.

    A replica has one batch in work and the others that it was given waiting; the policy is asked whenever a load has
    changed, and a full replica that it names is waited for, as in a run.
    """
    queues: list[list[float]] = [[] for _ in speeds]
    dispatched = [0] * len(speeds)
    ends: list[tuple[float, int]] = []
    now = 0.0
    for seq, cost in enumerate(costs):
        chosen: int | None = None
        while True:
            if chosen is None:
                loads = [
                    ReplicaLoad(r, len(queue), sum(queue), capacity, dispatched[r]) for r, queue in enumerate(queues)
                ]
                chosen = policy.route(loads, info(seq, cost))
            if chosen is not None and len(queues[chosen]) < capacity:
                break
            now, done = heapq.heappop(ends)
            queues[done].pop(0)
            if queues[done]:
                heapq.heappush(ends, (now + queues[done][0] / speeds[done], done))
        if not queues[chosen]:
            heapq.heappush(ends, (now + cost / speeds[chosen], chosen))
        queues[chosen].append(cost)
        dispatched[chosen] += 1
    while ends:
        now, done = heapq.heappop(ends)
        queues[done].pop(0)
        if queues[done]:
            heapq.heappush(ends, (now + queues[done][0] / speeds[done], done))
    return sum(costs) / sum(speeds) / now


COSTS = {
    "equal": np.ones(2000),
    "uneven": np.random.default_rng(0).choice([1.0, 2.0, 8.0], 2000),
}


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("policy", [Pull, LeastOutstanding])
def test_a_slow_replica_among_four_costs_nothing(policy: type[Dispatcher], costs: str) -> None:
    assert utilisation(policy(policy.Config()), [1, 1, 1, 0.6], COSTS[costs].tolist()) >= 0.99


def test_in_turn_all_replicas_are_as_slow_as_the_slowest() -> None:
    share = utilisation(RoundRobin(RoundRobin.Config()), [1, 1, 1, 0.6], COSTS["equal"].tolist())
    assert share == pytest.approx(4 * 0.6 / 3.6, abs=0.01)


class OwnCounter(Dispatcher):
    """Written as if each thread that fetches tokens had a policy of its own: then all would start with replica 0."""

    type = "own_counter"
    made = 0

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        type(self).made += 1
        self.next, self.inside = 0, threading.Lock()

    def route(self, loads: Sequence[ReplicaLoad], batch: BatchInfo) -> int:
        assert self.inside.acquire(blocking=False), "two threads are in the policy at once"
        chosen, self.next = self.next, (self.next + 1) % len(loads)
        self.inside.release()
        return chosen


def test_a_counter_per_fetching_thread_cannot_be_written(tmp_path: Path) -> None:
    """A run builds one policy however many threads it has, and asks it one batch at a time, in planned order."""
    OwnCounter.made = 0
    options = {"source": {"lengths": [3] * 32}, "dispatch": {"workers": 4}, "target": {"replicas": 4}}
    pipeline = Pipeline(classes={"dispatch": OwnCounter}, options=options)
    pipeline.run(tmp_path)
    replicas = [replica for _, replica in sorted(pipeline.journal.of("forward"))]
    assert OwnCounter.made == 1 and replicas == [0, 1, 2, 3] * 4
