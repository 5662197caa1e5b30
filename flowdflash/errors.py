"""Every error the library raises on purpose, and the one value that describes a mistake in a pipeline file."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a pipeline: what is wrong, where, and what to do about it.

    Attributes:
        message: what is wrong, in one sentence without a final stop.
        path: dotted place in the pipeline, such as ``stages.buckets.edges.1``.
        file: the file it is in, as the user named it; empty if it is in none.
        line: 1-based line, 0 if unknown.
        column: 1-based column, 0 if unknown.
        hint: what to do, in one sentence; may be empty.
        severity: a ``warning`` does not stop a run.
    """

    message: str
    path: str = ""
    file: str = ""
    line: int = 0
    column: int = 0
    hint: str = ""
    severity: Literal["error", "warning"] = "error"

    @property
    def place(self) -> str:
        """``file:line:column``, as far as known."""
        known = [self.file] + [str(n) for n in (self.line, self.column) if n]
        return ":".join(part for part in known if part)

    def __str__(self) -> str:
        head = ": ".join(part for part in (self.place, self.path, self.message) if part)
        return f"{head} ({self.hint})" if self.hint else head


class FlowdflashError(Exception):
    """Base of every error that flowdflash raises on purpose."""


class PipelineInvalid(FlowdflashError):
    """A pipeline cannot run as written; carries every problem found, sorted by place."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(sorted(problems, key=lambda p: (p.file, p.line, p.column, p.path)))
        super().__init__("\n".join(map(str, self.problems)) or "the pipeline is invalid")


class PluginBroken(FlowdflashError):
    """A plugin could not be loaded, or broke the contract of a hook or of a stage.

    Attributes:
        plugin: the distribution, module or file at fault.
    """

    def __init__(self, plugin: str, message: str) -> None:
        self.plugin = plugin
        super().__init__(f"plugin {plugin!r}: {message}")


class DataInvalid(FlowdflashError):
    """Input data cannot be used: names the file, the row and the reason."""


class ModelInvalid(FlowdflashError):
    """A model, a tokenizer or a checkpoint cannot be used: says which, why and what to do."""


UNPLACED = re.compile(r"\bsample \d+$")
"""What a source says of a sample that comes from nowhere."""
SHOWN, LOCATED = 8, 4
"""Samples of a batch that an error names, and of which it says where they come from."""


class StageFailed(FlowdflashError):
    """A stage raised while a run was going on. The original exception is the ``__cause__``.

    Attributes:
        stage: name of the stage in the pipeline.
        phase: ``open``, ``run`` or ``close``.
        replica: which replica of the stage, from 0.
        batch: number of the batch in the run, or None where none was being worked on.
        sample_ids: ids of the samples of that batch.
        places: where the first of them come from, if that is known.
        later: failures of other stages that came after this one.
    """

    def __init__(
        self,
        stage: str,
        cause: BaseException,
        *,
        phase: Literal["open", "run", "close"] = "run",
        replica: int = 0,
        batch: int | None = None,
        sample_ids: Sequence[int] = (),
    ) -> None:
        self.stage, self.cause, self.phase, self.replica = stage, cause, phase, replica
        self.batch, self.sample_ids = batch, tuple(int(i) for i in sample_ids)
        self.places: tuple[str, ...] = ()
        self.later: list[StageFailed] = []
        super().__init__(self._message())
        self.__cause__ = cause

    def _message(self) -> str:
        where = f"stage {self.stage!r}" + (f" (replica {self.replica})" if self.replica else "")
        text = f"{where} failed in {self.phase}: {type(self.cause).__name__}: {self.cause}"
        if self.batch is not None:
            shown = ", ".join(map(str, self.sample_ids[:SHOWN])) + (", ..." if len(self.sample_ids) > SHOWN else "")
            text += f" [batch {self.batch}, samples {shown}{', from ' if self.places else ''}{', '.join(self.places)}]"
        return text

    def locate(self, describe: Callable[[int], str]) -> None:
        """Say where the samples come from. A source that cannot tell leaves the error as it is."""
        for number in self.sample_ids[:LOCATED]:
            with suppress(Exception):
                place = describe(number)
                if not UNPLACED.search(place):
                    self.places += (place,)
        self.args = (self._message(),)

    def original_traceback(self) -> str:
        """The traceback of the exception that the stage raised."""
        return "".join(traceback.format_exception(self.cause))
