"""The folder of a run: locked while it runs; says what ran, where it came from and how it ended."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import filelock

from flowdflash.errors import FlowdflashError
from flowdflash.secrets import hidden

LOCK_NAME = ".lock"
PACKAGES = ("flowdflash", "torch", "transformers", "numpy", "safetensors")


class RunDirUnusable(FlowdflashError):
    """The folder of a run cannot be used: says which and why."""


class RunDir:
    """A run's folder.

    Attributes:
        path: where it is.
        name: name of the pipeline.
        known_names: names that the folder has or had; its checkpoints say one of them.
    """

    def __init__(self, path: Path, name: str, lock: filelock.BaseFileLock) -> None:
        self.path, self.name, self._lock = path, name, lock
        self.known_names = {path.name}

    @classmethod
    def create(cls, base: Path | None, name: str) -> RunDir:
        """Make and lock the folder: ``base`` itself, or ``runs/<name>-<time>`` under the current folder.

        Raises:
            RunDirUnusable: it is in use, has something in it, or cannot be made.
        """
        try:
            path = base if base is not None else _fresh(Path("runs"), name)
            path.mkdir(parents=True, exist_ok=True)
            path = path.resolve()
        except OSError as error:
            raise RunDirUnusable(f"run folder {base or Path('runs').resolve()}: {error.strerror or error}") from error
        lock = _locked(path)
        found = sorted(entry.name for entry in path.iterdir() if entry.name != LOCK_NAME)
        if found:
            cls(path, name, lock).close()
            raise RunDirUnusable(f"run folder {path}: not empty, it has {found[0]!r} in it; name a new folder")
        return cls(path, name, lock)

    @classmethod
    def open_existing(cls, path: Path) -> RunDir:
        """Lock the folder of a run that is to go on.

        Raises:
            RunDirUnusable: it is in use, or is not the folder of a run.
        """
        path = path.resolve()
        for name in ("pipeline.yaml", "run.json"):
            if not (path / name).is_file():
                raise RunDirUnusable(
                    f"run folder {path}: there is no {name}, so no run can go on there; start a new one"
                )
        lock = _locked(path)
        try:
            run = cls(path, "", lock)
            record = run.provenance()
            run.name = str(record["name"])
            run.known_names.add(str(record.get("run", path.name)))
            text = (path / "pipeline.yaml").read_bytes()
            if hashlib.sha256(text).hexdigest() != record["pipeline_sha256"]:
                raise RunDirUnusable(
                    f"run folder {path}: pipeline.yaml has been changed since the run began; put it back, or start a "
                    "new run"
                )
        except BaseException:
            lock.release()
            raise
        return run

    def provenance(self) -> dict[str, Any]:
        """What ``write_provenance`` kept.

        Raises:
            RunDirUnusable: it cannot be read.
        """
        try:
            record = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
            return {**record, "name": record["name"], "pipeline_sha256": record["pipeline_sha256"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunDirUnusable(f"run folder {self.path}: run.json cannot be read: {error!r}") from error

    def note_resume(self, step: int, *, command: Sequence[str] = ()) -> list[str]:
        """Add to ``run.json`` that the run goes on; which versions of packages are not those that it began with."""
        record = self.provenance()
        now = {package: _version(package) for package in PACKAGES}
        entry = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "step": step,
            "command": list(command or sys.argv),
            "versions": now,
        }
        record["resumed"] = [*record.get("resumed", []), entry]
        write_atomically(self.path / "run.json", _json(record))
        (self.path / "outcome.json").unlink(missing_ok=True)
        before = record.get("versions", {})
        return [
            f"{package} {before[package]}, now {now[package]}"
            for package in now
            if before.get(package, now[package]) != now[package]
        ]

    def write_pipeline(self, text: str) -> None:
        """Keep the resolved pipeline as ``pipeline.yaml``."""
        write_atomically(self.path / "pipeline.yaml", text)

    def write_provenance(
        self, *, pipeline_text: str, seed: int, pipeline_folder: Path | None = None, command: Sequence[str] = ()
    ) -> None:
        """Keep as ``run.json`` what a reader needs in order to run the same again.

        Args:
            pipeline_text: the resolved pipeline.
            seed: its seed.
            pipeline_folder: where the paths in it start from; the current folder by default.
            command: the command line; that of this process by default.
        """
        record = {
            "name": self.name,
            "run": self.path.name,
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": list(command or sys.argv),
            "folder": str(Path.cwd()),
            "pipeline_folder": str((pipeline_folder or Path.cwd()).resolve()),
            "seed": seed,
            "pipeline_sha256": hashlib.sha256(pipeline_text.encode()).hexdigest(),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "cpu_count": os.cpu_count(),
            "versions": {package: _version(package) for package in PACKAGES},
        }
        write_atomically(self.path / "run.json", _json(record))

    def write_outcome(self, outcome: Mapping[str, Any]) -> None:
        """Keep as ``outcome.json`` how the run ended."""
        record = {"ended_at": datetime.now(UTC).isoformat(timespec="seconds"), **outcome}
        write_atomically(self.path / "outcome.json", _json(record))

    def close(self) -> None:
        """Unlock the folder. May be called twice."""
        if self._lock.is_locked:
            # Removed while still held, so that nobody else's lock is ever taken away.
            (self.path / LOCK_NAME).unlink(missing_ok=True)
            self._lock.release()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text, or the new, never a part."""
    draft = path.with_name(f".{path.name}.part")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _locked(path: Path) -> filelock.BaseFileLock:
    lock = filelock.FileLock(path / LOCK_NAME)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        raise RunDirUnusable(f"run folder {path}: another run is using it") from error
    except OSError as error:
        raise RunDirUnusable(f"run folder {path}: {error.strerror or error}") from error
    return lock


def _fresh(parent: Path, name: str) -> Path:
    """A new folder; two runs that start within one second get two."""
    stem = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name) or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _json(record: Mapping[str, Any]) -> str:
    return json.dumps(writable(record), indent=2, default=_plain, allow_nan=False) + "\n"


def writable(value: Any) -> Any:
    """The same with numbers that JSON does not know as text, and without secrets."""
    if isinstance(value, str):
        return hidden(value)
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): writable(entry) for key, entry in value.items()}
    return [writable(entry) for entry in value] if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)
