"""Checkpoint sink: an exported draft plus what a resume needs, written atomically in the background.

The runtime gives each sink a thread of its own, so nothing here runs on the training thread: the drafter pays for the
copy and for nothing else. On disk::

    checkpoints/
      step-000300/            renamed into place when complete
        draft/                config.json, model.safetensors: what inference engines read
        state.pt              the draft in full precision, optimizer, counters (loads with weights_only)
        records.jsonl         the last optimizer steps, should a log not have them yet when the process is killed
        checkpoint.json       step, reason, ledger, run, size and sha256 of every file
      latest                  name of the newest complete checkpoint, switched last

``latest`` names a complete checkpoint at every moment, whenever the process is killed. So nothing is replaced in place:
a step that is written again gets the other of its two names, ``step-000300`` and ``step-000300-2``, and its old folder
goes when ``latest`` has been switched. A folder that is being written or removed has a name that starts with a dot.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from flowdflash.errors import Problem
from flowdflash.items import Checkpoint
from flowdflash.plugin import hookimpl
from flowdflash.stage import Check, OpenContext, Sink, StageConfig
from flowdflash_checkpoint.best import best, best_problem, measured_steps

MANIFEST = "checkpoint.json"
_NAME = re.compile(r"step-(\d{6,})(?:-\d+)?")
_LEFTOVERS = (".writing-step-*", ".removing-step-*")


class CheckpointSink(Sink):
    """Writes checkpoints in the background, atomically, one at a time; keeps the newest few and the best."""

    type = "checkpoint"
    reads = (Checkpoint,)
    safe_to_change = frozenset(
        {"every_steps", "at_start", "at_end", "keep", "keep_best", "best_by", "when_busy", "dtype"}
    )

    class Config(StageConfig):
        """Options of the sink ``checkpoint``."""

        every_steps: int = Field(
            0, ge=0, description="A checkpoint every so many optimizer steps; 0 for none on the way."
        )
        at_start: bool = Field(False, description="Keep the untrained draft too.")
        at_end: bool = Field(True, description="A checkpoint when training ends.")
        keep: int = Field(
            3,
            ge=1,
            description="How many of this run's newest checkpoints stay on disk, besides those that an evaluator is "
            "not done with.",
        )
        keep_best: int = Field(
            0,
            ge=0,
            description="How many others stay: those with the longest acceptance length, as an evaluator of this run "
            "has measured it.",
        )
        best_by: str = Field("", description="Stage whose results say which are best; empty: the only evaluator.")
        when_busy: Literal["wait", "skip"] = Field(
            "wait",
            description="When a checkpoint falls due on the way while one is being written: it waits in the edge (and "
            "training too, once that is full), or it is skipped and counted.",
        )
        dtype: str = Field(
            "bfloat16", pattern="^(bfloat16|float32)$", description="Number format of the exported draft."
        )

    def check(self, check: Check) -> Mapping[str, Any]:
        """How large a checkpoint will be where the draft's size is known, and how many there will be at once.

        Those that are kept because an evaluator is not done with them are not counted.
        """
        parameters, config = check.facts.get("draft_parameters"), self.config
        if parameters is None:
            return {}
        # fp32 weights and two moments of the optimizer for a resume, and the exported draft.
        each = parameters * (3 * 4 + (2 if config.dtype == "bfloat16" else 4))
        # The newest is complete before the oldest goes.
        count = config.keep + config.keep_best + 1 if config.every_steps else config.at_start + config.at_end
        return {"checkpoint_bytes": each, "checkpoints": count}

    def open(self, ctx: OpenContext) -> None:
        """Make the folder; leftovers of interrupted writes are removed."""
        self.folder = ctx.run_dir / "checkpoints"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run, self.report = ctx.run_dir.name, ctx.report
        self.facts, self.in_use = ctx.facts, ctx.checkpoints_in_use
        self.newest, self.count, self.failures = "", 0, 0
        self.write_secs = 0.0
        self.evaluations = ctx.run_dir / "evaluations.jsonl"
        self.due: set[int] = set()  # steps on the way that this sink wanted and has not written yet
        self.skipped: set[int] = set()
        for leftover in (path for pattern in _LEFTOVERS for path in self.folder.glob(pattern)):
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)

    def wants(self, step: int, reason: str) -> bool:
        """True for the steps that the options name, and whenever the run is interrupted."""
        if reason == "start":
            return bool(self.config.at_start)
        # A drafter may ask about the last step as such alone, even where its turn has come anyway.
        turn = step > 0 and self.config.every_steps > 0 and step % self.config.every_steps == 0
        if reason == "every":
            return turn and not self._busy(step)
        return reason == "interrupted" or turn or bool(self.config.at_end)

    def _busy(self, step: int) -> bool:
        """Another checkpoint is on its way to the disk and this one is not to wait. Asked several times per step."""
        if self.config.when_busy == "wait":
            return False
        if others := self.due - {step}:  # once: the thread that writes takes its step out meanwhile
            if step not in self.skipped:
                self.skipped.add(step)
                self.report.warn(f"checkpoint of step {step} skipped: that of step {max(others)} is being written")
            return True
        self.due.add(step)
        self.skipped.discard(step)
        return False

    def write(self, item: Checkpoint) -> None:
        """Write one checkpoint under a temporary name, then rename it; ``latest`` is switched last.

        Raises:
            OSError: the disk is full or the folder cannot be written; what was there before stays valid.
        """
        try:
            self._write(item)
        except OSError:
            self.failures += 1
            raise
        finally:
            self.due.discard(item.step)

    def _write(self, item: Checkpoint) -> None:
        began = time.monotonic()
        before = self._mine(item.step)
        name = self._free_name(item.step)
        temporary = self.folder / f".writing-{name}"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            self._fill(temporary, item)
            temporary.rename(self.folder / name)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, RuntimeError) or type(error).__name__ == "SafetensorError":
                # How torch and safetensors say that a file cannot be written.
                raise OSError(f"{temporary}: {error}") from error
            raise
        _sync(self.folder)
        _replace_text(self.folder / "latest", name + "\n")
        _sync(self.folder)
        self.newest, self.count = name, self.count + 1
        self._retain(before)
        self.write_secs += time.monotonic() - began

    def _free_name(self, step: int) -> str:
        """A name of this step that nothing has yet, whoever put it there."""
        name, number = f"step-{step:06d}", 1
        while os.path.lexists(self.folder / (name if number == 1 else f"{name}-{number}")):
            number += 1
        return name if number == 1 else f"{name}-{number}"

    def _fill(self, folder: Path, item: Checkpoint) -> None:
        import torch

        from flowdflash.dflash.export import config_from_zlab, export_zlab

        folder.mkdir(parents=True)
        config = config_from_zlab(item.draft_config)
        provenance = item.draft_config.get("flowdflash")
        export_zlab(folder / "draft", config, item.draft_tensors, dtype=self.config.dtype, provenance=provenance)
        torch.save({"tensors": dict(item.draft_tensors), "state": dict(item.state)}, folder / "state.pt")
        lines = [json.dumps(record.as_dict()) + "\n" for record in item.records]
        (folder / "records.jsonl").write_text("".join(lines), encoding="utf-8")
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        manifest = {
            "step": item.step,
            "epoch": item.epoch,
            "reason": item.reason,
            "run": self.run,
            "ledger": dict(item.ledger),
            "target": self.facts.get("model"),
            "pause_secs": item.pause_secs,
            "files": {str(p.relative_to(folder)): {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in files},
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        for path in [*files, folder / MANIFEST]:
            _sync(path)
        _sync(folder / "draft")
        _sync(folder)

    def _mine(self, step: int | None = None) -> list[Path]:
        """This run's checkpoints, or those of one step, the oldest first; anything else in the folder is not ours."""
        found = []
        for path in self.folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and step in (None, int(match[1])) and _run_of(path) == self.run:
                found.append((int(match[1]), path))
        return [path for _, path in sorted(found)]

    def _retain(self, replaced: Sequence[Path] = ()) -> None:
        """Delete what was replaced and this run's oldest; neither the best nor what somebody is still to measure."""
        in_use = set(self.in_use())  # before anybody's results are read, so that what is done by then is among them
        mine = [path for path in self._mine() if path not in replaced]
        keep = {*mine[-self.config.keep :], *(path for path in mine if _step(path) in in_use)}
        if self.config.keep_best:
            measured = measured_steps(self.evaluations, self.config.best_by)
            keep.update(best({path: _step(path) for path in mine}, measured, self.config.keep_best))
        for path in (*replaced, *(path for path in mine if path not in keep)):
            if path.name == self.newest:  # the one that `latest` names
                continue
            try:
                _remove(path)
            except OSError as error:  # the new checkpoint is safe, and no reason to end the run
                self.report.warn(f"could not delete the old checkpoint {path}: {error.strerror or error}")

    def close(self) -> None:
        """What was measured last decides what stays."""
        if self.newest:
            self._retain()

    def summary(self) -> Mapping[str, Any]:
        """Checkpoints written, failed and skipped, and the time it took on the sink's own thread."""
        return {
            "checkpoints_written": self.count,
            "newest": self.newest,
            "write_secs": round(self.write_secs, 3),
            "writes_failed": self.failures,
            "skipped_while_busy": len(self.skipped),
        }


def _run_of(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _step(folder: Path) -> int:
    return int(folder.name.split("-")[1])


def _remove(folder: Path) -> None:
    """Delete a checkpoint; one that is half deleted does not look like one."""
    doomed = folder.with_name(f".removing-{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.writing")
    temporary.write_text(text, encoding="utf-8")
    _sync(temporary)
    temporary.replace(path)


@hookimpl
def flowdflash_register(registry: Any) -> None:
    """Adds the sink ``checkpoint``."""
    registry.register(CheckpointSink)


@hookimpl
def flowdflash_check(graph: Any) -> list[Problem]:
    """``keep_best`` needs an evaluator that measures, on the way, checkpoints that are saved."""
    problems = []
    for node in graph.of_kind("sink"):
        if node.cls is CheckpointSink and (node.config.keep_best or node.config.best_by):
            message, hint = best_problem(graph, node)
            if message:
                option = "keep_best" if node.config.keep_best else "best_by"
                problems.append(Problem(message, path=f"stages.{node.name}.{option}", hint=hint))
    return problems
