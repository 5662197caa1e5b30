"""How far a run has been logged, kept beside it, so that a resumed run neither repeats a step nor loses a count."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Progress:
    """The last optimizer step that was logged, and the batches dispatched per bucket up to it."""

    step: int = 0
    dispatched: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Progress:
        """As ``write`` left it; nothing logged, where there is no such file."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls()
        return cls(int(raw["step"]), {int(bucket): int(count) for bucket, count in raw["dispatched"].items()})

    def write(self, path: Path) -> None:
        """Keep it; a reader sees the old or the new."""
        draft = path.with_name(f".{path.name}.part")
        draft.write_text(json.dumps({"step": self.step, "dispatched": dict(self.dispatched)}), encoding="utf-8")
        draft.replace(path)
