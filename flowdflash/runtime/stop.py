"""How a person, or a program, asks a run to stop."""

from __future__ import annotations

from collections.abc import Callable


class StopRequest:
    """Ask once: stop at the next step boundary and write a checkpoint. Ask twice: stop now.

    ``request`` takes no lock, so it may be called from a signal handler. Installing one is up to the caller.
    """

    def __init__(self) -> None:
        self._count = 0
        self._listeners: list[Callable[[], None]] = []

    @property
    def requested(self) -> bool:
        """Asked at least once."""
        return self._count > 0

    @property
    def urgent(self) -> bool:
        """Asked at least twice."""
        return self._count > 1

    def request(self) -> None:
        """Ask to stop."""
        self._count += 1
        for listener in tuple(self._listeners):
            listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` at every request; it must be safe inside a signal handler."""
        self._listeners.append(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        """Stop calling ``listener``."""
        self._listeners.remove(listener)
