"""What is known of one plugin."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint

from flowdflash.plugin.registry import Registered


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """What is known of one plugin.

    Attributes:
        name: name of its entry point, of its module or of its file.
        origin: ``built-in``, ``distribution NAME`` or ``file PATH``.
        version: version of the distribution, empty for a file.
        import_secs: time its import took.
        stages: what it registered.
        hooks: hooks that it implements.
        error: why it is left out; empty if it works.
        disabled: left out because somebody asked for that.
    """

    name: str
    origin: str
    version: str = ""
    import_secs: float = 0.0
    stages: tuple[Registered, ...] = ()
    hooks: tuple[str, ...] = ()
    error: str = ""
    disabled: bool = False

    @classmethod
    def of(cls, point: EntryPoint, *, disabled: bool = False) -> PluginInfo:
        """What the metadata of its distribution say of an installed plugin."""
        dist = point.dist
        origin = f"distribution {dist.name if dist else point.module}"
        return cls(point.name, origin, dist.version if dist else "", disabled=disabled)
