"""Where the time goes."""

from __future__ import annotations

from flowdflash.runtime.channel import Channel
from flowdflash.runtime.meter import WorkerMeter, bottleneck, edge_snapshot, stage_snapshot


def test_replicas_are_summed_and_the_busy_share_is_per_replica() -> None:
    meters = [WorkerMeter(3.0, 1.0, 0.0, 5, 4, {"late": 1}), WorkerMeter(1.0, 0.0, 3.0, 2, 1, {"late": 1})]
    snapshot = stage_snapshot("target", meters, 4.0)
    assert (snapshot.replicas, snapshot.busy_secs, snapshot.wait_in_secs, snapshot.wait_out_secs) == (2, 4.0, 1.0, 3.0)
    assert (snapshot.taken, snapshot.passed, snapshot.dropped) == (7, 5, {"late": 2})
    assert snapshot.busy_share == 0.5 and snapshot.balanced


def test_books_that_do_not_balance_say_so() -> None:
    assert not stage_snapshot("target", [WorkerMeter(taken=3, passed=2)], 1.0).balanced


def test_nothing_dropped_leaves_no_reason() -> None:
    meter = WorkerMeter()
    meter.drop("never", 0)
    assert meter.dropped == {}


def test_the_bottleneck_takes_replicas_into_account() -> None:
    target = stage_snapshot("target", [WorkerMeter(3.0), WorkerMeter(3.0), WorkerMeter(3.0)], 10.0)
    drafter = stage_snapshot("drafter", [WorkerMeter(8.0)], 10.0)
    assert bottleneck([target, drafter]) == "drafter"
    assert bottleneck([stage_snapshot("idle", [WorkerMeter()], 1.0)]) == ""
    assert bottleneck([]) == "" and stage_snapshot("none", [], 0.0).busy_share == 0.0


def test_the_channels_of_an_edge_are_summed() -> None:
    channels: list[Channel[int]] = [Channel("e", 2), Channel("e", 2)]
    for channel in channels:
        channel.put(1)
    channels[0].get()
    edge = edge_snapshot("e", [channel.stats() for channel in channels])
    assert (edge.capacity, edge.depth, edge.items_put, edge.items_got, edge.high_water) == (4, 1, 2, 1, 2)
    assert isinstance(edge.depth, int) and isinstance(edge.get_wait_secs, float)
