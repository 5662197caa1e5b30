"""Plugins: what they may hook into, the registry of stages, and how they are found. Authors need ``hookimpl`` only."""

from flowdflash.plugin.hookspecs import hookimpl

__all__ = ["hookimpl"]
