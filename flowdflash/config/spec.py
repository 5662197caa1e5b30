"""What a pipeline file may hold outside the options of its stages, and what the plugin layer has to supply."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, Field

from flowdflash.errors import Problem
from flowdflash.graph import Graph
from flowdflash.stage import Bytes, PipelinePath, Stage, StageConfig

VERSION = 1
"""Version of the file format."""

STAGE_KEYS = ("kind", "type", "inputs")
"""Keys of a stage that are not options of its type."""


def _supported(version: int) -> int:
    if version != VERSION:
        raise ValueError(f"input should be {VERSION}, the only version of pipeline files there is")
    return version


def _file_name(name: str) -> str:
    """A name that can be part of a file name, of a metric name and of ``stage.port``."""
    if not name or name != name.strip():
        raise ValueError("a name is not empty and neither starts nor ends with a space")
    if len(name) > 100 or any(ch in "/\\" or not ch.isprintable() for ch in name) or set(name) == {"."}:
        raise ValueError("a name has at most 100 printable characters and no slash or backslash")
    return name


def _stage_name(name: str) -> str:
    if "." in _file_name(name):
        raise ValueError("a stage name has no dot, since 'stage.port' names an output")
    return name


StageName = Annotated[str, AfterValidator(_stage_name)]


class PipelineSpec(StageConfig):
    """The keys of a pipeline file."""

    version: Annotated[int, AfterValidator(_supported)] = Field(description="Version of the file format: 1.")
    name: Annotated[str, AfterValidator(_file_name)] = Field(
        "pipeline", description="Name of the pipeline, used for run folders; by default that of the file."
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of everything random: same seed, same plan, same losses.")
    ordering: Literal["plan", "arrival"] = Field(
        "plan",
        description="plan: batches reach the drafter in planned order, whatever the timing; arrival: as ready.",
    )
    stall_secs: float = Field(
        300.0,
        ge=0,
        le=1e6,
        description="When nothing has moved for so long, say where the run is stuck, with the stack of each thread; 0 "
        "for never. It goes on waiting.",
    )
    vars: dict[str, str] = Field({}, description="Values used as ${vars.name} anywhere below.")
    plugins: tuple[PipelinePath, ...] = Field((), description="Python files that supply stages; relative to this file.")
    extends: str = Field("", description="A pipeline file to start from; mappings are merged, the rest is replaced.")
    stages: dict[StageName, Any] = Field(min_length=1, description="The stages by name.")


class InputSpec(StageConfig):
    """One input of a stage, with the options of the channel that it comes through."""

    from_: str = Field(alias="from", description="Name of the stage to read, or stage.port for one of several outputs.")
    capacity: int = Field(
        2,
        ge=1,
        le=1_000_000,
        description="Most items that may wait, per replica of the reader; in planned order at least 4 per replica of "
        "the stage before, where that has several.",
    )
    capacity_bytes: Bytes = Field(0, description="Most bytes that may wait, such as 4GiB; 0 for no limit.")


class Registered(Protocol):
    """A stage class in the registry, and the plugin that it came from."""

    @property
    def cls(self) -> type[Stage]:
        """The class."""

    @property
    def kind(self) -> str:
        """Its kind."""

    @property
    def type(self) -> str:
        """Its name among those of its kind."""

    @property
    def owner(self) -> str:
        """The plugin that registered it."""

    @property
    def summary(self) -> str:
        """One line on what it does."""


class Registry(Protocol):
    """Stage classes by kind and type."""

    def get(self, kind: str, type: str) -> type[Stage] | None:
        """The class, or None."""

    def types(self, kind: str | None = None) -> Sequence[Registered]:
        """What is registered, of one kind or of all."""


class Plugins(Protocol):
    """The loaded plugins, as far as checking a pipeline needs them."""

    @property
    def registry(self) -> Registry:
        """The stages that they supply."""

    def load_file(self, path: Path) -> None:
        """Load a plugin of one file, or raise ``PluginBroken``."""

    def explain_missing(self, kind: str, type: str) -> str | None:
        """Why there is no such stage, if more is known than that there is none."""

    def check(self, graph: Graph) -> Sequence[Problem]:
        """What the plugins say against a pipeline (hook ``flowdflash_check``)."""
