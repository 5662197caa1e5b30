"""Where the outputs of a stage go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flowdflash.errors import StageFailed
from flowdflash.items import Checkpoint
from flowdflash.runtime.channel import Channel
from flowdflash.stage import Sink


@dataclass(frozen=True, slots=True, eq=False)
class Outlet:
    """One reader of a stage's output.

    Attributes:
        payload: what it reads.
        channel: where it reads it.
        sink_name, sink: set if the reader is a sink, so that it can be asked what it wants.
        held: steps of the checkpoints that were put to it; the reader takes out those that it is done with.
    """

    payload: type
    channel: Channel[Any]
    sink_name: str = ""
    sink: Sink | None = None
    held: set[int] = field(default_factory=set)

    def wants(self, step: int, reason: str) -> bool:
        """The reader wants a checkpoint there.

        Raises:
            StageFailed: the sink raised.
        """
        if self.sink is None:
            return True
        try:
            return bool(self.sink.wants(step, reason))
        except BaseException as error:
            raise StageFailed(self.sink_name, error) from error

    def put(self, output: Any, place: int) -> bool:
        """Hand an output on; False if the reader wants no more."""
        if isinstance(output, Checkpoint):
            self.held.add(output.step)
        return self.channel.put(output, place)

    def finish(self) -> None:
        """This producer has no more items."""
        self.channel.finish()


def put_to(outlets: Sequence[Outlet], output: Any, place: int = 0) -> bool:
    """Hand an output to every reader of its class; False if there are readers and none wants any more."""
    readers = [outlet for outlet in outlets if isinstance(output, outlet.payload)]
    if isinstance(output, Checkpoint):
        readers = [outlet for outlet in readers if outlet.wants(output.step, output.reason)]
    taken = [outlet.put(output, place) for outlet in readers]
    return any(taken) or not taken
