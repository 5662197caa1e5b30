"""Source ``chat_jsonl``: conversations of a JSONL file, as tokens with a loss mask."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pydantic import Field

from flowdflash.data.chat_source import ChatOptions, ChatSource
from flowdflash.data.rows import RowInput, read_jsonl
from flowdflash.data.stored import check_file
from flowdflash.stage import Check, PipelinePath, Source


class ChatJsonl(ChatSource, Source):
    """Reads conversations from JSONL and renders them with the chat template of the target.

    Tokens are prepared once and kept in the cache; a change of the file, the tokenizer, the template or an option
    prepares them anew. Rows that cannot be used are counted by reason and listed in ``<stage>/rejects.jsonl`` of the
    run.
    """

    type = "chat_jsonl"

    class Config(ChatOptions):
        """Options of the source of chat rows."""

        path: PipelinePath = Field(
            description="JSONL file, plain, gzip or zstd; `messages` or `conversations` in each row, or to generate "
            "answers a `prompt`"
        )

    config: Config

    def check(self, check: Check) -> Mapping[str, Any]:
        """The file is there, and the options fit each other."""
        return {**check_file(check, self.config.path, "JSONL"), **super().check(check)}

    def _rows(self) -> RowInput:
        path = self.config.path
        return RowInput(str(path), (path,), partial(read_jsonl, path))
