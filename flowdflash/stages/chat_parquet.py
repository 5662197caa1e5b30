"""Source ``chat_parquet``: conversations of a Parquet file, as tokens with a loss mask."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pydantic import Field

from flowdflash.data.arrow import read_parquet
from flowdflash.data.chat_source import ChatOptions, ChatSource
from flowdflash.data.rows import RowInput
from flowdflash.data.stored import check_file
from flowdflash.stage import Check, PipelinePath, Source


class ChatParquet(ChatSource, Source):
    """Reads conversations from Parquet and renders them with the chat template of the target.

    Rows are read, rejected, counted and kept as those of ``chat_jsonl``. A null inside a row counts as absent, since
    Parquet cannot tell the two apart.
    """

    type = "chat_parquet"

    class Config(ChatOptions):
        """Options of the source of chat rows in Parquet."""

        path: PipelinePath = Field(
            description="Parquet file with a column `messages` or `conversations`, or to generate answers `prompt`"
        )

    config: Config

    def check(self, check: Check) -> Mapping[str, Any]:
        """The file is there, and the options fit each other."""
        return {**check_file(check, self.config.path, "Parquet"), **super().check(check)}

    def _rows(self) -> RowInput:
        path = self.config.path
        return RowInput(str(path), (path,), partial(read_parquet, path), "rows", ("parquet",))
