"""Checkpoints on disk, as a resume reads them: which there are, whether each is whole, and what is in one.

A checkpoint is a folder ``checkpoints/step-000300`` of a run, or ``step-000300-2`` if it is the second of that step::

    checkpoint.json     step, epoch, reason, run, ledger, and size and sha256 of every other file
    state.pt            {"tensors": ..., "state": ...}: loads with ``weights_only``
    records.jsonl       the last optimizer steps before it
    draft/config.json   of the exported draft
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowdflash.errors import ModelInvalid
from flowdflash.items import Checkpoint, StepRecord

FOLDER = "checkpoints"
MANIFEST = "checkpoint.json"
NEEDED = ("state.pt", "records.jsonl", "draft/config.json")
_NAME = re.compile(r"step-(\d{6,})(?:-(\d+))?")


@dataclass(frozen=True, slots=True)
class Saved:
    """A folder with the name of a checkpoint.

    Attributes:
        folder: where it is.
        step: as its name says.
        number: of the checkpoints of that step, from 1.
    """

    folder: Path
    step: int
    number: int


def saved_checkpoints(run_dir: Path) -> list[Saved]:
    """Everything that looks like a checkpoint by its name, the oldest first."""
    found = []
    folder = run_dir / FOLDER
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.append(Saved(path, int(match[1]), int(match[2] or 1)))
    return sorted(found, key=lambda saved: (saved.step, saved.number))


def run_of(saved: Saved) -> str | None:
    """The run that a checkpoint says it belongs to; None if that cannot be read."""
    try:
        return str(_manifest(saved.folder)["run"])
    except ModelInvalid:
        return None


def damage(saved: Saved) -> str:
    """What is wrong with a checkpoint; empty if every file is what it was when it was written."""
    try:
        manifest = _manifest(saved.folder)
    except ModelInvalid as error:
        return str(error)
    if manifest["step"] != saved.step:
        return f"{MANIFEST} is that of step {manifest['step']}"
    files = manifest["files"]
    for name in NEEDED:
        if name not in files:
            return f"{MANIFEST} does not list {name}"
    for name, expected in files.items():
        if wrong := _damage_of_file(saved.folder, name, expected):
            return wrong
    return ""


def load_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint with its tensors on the CPU. No code runs from the file.

    Raises:
        ModelInvalid: it cannot be read.
    """
    import torch

    manifest = _manifest(folder)
    try:
        held = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        lines = (folder / "records.jsonl").read_text(encoding="utf-8").splitlines()
        return Checkpoint(
            step=int(manifest["step"]),
            epoch=int(manifest["epoch"]),
            reason=manifest["reason"],
            draft_config=json.loads((folder / "draft" / "config.json").read_text(encoding="utf-8")),
            draft_tensors=held["tensors"],
            state=held["state"],
            ledger=manifest["ledger"],
            records=tuple(StepRecord.from_dict(json.loads(line)) for line in lines),
        )
    except Exception as error:
        raise ModelInvalid(f"checkpoint {folder} cannot be read: {type(error).__name__}: {error}") from error


def ledger_of(folder: Path) -> Mapping[str, Any]:
    """The ledger of a checkpoint.

    Raises:
        ModelInvalid: it cannot be read.
    """
    ledger: Mapping[str, Any] = _manifest(folder)["ledger"]
    return ledger


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelInvalid(f"{MANIFEST} cannot be read: {error}") from error
    kinds = {"step": int, "epoch": int, "reason": str, "run": str, "ledger": dict, "files": dict}
    for key, kind in kinds.items():
        if not isinstance(manifest, dict) or not isinstance(manifest.get(key), kind):
            raise ModelInvalid(f"{MANIFEST} has no {key}")
    return manifest


def _damage_of_file(folder: Path, name: str, expected: Any) -> str:
    path = folder / name
    try:
        if not path.resolve().is_relative_to(folder.resolve()):
            return f"{MANIFEST} lists {name!r}, which is outside the checkpoint"
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                return f"{name} is not what was written (its sha256 differs)"
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        return f"{name!r} cannot be checked: {error!r}"
    return ""
