"""Channels: bounds, ends, order, waits."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_fakes import in_thread

from flowdflash.runtime.channel import END, Channel, ChannelAborted, OrderedChannel

pytestmark = pytest.mark.timeout(20)


@dataclass
class Sized:
    nbytes: int


def drain(channel: Channel[Any]) -> list[Any]:
    got = []
    while (item := channel.get()) is not END:
        got.append(item)
    return got


def blocked_put(channel: Channel[Any], *args: Any) -> tuple[threading.Thread, list[Any]]:
    """Start a put on a thread and wait until it blocks."""
    waiting = threading.Event()
    original = channel._room.wait

    def wait(timeout: float | None = None) -> bool:
        waiting.set()
        return original(timeout)

    channel._room.wait = wait  # type: ignore[method-assign]
    thread, result = in_thread(lambda: channel.put(*args))
    assert waiting.wait(5)
    return thread, result


def blocked_get(channel: Channel[Any]) -> tuple[threading.Thread, list[Any]]:
    """Start a get on a thread and wait until it blocks."""
    waiting = threading.Event()
    original = channel._ready.wait

    def wait(timeout: float | None = None) -> bool:
        waiting.set()
        return original(timeout)

    channel._ready.wait = wait  # type: ignore[method-assign]
    thread, result = in_thread(channel.get)
    assert waiting.wait(5)
    return thread, result


def test_items_come_out_in_order_and_then_the_end_for_ever() -> None:
    channel: Channel[int] = Channel("c", 3)
    for i in range(3):
        assert channel.put(i)
    channel.finish()
    assert not channel.exhausted
    assert drain(channel) == [0, 1, 2]
    assert channel.get() is END and channel.exhausted


def test_put_blocks_at_capacity_until_something_is_taken() -> None:
    channel: Channel[int] = Channel("c", 1)
    channel.put(0)
    thread, result = blocked_put(channel, 1)
    assert channel.stats().depth == 1
    assert channel.get() == 0
    thread.join(5)
    assert result == [True] and channel.get() == 1
    assert channel.stats().put_wait_secs > 0 and channel.stats().high_water == 1


def test_get_blocks_until_something_comes() -> None:
    channel: Channel[int] = Channel("c", 1)
    thread, result = blocked_get(channel)
    channel.put(7)
    thread.join(5)
    assert result == [7] and channel.stats().get_wait_secs > 0


def test_bytes_bound_too_but_never_the_only_item() -> None:
    channel: Channel[Sized] = Channel("c", 10, 100)
    channel.put(Sized(500))
    thread, result = blocked_put(channel, Sized(1))
    channel.get()
    thread.join(5)
    assert result == [True]
    channel.put(Sized(99))
    assert channel.stats().depth_bytes == 100 and channel.stats().high_water_bytes == 500


def test_the_first_window_is_never_held_back_by_bytes() -> None:
    channel: Channel[Sized] = Channel("c", 10, 100, free_items=4)
    for _ in range(4):
        assert channel.put(Sized(90))
    thread, _ = blocked_put(channel, Sized(90))
    channel.cancel()
    thread.join(5)


def test_one_producer_among_several_does_not_finish_the_channel() -> None:
    channel: Channel[int] = Channel("c", 2, producers=2)
    channel.finish()
    thread, result = blocked_get(channel)
    channel.put(1)
    thread.join(5)
    assert result == [1]
    thread, result = blocked_get(channel)
    channel.finish()
    thread.join(5)
    assert result == [END]


def test_finishing_too_often_or_putting_after_the_end_is_a_mistake() -> None:
    channel: Channel[int] = Channel("c", 2)
    channel.finish()
    with pytest.raises(RuntimeError, match="after every producer"):
        channel.put(1)
    with pytest.raises(RuntimeError, match="more often"):
        channel.finish()


def test_a_failure_never_looks_like_the_end_of_data() -> None:
    channel: Channel[int] = Channel("c", 1)
    channel.put(0)
    error = ValueError("boom")
    thread, result = blocked_put(channel, 1)
    channel.abort(error)
    channel.abort(OSError("later"))
    thread.join(5)
    assert isinstance(result[0], ChannelAborted) and result[0].error is error
    channel.finish()
    with pytest.raises(ChannelAborted) as caught:
        channel.get()
    assert caught.value.error is error
    assert not channel.exhausted and channel.stats().discarded == 1


def test_a_failure_wakes_a_reader() -> None:
    channel: Channel[int] = Channel("c", 1)
    thread, result = blocked_get(channel)
    channel.abort(ValueError("boom"))
    thread.join(5)
    assert isinstance(result[0], ChannelAborted)


def test_a_cancelled_channel_refuses_items_and_frees_producers() -> None:
    channel: Channel[int] = Channel("c", 1)
    channel.put(0)
    thread, result = blocked_put(channel, 1)
    channel.cancel()
    thread.join(5)
    assert result == [False] and channel.put(2) is False and channel.get() is END
    assert not channel.exhausted and channel.stats().discarded == 1


def test_an_interrupted_reader_gets_what_is_there_and_then_the_end() -> None:
    channel: Channel[int] = Channel("c", 2)
    channel.put(1)
    channel.interrupt()
    assert channel.get() == 1 and channel.get() is END and not channel.exhausted
    waiting: Channel[int] = Channel("c", 2)
    thread, result = blocked_get(waiting)
    waiting.interrupt()
    thread.join(5)
    assert result == [END]


@pytest.mark.parametrize("bad", [{"capacity": 0}, {"capacity_bytes": -1}, {"producers": 0}])
def test_nonsense_bounds_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        Channel("c", **{"capacity": 1, **bad})


def test_the_item_due_is_never_blocked_by_bytes_or_count() -> None:
    channel: OrderedChannel[Sized] = OrderedChannel("c", 2, 10)
    channel.put(Sized(10), 1)
    assert channel.put(Sized(10), 0)
    assert channel.stats().depth == 2


def test_an_item_far_ahead_waits_for_its_place() -> None:
    channel: OrderedChannel[str] = OrderedChannel("c", 2)
    thread, result = blocked_put(channel, "two", 2)
    channel.put("zero", 0)
    channel.put("one", 1)
    assert channel.get() == "zero"
    thread.join(5)
    assert result == [True]
    channel.finish()
    assert drain(channel) == ["one", "two"]


def test_a_gap_at_the_end_is_an_error_not_an_end() -> None:
    channel: OrderedChannel[int] = OrderedChannel("c", 4)
    channel.put(1, 1)
    channel.finish()
    with pytest.raises(RuntimeError, match="place 0 never arrived"):
        channel.get()


def test_a_place_cannot_be_filled_twice() -> None:
    channel: OrderedChannel[int] = OrderedChannel("c", 4)
    channel.put(0, 0)
    with pytest.raises(RuntimeError, match="delivered twice"):
        channel.put(0, 0)


@settings(max_examples=30, deadline=None)
@given(
    owners=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    capacity=st.integers(1, 5),
    limit=st.integers(0, 30),
    sizes=st.integers(1, 20),
)
def test_rising_producers_never_deadlock_and_order_is_restored(
    owners: list[int], capacity: int, limit: int, sizes: int
) -> None:
    """However places are spread over producers, and however tight the bounds, everything comes out in order."""

    @dataclass
    class Item:
        place: int
        nbytes: int

    channel: OrderedChannel[Item] = OrderedChannel("c", capacity, limit, producers=4)

    def produce(owner: int) -> None:
        for place, who in enumerate(owners):
            if who == owner:
                channel.put(Item(place, 1 + place * 7 % sizes), place)
        channel.finish()

    threads = [in_thread(lambda owner=owner: produce(owner))[0] for owner in range(4)]
    assert [item.place for item in drain(channel)] == list(range(len(owners)))
    for thread in threads:
        thread.join(5)
    stats = channel.stats()
    assert stats.high_water <= capacity and stats.items_put == stats.items_got == len(owners)


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    capacity=st.integers(1, 4),
    limit=st.sampled_from([0, 1, 15]),
)
def test_nothing_is_lost_or_doubled_between_many_producers(counts: list[int], capacity: int, limit: int) -> None:
    channel: Channel[tuple[int, int]] = Channel("c", capacity, limit, producers=len(counts))

    def produce(owner: int) -> None:
        for i in range(counts[owner]):
            channel.put((owner, i))
        channel.finish()

    threads = [in_thread(lambda owner=owner: produce(owner))[0] for owner in range(len(counts))]
    got = drain(channel)
    for thread in threads:
        thread.join(5)
    for owner, count in enumerate(counts):
        assert [i for who, i in got if who == owner] == list(range(count))
    assert channel.stats().high_water <= capacity
