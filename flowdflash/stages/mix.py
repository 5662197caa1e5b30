"""Source ``mix``: several sources as one, by weight."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    Field,
    PlainValidator,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    create_model,
)
from pydantic_core import InitErrorDetails

from flowdflash.errors import DataInvalid
from flowdflash.items import IntArray, SampleTable
from flowdflash.stage import Check, OpenContext, Source, StageConfig, Vocabulary

SHARED_FACTS = ("task", "template_options", "tokenizer")
"""What the samples of one run must have in common."""


class Part(StageConfig):
    """What a source in a mix has besides its own options."""

    source: ClassVar[Any]
    type: str = Field(description="type of the source")
    weight: float = Field(1.0, ge=0, description="its share of the samples, relative to the other weights; 0: none")

    def __reduce__(self) -> tuple[Any, ...]:
        return _part, (self.source, self.model_dump(exclude_unset=True))


@cache
def _model(source: Any) -> type[Part]:
    model = create_model(f"{source.__name__}Part", __base__=(Part, source.Config))
    model.source = source
    return model


def _part(source: Any, options: Any, context: Any = None) -> Part:
    return _model(source).model_validate(options, context=context)


def _read_part(value: Any, info: ValidationInfo) -> Part:
    if isinstance(value, Part):
        return value
    if not isinstance(value, Mapping):
        raise ValueError("a source of a mix is a mapping with 'type' and the options of that type")
    registry = (info.context or {}).get("registry")
    known = {r.type: r.cls for r in registry.types("source")} if registry is not None else {}
    named = str(value.get("type"))
    if named == Mix.type:
        raise ValueError("a mix holds no other mix; name the sources of that one here, with weights of their own")
    if named in known and known[named].streaming:
        raise ValueError(f"a source of type {named!r} is streaming, so it has no number of samples to take a share of")
    if named in known:
        return _part(known[named], value, info.context)
    usable = ", ".join(repr(name) for name, cls in sorted(known.items()) if not cls.streaming and name != Mix.type)
    fault: InitErrorDetails = {"type": "missing", "loc": ("type",), "input": value}
    if "type" in value:
        fault = {"type": "literal_error", "loc": ("type",), "input": value["type"], "ctx": {"expected": usable}}
    raise ValidationError.from_exception_data(Part.__name__, [fault])


_SCHEMA = {
    "type": "object",
    "required": ["type"],
    "properties": {
        name: {"type": kind, "description": Part.model_fields[name].description}
        for name, kind in (("type", "string"), ("weight", "number"))
    },
}


@dataclass(frozen=True, slots=True, eq=False)
class _Pool:
    """One source of the mix when it is open: its samples in its own epoch, and how many an epoch of the mix takes."""

    name: str
    source: Source
    samples: SampleTable
    first_id: int
    taken: int


class Mix(Source):
    """Several sources as one, each with its share of the samples of an epoch.

    An epoch ends where the first source has been gone through, or where every source has, the others coming again
    meanwhile; the shares are those of the weights either way. Each source is gone through in a shuffled order, another
    one in each pass, and an epoch goes on where the one before stopped: no sample comes again before all of its source
    have come.
    """

    type = "mix"

    class Config(StageConfig):
        """Options of the source that mixes others."""

        sources: dict[
            Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")],
            Annotated[SerializeAsAny[Part], PlainValidator(_read_part), WithJsonSchema(_SCHEMA)],
        ] = Field(
            min_length=1,
            description="the sources by name: 'type', the options of that type, and 'weight', its share of the samples",
        )
        stop: Literal["first_exhausted", "all_exhausted"] = Field(
            "first_exhausted",
            description="an epoch ends where the first source has been gone through once, or where every source has",
        )
        epochs: int = Field(1, ge=1, description="passes over the mix")

    def __init__(self, config: Mix.Config) -> None:
        super().__init__(config)
        self._parts = {name: part for name, part in config.sources.items() if part.weight > 0}
        self._sources = {name: part.source(part) for name, part in self._parts.items()}
        self._pools: list[_Pool] = []
        self._draw: Sequence[int] = ()
        self._tried = ExitStack()

    def check(self, check: Check) -> Mapping[str, Any]:
        """Each source is sound, and they agree on what the samples of one run must have in common."""
        if not self._parts:
            check.refuse("sources", "every weight is 0", "give a source a weight")
        told: list[Mapping[str, Any]] = []
        for name, source in self._sources.items():
            inner = Check(f"{check.stage}.{name}", check.facts, complete=check.complete)
            told.append(source.check(inner))
            for problem in inner.problems:
                check.problems.append(replace(problem, path=f"sources.{name}.{problem.path}".rstrip(".")))
            if "epochs" in self._parts[name].model_fields_set:
                check.refuse(f"sources.{name}.epochs", "the mix itself says how many epochs there are", "remove it")
        facts: dict[str, Any] = {"epochs": self.config.epochs}
        if files := tuple(file for own in told for file in own.get("files", ())):
            facts["files"] = files
        for key in SHARED_FACTS:
            values = [own[key] for own in told if key in own]
            if any(value != values[0] for value in values):
                given = " and ".join(dict.fromkeys(map(str, values)))
                check.refuse("sources", f"they differ in {key}: {given}", "train on one at a time, or make them agree")
            elif values:
                facts[key] = values[0]
        lengths = [own["max_length"] for own in told if "max_length" in own]
        return {**facts, "max_length": max(lengths)} if lengths and len(lengths) == len(told) else facts

    def open(self, ctx: OpenContext) -> None:
        """Open every source and work out how many samples of each an epoch takes."""
        tables = {}
        for name, source in self._sources.items():
            self._tried.callback(source.close)
            source.open(replace(ctx, stage=f"{ctx.stage}.{name}"))
            table = next(iter(source.epochs()), None)
            if table is None or not len(table):
                raise DataInvalid(f"source {name!r} of the mix holds no sample; remove it, or set its weight to 0")
            tables[name] = table
        weights = [Fraction(str(part.weight)) for part in self._parts.values()]
        counts = _counts([len(table) for table in tables.values()], weights, self.config.stop)
        first = 0
        for (name, table), taken in zip(tables.items(), counts, strict=True):
            if not taken:
                raise DataInvalid(
                    f"source {name!r} of the mix: its weight is too small for a sample in an epoch; raise it"
                )
            self._pools.append(_Pool(name, self._sources[name], table, first, taken))
            first += len(table)
        self._draw = (ctx.seed, zlib.crc32(ctx.stage.encode()))
        told = ", ".join(f"{pool.name} {pool.taken} of {len(pool.samples)}" for pool in self._pools)
        ctx.report.info(f"{ctx.stage}: samples in an epoch: {told}")

    def epochs(self) -> Iterator[SampleTable]:
        """A table per epoch, from seed and epoch alone."""
        for epoch in range(self.config.epochs):
            parts = [self._taken(number, epoch) for number in range(len(self._pools))]
            ids, lengths, supervised = (np.concatenate(column) for column in zip(*parts, strict=True))
            table = SampleTable(epoch, ids, lengths, supervised)
            yield table.take(np.random.default_rng([*self._draw, epoch]).permutation(len(table)))

    def _taken(self, number: int, epoch: int) -> tuple[IntArray, IntArray, IntArray]:
        """Ids, lengths and supervised tokens of the samples of one source in an epoch.

        A sample that comes again within an epoch has another id each time: those of all sources lie below ``total``,
        and every return adds that much.
        """
        pool, total = self._pools[number], sum(len(pool.samples) for pool in self._pools)
        passes, places = np.divmod(np.arange(epoch * pool.taken, (epoch + 1) * pool.taken), len(pool.samples))
        turns = range(int(passes[0]), int(passes[-1]) + 1)
        orders = [
            np.random.default_rng([*self._draw, number, turn, 1]).permutation(len(pool.samples)) for turn in turns
        ]
        rows = np.concatenate(orders)[places[0] :][: pool.taken]
        ids = (passes - passes[0]) * total + pool.first_id + rows
        return ids, pool.samples.lengths[rows], pool.samples.supervised[rows]

    def _find(self, sample_id: int) -> tuple[_Pool, int]:
        """The source of a sample, and its id there."""
        place = sample_id % sum(len(pool.samples) for pool in self._pools)
        pool = next(pool for pool in reversed(self._pools) if pool.first_id <= place)
        return pool, int(pool.samples.ids[place - pool.first_id])

    def tokens(self, sample_id: int) -> tuple[IntArray, NDArray[np.bool_]]:
        """Token ids and loss mask of one sample."""
        pool, inner = self._find(sample_id)
        return pool.source.tokens(inner)

    def row(self, sample_id: int) -> Mapping[str, Any] | None:
        """What a person wrote, if the source of the sample has it."""
        pool, inner = self._find(sample_id)
        return pool.source.row(inner)

    def describe(self, sample_id: int) -> str:
        """Where a sample comes from."""
        pool, inner = self._find(sample_id)
        return f"{pool.name}: {pool.source.describe(inner)}"

    def vocabulary(self) -> Vocabulary | None:
        """Token ids that occur in any of the sources."""
        known = [vocabulary for source in self._sources.values() if (vocabulary := source.vocabulary()) is not None]
        if len(known) < len(self._sources):
            return None
        return Vocabulary(
            np.unique(np.concatenate([vocabulary.token_ids for vocabulary in known])),
            np.unique(np.concatenate([vocabulary.supervised_token_ids for vocabulary in known])),
        )

    def state(self) -> Mapping[str, Any]:
        """What each source wants to keep."""
        return {name: dict(source.state()) for name, source in self._sources.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Give each source what it kept."""
        for name, source in self._sources.items():
            source.restore(state[name])

    def close(self) -> None:
        """Close every source that was opened."""
        self._tried.close()

    def summary(self) -> Mapping[str, Any]:
        """Samples and tokens of an epoch, and how much of it comes from which source."""
        taken = sum(pool.taken for pool in self._pools)
        parts = {
            pool.name: {
                "samples_per_epoch": pool.taken,
                "share": pool.taken / taken,
                "passes_per_epoch": pool.taken / len(pool.samples),
                **pool.source.summary(),
            }
            for pool in self._pools
        }
        return {"samples_per_epoch": taken, "sources": parts}


def _counts(sizes: Sequence[int], weights: Sequence[Fraction], stop: str) -> list[int]:
    """Samples of each source in an epoch, as the weights have it, to the sample."""
    lengths = [size / weight for size, weight in zip(sizes, weights, strict=True)]
    if stop == "first_exhausted":
        return [math.floor(min(lengths) * weight) for weight in weights]
    return [math.ceil(max(lengths) * weight) for weight in weights]
