"""Checkpoint sink: every checkpoint is an exported draft plus what a resume needs, written atomically in the background.

The runtime gives each sink a thread of its own, so nothing here runs on the training thread: the drafter pays for the
copy and for nothing else. On disk::

    checkpoints/
      step-000300/            renamed into place when complete
        draft/                config.json, model.safetensors: what inference engines read
        state.pt              optimizer, schedule, counters (loads with weights_only)
        checkpoint.json       step, reason, ledger, run, size and sha256 of every file
      latest                  name of the newest complete checkpoint, switched last
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from flowdflash.items import Checkpoint
from flowdflash.plugin import hookimpl
from flowdflash.stage import OpenContext, Sink, StageConfig

MANIFEST = "checkpoint.json"
_NAME = re.compile(r"step-(\d{6,})")


class CheckpointSink(Sink):
    """Writes checkpoints in the background, atomically, and keeps the newest few."""

    type = "checkpoint"
    reads = (Checkpoint,)

    class Config(StageConfig):
        """Options of the sink ``checkpoint``."""

        every_steps: int = Field(
            0, ge=0, description="A checkpoint every so many optimizer steps; 0 for none on the way."
        )
        at_start: bool = Field(False, description="Keep the untrained draft too.")
        at_end: bool = Field(True, description="A checkpoint when training ends.")
        keep: int = Field(3, ge=1, description="How many of this run's newest checkpoints stay on disk.")
        dtype: str = Field(
            "bfloat16", pattern="^(bfloat16|float32)$", description="Number format of the exported draft."
        )

    def open(self, ctx: OpenContext) -> None:
        """Make the folder; leftovers of interrupted writes are removed."""
        self.folder = ctx.run_dir / "checkpoints"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run, self.report = ctx.run_dir.name, ctx.report
        self.facts = ctx.facts
        self.written: list[str] = []
        self.write_secs = 0.0
        for leftover in self.folder.glob(".writing-step-*"):
            shutil.rmtree(leftover)

    def wants(self, step: int, reason: str) -> bool:
        """True for the steps that the options name, and whenever the run is interrupted."""
        if reason == "start":
            return bool(self.config.at_start)
        if reason == "every":
            return self.config.every_steps > 0 and step % self.config.every_steps == 0
        return reason == "interrupted" or bool(self.config.at_end)

    def write(self, item: Checkpoint) -> None:
        """Write one checkpoint under a temporary name, then rename it; ``latest`` is switched last.

        Raises:
            OSError: the disk is full or the folder cannot be written; what was there before stays valid.
        """
        began = time.monotonic()
        name = f"step-{item.step:06d}"
        temporary, final = self.folder / f".writing-{name}", self.folder / name
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            self._fill(temporary, item)
            if final.exists():  # the same step again, after an interruption: the new one replaces it
                shutil.rmtree(final)
            temporary.rename(final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _sync(self.folder)
        _replace_text(self.folder / "latest", name + "\n")
        self.written = [n for n in self.written if n != name] + [name]
        self._retain()
        self.write_secs += time.monotonic() - began

    def _fill(self, folder: Path, item: Checkpoint) -> None:
        import torch

        from flowdflash.dflash.export import config_from_zlab, export_zlab

        folder.mkdir(parents=True)
        config = config_from_zlab(item.draft_config)
        provenance = item.draft_config.get("flowdflash")
        export_zlab(folder / "draft", config, item.draft_tensors, dtype=self.config.dtype, provenance=provenance)
        torch.save({"tensors": dict(item.draft_tensors), "state": dict(item.state)}, folder / "state.pt")
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

    def _retain(self) -> None:
        """Delete this run's oldest checkpoints beyond ``keep``; anything else in the folder is left alone."""
        mine = []
        for path in self.folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and _run_of(path) == self.run:
                mine.append((int(match[1]), path))
        for _, path in sorted(mine)[: -self.config.keep]:
            shutil.rmtree(path)

    def summary(self) -> Mapping[str, Any]:
        """Checkpoints written, and the time it took on the sink's own thread."""
        return {
            "checkpoints_written": len(self.written),
            "newest": self.written[-1:],
            "write_secs": round(self.write_secs, 3),
        }


def _run_of(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["run"])
    except (OSError, ValueError, KeyError):
        return None


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
