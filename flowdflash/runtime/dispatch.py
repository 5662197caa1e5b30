"""The dispatcher's one point of decision: which replica gets the next batch."""

from __future__ import annotations

import operator
import threading
import time
from dataclasses import dataclass
from typing import Literal

from flowdflash.errors import PluginBroken, StageFailed
from flowdflash.items import BatchInfo
from flowdflash.runtime.channel import END, Channel, ChannelAborted, End
from flowdflash.stage import Dispatcher, ReplicaLoad


@dataclass(frozen=True, slots=True)
class Routed:
    """A batch and where it goes.

    Attributes:
        info: the batch.
        replica: who gets it.
        ticket: its place among the batches of that replica, from 0.
        blocked_secs: time it waited for a replica.
    """

    info: BatchInfo
    replica: int
    ticket: int
    blocked_secs: float


class Dispatch:
    """Takes batches off the plan in order and routes each, one at a time, however many threads ask.

    Taking, asking the policy and recording the load happen as one: the order of routing is the order of the plan, and
    the first N batches reach N idle replicas every time. Fetching tokens comes later and in parallel; the ticket brings
    the batches of a replica back into routed order. A replica has at most ``capacity`` batches outstanding, which is
    what may wait in its channel and one in work, so the batch that its channel is due for is always held by a thread
    that is not waiting for another.
    """

    def __init__(self, policy: Dispatcher, name: str, plan: Channel[BatchInfo], replicas: int, capacity: int) -> None:
        self._policy, self._name, self._plan, self._capacity = policy, name, plan, capacity
        self._turn = threading.Lock()
        self._changed = threading.Condition()
        self._outstanding = [0] * replicas
        self._cost = [0.0] * replicas
        self._dispatched = [0] * replicas
        self._settled = 0
        self._cancelled = False
        self._error: BaseException | None = None

    def take(self) -> Routed | Literal[End.END]:
        """The next batch of the plan with its replica; ``END`` when there is none or none is wanted.

        Raises:
            ChannelAborted: the run has failed.
            StageFailed: the policy raised, or named a replica that does not exist.
        """
        with self._turn:
            info = self._plan.get()
            return END if info is END else self._route(info)

    def settle(self, replica: int, info: BatchInfo) -> None:
        """A replica has finished with a batch."""
        with self._changed:
            self._outstanding[replica] -= 1
            self._settled += 1
            # Sums of floats do not return to exactly zero by themselves.
            self._cost[replica] = self._cost[replica] - info.cost if self._outstanding[replica] else 0.0
            self._changed.notify_all()

    def cancel(self) -> None:
        """No batch is wanted any more."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def abort(self, error: BaseException) -> None:
        """The run has failed."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _loads(self) -> tuple[ReplicaLoad, ...]:
        columns = zip(self._outstanding, self._cost, self._dispatched, strict=True)
        return tuple(ReplicaLoad(i, n, cost, self._capacity, sent) for i, (n, cost, sent) in enumerate(columns))

    def _route(self, info: BatchInfo) -> Routed | Literal[End.END]:
        begin, blocked = time.monotonic(), False
        chosen: int | None = None
        asked_at = -1
        while True:
            with self._changed:
                if self._error is not None:
                    raise ChannelAborted(self._error)
                if self._cancelled:
                    return END
                if chosen is not None and self._outstanding[chosen] < self._capacity:
                    ticket = self._dispatched[chosen]
                    self._dispatched[chosen] += 1
                    self._outstanding[chosen] += 1
                    self._cost[chosen] += info.cost
                    return Routed(info, chosen, ticket, time.monotonic() - begin if blocked else 0.0)
                if chosen is not None or asked_at == self._settled:
                    blocked = True
                    self._changed.wait()
                    continue
                loads, asked_at = self._loads(), self._settled
            # Without that lock: a policy that blocks must not keep the run from being stopped.
            chosen = self._ask(info, loads)

    def _ask(self, info: BatchInfo, loads: tuple[ReplicaLoad, ...]) -> int | None:
        try:
            answer = self._policy.route(loads, info)
            if answer is not None:
                chosen = operator.index(answer)
                if not 0 <= chosen < len(loads):
                    raise self._broken(f"route() named replica {chosen} of {len(loads)}")
                return chosen
            if not any(load.outstanding for load in loads):
                raise self._broken("route() returned None though every replica is idle; no load would ever change")
            return None
        except BaseException as error:
            raise StageFailed(self._name, error, batch=info.seq, sample_ids=info.sample_ids) from error

    def _broken(self, message: str) -> PluginBroken:
        return PluginBroken(type(self._policy).type, f"dispatcher {self._name!r}: {message}")
