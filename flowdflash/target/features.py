"""Features kept on disk after the first pass, so that later passes read instead of compute.

A folder holds ``manifest.json`` (what the features depend on), safetensors shards and the target's head probe. A
shard holds many samples end to end: ``features [T, K, D]`` (K + 1 with the last states), ``input_ids [T]`` int32,
``offsets [n + 1]`` int64 and ``keys [n, 32]``, the sha256 of each sample's ids. So neither the order of samples nor the
batches they came in matter. A shard appears by a rename once it is whole; whatever is not whole is not looked at.
Several replicas, or several runs, may share a folder: each writes shards under names of its own and picks up what the
others have finished.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flowdflash.errors import ModelInvalid
from flowdflash.items import HeadProbe, TokenBatch
from flowdflash.stage import Report, SilentReport
from flowdflash.target.fingerprint import differences

SHARD_BYTES = 64 << 20
SPARE_DISK_BYTES = 1 << 30
"""Left free on the disk for checkpoints and logs."""

_STALE_SECS = 3600.0


class FeatureCache:
    """Kept features of one target, one list of layers and one dtype. One object per replica; the folder is shared.

    Attributes:
        full: why nothing more is kept; empty while samples are.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: Mapping[str, Any],
        *,
        max_bytes: int = 0,
        shard_bytes: int = SHARD_BYTES,
        report: Report | None = None,
    ) -> None:
        """Open a folder, or begin one.

        Args:
            folder: where the features are.
            fingerprint: what they must depend on.
            max_bytes: most bytes in the folder, 0 for no limit.
            shard_bytes: a shard is written when so much is pending.
            report: told when a shard is damaged or nothing more is kept.

        Raises:
            ModelInvalid: the folder holds features of something else.
        """
        self.folder, self.full = folder, ""
        self._fingerprint = dict(fingerprint)
        self._max_bytes, self._shard_bytes = max_bytes, shard_bytes
        self._report = report or SilentReport()
        self._width = int(fingerprint["hidden_size"])
        # The states after the final norm are kept like those of one more layer.
        self._taps = len(fingerprint["layers"]) + bool(fingerprint.get("last_hidden"))
        self._dtype: torch.dtype = getattr(torch, fingerprint["dtype"])
        self._shards: dict[str, Tensor] = {}
        self._where: dict[bytes, tuple[str, int, int]] = {}
        self._pending: dict[bytes, tuple[np.ndarray[Any, Any], Tensor]] = {}
        self._pending_bytes = 0
        self._scanned_at = -1
        self._claim()
        self._scan()

    def __len__(self) -> int:
        """Samples that can be read."""
        return len(self._where.keys() | self._pending.keys())

    @property
    def kept_bytes(self) -> int:
        """Bytes of all shards in the folder."""
        return sum(path.stat().st_size for path in self.folder.glob("shard-*.safetensors"))

    def read(self, batch: TokenBatch) -> Tensor | None:
        """``[b, S, K * D]`` features on the host, zero on padding; None unless every sample of the batch is kept."""
        places = batch.info.places
        keys = [sample_key(sample_ids(batch, place)) for place in places]
        if any(self._missing(key) for key in keys):
            self._scan()
            if any(self._missing(key) for key in keys):
                return None
        b, S = batch.input_ids.shape
        out = torch.zeros(b, S, self._taps * self._width, dtype=self._dtype)
        for place, key in zip(places, keys, strict=True):
            out[place] = self._sample(key).flatten(1)
        return out

    def add(self, batch: TokenBatch, features: Tensor) -> None:
        """Keep the samples of a batch that are not kept yet."""
        if self.full:
            return
        for place in batch.info.places:
            ids = sample_ids(batch, place)
            key = sample_key(ids)
            if self._missing(key):
                kept = features[place].to("cpu", copy=True).view(len(ids), self._taps, self._width)
                self._pending[key] = (ids, kept)
                self._pending_bytes += _nbytes(kept) + ids.nbytes
        if self._pending_bytes >= self._shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as one shard, as much of it as may be kept."""
        if not self._pending or self.full:
            return
        fitting = self._fitting()
        if fitting:
            name = f"shard-{uuid.uuid4().hex[:16]}.safetensors"
            try:
                _write(self.folder / name, self._shard(fitting))
            except (OSError, SafetensorError) as error:
                self._stop(f"writing failed: {error}")
                return
            self._take_in(name)
        self._pending.clear()
        self._pending_bytes = 0

    def close(self) -> None:
        """Write the rest and let go of the files."""
        self.flush()
        self._pending.clear()
        self._where.clear()
        self._shards.clear()

    def read_probe(self) -> HeadProbe | None:
        """The kept head probe of the target, if there is one."""
        path = self.folder / "probe.safetensors"
        try:
            with safe_open(str(path), framework="pt") as file:
                return HeadProbe(file.get_tensor("hidden"), file.get_tensor("logits"))
        except (OSError, SafetensorError):
            return None

    def keep_probe(self, probe: HeadProbe) -> None:
        """Keep a head probe, so that a run that reads every sample needs no target."""
        path = self.folder / "probe.safetensors"
        if not path.exists():
            _write(path, {"hidden": probe.hidden.cpu().contiguous(), "logits": probe.logits.cpu().contiguous()})

    def _missing(self, key: bytes) -> bool:
        return key not in self._where and key not in self._pending

    def _sample(self, key: bytes) -> Tensor:
        if key in self._pending:
            return self._pending[key][1]
        name, start, end = self._where[key]
        return self._shards[name][start:end]

    def _claim(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        manifest = self.folder / "manifest.json"
        with FileLock(self.folder / ".lock"):
            if not manifest.exists():
                fresh = manifest.with_suffix(".tmp")
                fresh.write_text(json.dumps(self._fingerprint, indent=2, sort_keys=True) + "\n", encoding="utf-8")
                fresh.replace(manifest)
            for left in self.folder.glob(".shard-*.tmp"):
                if time.time() - left.stat().st_mtime > _STALE_SECS:
                    left.unlink(missing_ok=True)
        try:
            kept = json.loads(manifest.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelInvalid(
                f"{manifest} cannot be read: {error} (delete the folder, or name another keep_dir)"
            ) from error
        wrong = differences(kept, self._fingerprint)
        if wrong:
            raise ModelInvalid(
                f"{self.folder} keeps features of something else (name another keep_dir, or delete it):\n  "
                + "\n  ".join(wrong)
            )

    def _scan(self) -> None:
        changed_at = self.folder.stat().st_mtime_ns
        if changed_at == self._scanned_at:
            return
        self._scanned_at = changed_at
        for path in sorted(self.folder.glob("shard-*.safetensors")):
            if path.name not in self._shards:
                self._take_in(path.name)

    def _take_in(self, name: str) -> None:
        try:
            with safe_open(str(self.folder / name), framework="pt") as file:
                # safetensors maps the file; pages are read when a sample is.
                features, offsets = file.get_tensor("features"), file.get_tensor("offsets").tolist()
                keys = file.get_tensor("keys").numpy()
        except (OSError, SafetensorError) as error:
            self._report.warn(f"kept features {self.folder / name} are damaged and not used: {error}")
            features, offsets, keys = torch.empty(0), [0], np.zeros((0, 32), np.uint8)
        self._shards[name] = features
        for place, key in enumerate(keys):
            self._where.setdefault(key.tobytes(), (name, offsets[place], offsets[place + 1]))

    def _fitting(self) -> list[bytes]:
        room = shutil.disk_usage(self.folder).free - SPARE_DISK_BYTES
        reason = f"less than {SPARE_DISK_BYTES / 1e9:.1f} GB free on the disk of {self.folder}"
        if self._max_bytes and self._max_bytes - self.kept_bytes < room:
            room = self._max_bytes - self.kept_bytes
            reason = f"max_bytes ({self._max_bytes}) reached"
        fitting: list[bytes] = []
        # Header and index of a shard: a page, and 40 bytes per sample.
        room -= 4096
        for key, (ids, kept) in self._pending.items():
            room -= _nbytes(kept) + ids.nbytes + 40
            if room < 0:
                self._stop(reason)
                break
            fitting.append(key)
        return fitting

    def _shard(self, keys: list[bytes]) -> dict[str, Tensor]:
        samples = [self._pending[key] for key in keys]
        offsets = np.concatenate([[0], np.cumsum([len(ids) for ids, _ in samples])]).astype(np.int64)
        return {
            "features": torch.cat([kept for _, kept in samples]),
            "input_ids": torch.from_numpy(np.concatenate([ids for ids, _ in samples])),
            "offsets": torch.from_numpy(offsets),
            "keys": torch.from_numpy(np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32).copy()),
        }

    def _stop(self, reason: str) -> None:
        self.full = reason
        self._report.warn(f"no more features are kept: {reason}; what is not kept is computed again in each epoch")


def sample_ids(batch: TokenBatch, place: tuple[int, slice]) -> np.ndarray[Any, Any]:
    """Ids of the sample at a place of a batch, int32."""
    return batch.input_ids[place].astype("<i4")


def sample_key(ids: np.ndarray[Any, Any]) -> bytes:
    """Key of a sample: the sha256 of its ids."""
    return hashlib.sha256(ids.tobytes()).digest()


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    fresh = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        save_file(dict(tensors), str(fresh))
        with fresh.open("rb") as file:
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
