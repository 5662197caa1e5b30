"""A small set of stages, and a plugin layer of the least size, for tests of the configuration layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from flowdflash.errors import PluginBroken, Problem
from flowdflash.graph import Graph
from flowdflash.items import Checkpoint, FeatureBatch, StepRecord
from flowdflash.stage import (
    Bucketer,
    Bytes,
    Check,
    Dispatcher,
    Drafter,
    Interleaver,
    ModelRef,
    PipelinePath,
    Sink,
    Source,
    Stage,
    StageConfig,
    TargetForward,
)


class Corpus(Source):
    """Rows of a file."""

    type = "rows"

    class Config(StageConfig):
        path: PipelinePath = Field(description="The file.")
        extra_paths: tuple[PipelinePath, ...] = Field((), description="More files.")
        max_length: int = Field(1024, ge=1, description="Longest sample, in tokens.")
        tokenizer: ModelRef = Field("toy", description="Whose tokenizer.")

    def check(self, check: Check) -> Mapping[str, Any]:
        return {"max_length": self.config.max_length, "tokenizer": self.config.tokenizer}


class Buckets(Bucketer):
    """Buckets of samples of like length."""

    type = "length"

    class Config(StageConfig):
        token_budget: int = Field(description="Padded tokens per batch.")
        edges: tuple[int, ...] | Literal["auto"] = Field("auto", description="Upper ends of the buckets, in tokens.")
        buckets: int = Field(6, ge=1, description="Number of buckets.")
        drop_last: bool = Field(False, description="Drop what fills no batch.")

        @field_validator("edges")
        @classmethod
        def _ascending(cls, edges: Any) -> Any:
            if edges != "auto" and list(edges) != sorted(set(edges)):
                raise ValueError("edges have to ascend")
            return edges

    def check(self, check: Check) -> Mapping[str, Any]:
        if self.config.token_budget < check.facts.get("max_length", 0):
            check.refuse("token_budget", "smaller than the longest sample", "raise it, or lower max_length")
        return {"buckets": self.config.buckets}


class Merged(Bucketer):
    """Neighbouring buckets merged."""

    type = "merged"

    class Config(StageConfig):
        token_budget: int = Field(description="Padded tokens per batch.")
        merge_below: int = Field(4, description="Merge buckets with fewer batches.")


class Order(Interleaver):
    """Buckets in turn."""

    type = "stratified"


class Pull(Dispatcher):
    """One queue."""

    type = "pull"


class Target(TargetForward):
    """A target."""

    type = "toy"

    class Config(StageConfig):
        model: ModelRef = Field("toy", description="The model.")
        replicas: Literal[1, 2, 4, 8] = Field(1, description="Copies.")
        cache_bytes: Bytes = Field(0, description="Cache.")

    def check(self, check: Check) -> Mapping[str, Any]:
        return {"hidden_size": 64, "layers": (1, 3), "replicas": self.config.replicas}


class Optimizer(BaseModel):
    """Nested options."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    lr: float = Field(6e-4, gt=0, description="Peak learning rate.")
    eps: float = Field(1e-8, description="Added to the denominator.")
    gamma: float = Field(1.0, description="Decay.")


class Draft(Drafter):
    """A draft."""

    type = "dflash"

    class Config(StageConfig):
        block_size: int = Field(8, ge=2, le=32, description="Tokens per block.")
        accumulate: int = Field(8, ge=1, description="Micro-batches per step.")
        optimizer: Optimizer = Field(Optimizer(), description="The optimizer.")
        warmup_steps: int = Field(0, description="Steps of warm-up.")
        tag: str = Field("", description="Free text.")
        resume: bool = Field(False, description="Go on.")
        clip: float | None = Field(None, description="Clip the gradient to this norm.")

    def check(self, check: Check) -> Mapping[str, Any]:
        if check.facts.get("hidden_size", 64) != 64:
            check.refuse("", "the target has another width")
        return {"window": self.config.accumulate, "block_size": self.config.block_size}


class Metrics(Sink):
    """Lines of numbers."""

    type = "jsonl"
    reads = (StepRecord,)

    class Config(StageConfig):
        path: PipelinePath = Field(Path("metrics.jsonl"), description="The file.")
        every_steps: int = Field(1, ge=1, description="Steps between lines.")


class Board(Sink):
    """A board."""

    type = "wandb"
    reads = (StepRecord,)

    class Config(StageConfig):
        project: str = Field("flowdflash", description="Name of the project.")
        mode: Literal["online", "offline"] = Field("offline", description="Where to log.")


class Save(Sink):
    """Checkpoints."""

    type = "checkpoint"
    reads = (Checkpoint,)

    class Config(StageConfig):
        every_steps: int = Field(100, ge=1, description="Steps between checkpoints.")
        keep: int = Field(3, ge=1, description="How many to keep.")


class Evaluate(Sink):
    """Acceptance length."""

    type = "acceptance"
    reads = (Checkpoint,)

    class Config(StageConfig):
        prompts: int = Field(32, ge=1, description="Prompts per evaluation.")


class Features(Sink):
    """Keeps features."""

    type = "features"
    reads = (FeatureBatch,)


class Crash(Interleaver):
    """Raises in its check."""

    type = "crash"

    def check(self, check: Check) -> Mapping[str, Any]:
        raise SystemExit("no reason")


class BadReturn(Interleaver):
    """Returns no mapping from its check."""

    type = "badreturn"

    def check(self, check: Check) -> Mapping[str, Any]:
        return [1]  # type: ignore[return-value]


STAGES: tuple[type[Stage], ...] = (
    Corpus,
    Buckets,
    Merged,
    Order,
    Crash,
    BadReturn,
    Pull,
    Target,
    Draft,
    Metrics,
    Board,
    Save,
    Evaluate,
    Features,
)


@dataclass(frozen=True)
class FakeRegistered:
    cls: type[Stage]
    owner: str = "fakes"

    @property
    def kind(self) -> str:
        return self.cls.kind

    @property
    def type(self) -> str:
        return self.cls.type

    @property
    def summary(self) -> str:
        return (self.cls.__doc__ or "").splitlines()[0]


class FakeRegistry:
    def __init__(self, stages: Sequence[type[Stage]] = STAGES) -> None:
        self.stages = {(cls.kind, cls.type): cls for cls in stages}

    def get(self, kind: str, type: str) -> type[Stage] | None:
        return self.stages.get((kind, type))  # type: ignore[arg-type]

    def types(self, kind: str | None = None) -> list[FakeRegistered]:
        return [FakeRegistered(cls) for (k, _), cls in self.stages.items() if kind in (None, k)]


@dataclass
class FakePlugins:
    registry: FakeRegistry = field(default_factory=FakeRegistry)
    problems: list[Problem] = field(default_factory=list)
    missing: dict[tuple[str, str], str] = field(default_factory=dict)
    loaded: list[Path] = field(default_factory=list)
    graphs: list[Graph] = field(default_factory=list)
    supplies: ClassVar[type[Stage]]

    def load_file(self, path: Path) -> None:
        if not path.is_file():
            raise PluginBroken(path.name, f"no such file: {path.name}")
        self.loaded.append(path)

    def explain_missing(self, kind: str, type: str) -> str | None:
        return self.missing.get((kind, type))

    def check(self, graph: Graph) -> list[Problem]:
        self.graphs.append(graph)
        return self.problems


PIPELINE = """\
version: 1
name: demo
seed: 7
vars: {accumulate: 8}
stages:
  corpus:   {kind: source, type: rows, path: data/train.jsonl, max_length: 1024}
  buckets:  {kind: bucketer, type: length, inputs: corpus, token_budget: 8192, buckets: 6}
  order:    {kind: interleaver, type: stratified, inputs: buckets}
  dispatch: {kind: dispatcher, type: pull, inputs: order}
  target:   {kind: target-forward, type: toy, inputs: dispatch, replicas: 2}
  drafter:
    {kind: drafter, type: dflash, inputs: {from: target, capacity: 4, capacity_bytes: 4GiB},
     block_size: 8, accumulate: "${vars.accumulate}"}
  metrics:  {kind: sink, type: jsonl, inputs: drafter.records}
  board:    {kind: sink, type: wandb, inputs: drafter.records, project: demo}
  save:     {kind: sink, type: checkpoint, inputs: drafter.checkpoints, every_steps: 100}
  evaluate: {kind: sink, type: acceptance, inputs: drafter.checkpoints}
"""
"""A pipeline without a mistake: the usual shape."""
