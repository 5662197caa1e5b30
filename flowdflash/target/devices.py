"""Options that say where something runs, and what is wrong with them. No torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

OneDevice = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]
"""``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""

ReplicaDevices = Annotated[
    str,
    Field(
        pattern=r"^(auto|cpu|cuda|cuda:\d+(,cuda:\d+)*)$",
        description="auto, cpu, cuda, or the GPU of each replica (cuda:1,cuda:2). auto and cuda give replica i GPU i+1 "
        "and the last GPU 0, where the drafter trains.",
    ),
]
"""Where the copies of a target run, one GPU each."""


def devices_problem(device: str, replicas: int) -> tuple[str, str]:
    """What is wrong with a device for so many replicas, and what to do; two empty strings if nothing is."""
    named = device.split(",") if ":" in device else []
    if named and len(named) != replicas:
        hint = f"name {replicas} GPUs, separated by commas, or set device: auto"
        return f"{replicas} replicas, but device names {len(named)} GPU{'s' * (len(named) > 1)}", hint
    if len(set(named)) < len(named):
        return f"{device} names a GPU twice", "give each replica a GPU of its own"
    return "", ""
