"""What the features of a target depend on, as plain values that can be compared and shown. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FORMAT = 1
"""Version of the layout of kept features; raised when old files can no longer be read."""

_CHUNK_BYTES = 65536
_CHUNKS = 16


def fingerprint(
    folder: Path, ref: str, layers: Sequence[int], hidden_size: int, dtype: str, *, last_hidden: bool = False
) -> dict[str, Any]:
    """Everything that changes the features of a sample, or how they are laid out."""
    return {
        "format": FORMAT,
        "model": ref,
        "config": _file_hash(folder / "config.json"),
        "weights": weights_hash(folder),
        "tokenizer": _file_hash(folder / "tokenizer.json"),
        "layers": list(layers),
        "layer_id_convention": "layer_output",
        "hidden_size": hidden_size,
        "dtype": dtype,
        "attention": "sdpa",
        # Absent where they are not kept: what was kept before they could be is still good.
        **({"last_hidden": True} if last_hidden else {}),
    }


def fingerprint_id(facts: Mapping[str, Any]) -> str:
    """A short name for a fingerprint."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def differences(kept: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """One readable line per entry that differs."""
    return [
        f"{name}: kept {kept.get(name, 'absent')}, this run {wanted.get(name, 'absent')}"
        for name in sorted({*kept, *wanted})
        if kept.get(name) != wanted.get(name)
    ]


def weights_hash(folder: Path) -> str:
    """A hash over names, sizes and evenly spaced pieces of the weight files: milliseconds, whatever the size.

    Reading pieces tells a fine-tuned model from its base, which have equal headers; a time stamp would not survive a
    copy of the folder.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for piece in range(_CHUNKS):
                file.seek(piece * max(0, size - _CHUNK_BYTES) // (_CHUNKS - 1))
                digest.update(file.read(_CHUNK_BYTES))
    return digest.hexdigest()[:16]


def _file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else "absent"
