from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowdflash.stage import OpenContext, SilentReport
from flowdflash.stages.chat_jsonl import ChatJsonl

from .fixtures import T_PLAIN, make_tokenizer, write_rows


@pytest.fixture
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture
def open_source(tmp_path: Path) -> Callable[..., ChatJsonl]:
    """Open a source over rows (or a file) with a template; the same cache for all calls of a test."""

    def opened(
        rows: list[Any] | Path,
        template: str | None = T_PLAIN,
        *,
        run: str = "run",
        type: Any = ChatJsonl,
        **options: Any,
    ) -> Any:
        path = rows if isinstance(rows, Path) else write_rows(tmp_path / "rows.jsonl", rows)
        model = tmp_path / "model"
        tokenizer = make_tokenizer(template)
        for stale in model.glob("chat_template*"):
            stale.unlink()
        tokenizer.save_pretrained(model)
        (model / "config.json").write_text('{"model_type": "qwen3"}')
        place = {} if "dataset" in options else {"path": path}
        source = type(type.Config(**{**place, "tokenizer": str(model), **options}))
        report = SilentReport()
        source.report = report  # type: ignore[attr-defined]
        source.open(OpenContext("corpus", tmp_path / run, tmp_path / "cache", report=report))
        return source

    return opened
