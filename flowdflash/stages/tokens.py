"""Source ``tokens``: token ids and loss masks that somebody has made already."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from pydantic import Field

from flowdflash.data.encode import RowResult, Sample
from flowdflash.data.limit import within_limit
from flowdflash.data.rejects import Rejected
from flowdflash.data.rows import Row, RowInput, read_jsonl
from flowdflash.data.stored import StoredOptions, StoredSource, check_file
from flowdflash.stage import Check, ModelRef, OpenContext, PipelinePath, Source
from flowdflash.target.catalogue import ref_problem


class Tokens(StoredSource, Source):
    """Reads ready-made token ids with their loss mask from JSONL: ``{"input_ids": [...], "loss_mask": [...]}``.

    Rows that cannot be used are counted by reason and listed in ``<stage>/rejects.jsonl`` of the run.
    """

    type = "tokens"

    class Config(StoredOptions):
        """Options of the source of ready-made tokens."""

        path: PipelinePath = Field(
            description="JSONL file, plain, gzip or zstd; `input_ids` and as many 0 and 1 in `loss_mask` in each row"
        )
        tokenizer: ModelRef = Field(
            "", description="the target whose tokenizer made the ids, which are held against it; empty if not known"
        )

    config: Config

    def check(self, check: Check) -> Mapping[str, Any]:
        """The file is there, and the target is one that can be named."""
        config = self.config
        files = check_file(check, config.path, "JSONL")
        message, hint = ref_problem(config.tokenizer) if config.tokenizer else ("", "")
        if message:
            check.refuse("tokenizer", message, hint)
        facts = {**files, "max_length": config.max_length, "epochs": config.epochs, "task": "train"}
        return {**facts, "tokenizer": config.tokenizer} if config.tokenizer else facts

    def _rows(self) -> RowInput:
        path = self.config.path
        return RowInput(str(path), (path,), partial(read_jsonl, path))

    def _encoder(self, ctx: OpenContext) -> _Encoder:
        from flowdflash.target.load import load_tokenizer

        ref = self.config.tokenizer
        return _Encoder(self.config, len(load_tokenizer(ref, ctx.cache_dir, ctx.report)) if ref else 1 << 31)

    def _mask_hint(self) -> str:
        return "loss_mask: 1 where the target wrote the token, 0 elsewhere"


class _Encoder:
    """Checks rows of ids and masks. ``vocabulary`` is one more than the highest id that may occur."""

    def __init__(self, config: Tokens.Config, vocabulary: int) -> None:
        self._config, self._vocabulary = config, vocabulary

    @property
    def fingerprint(self) -> str:
        """Hash over what decides the samples besides the rows."""
        parts = ["tokens", self._vocabulary, self._config.max_length, self._config.over_long]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def encode(self, rows: Sequence[Row], where: Callable[[Row], str]) -> list[RowResult]:
        """What becomes of each row, in order."""
        results = []
        for row in rows:
            try:
                results.append(RowResult((self._sample(row),)))
            except Rejected as rejected:
                results.append(RowResult(rejections=(rejected.rejection,)))
        return results

    def _sample(self, row: Row) -> Sample:
        if row.problem:
            raise Rejected(row.problem, row.detail)
        if not isinstance(row.value, Mapping):
            raise Rejected("row is not an object")
        ids, flags = _numbers(row.value, "input_ids", (int,)), _numbers(row.value, "loss_mask", (int, bool))
        if len(ids) != len(flags):
            raise Rejected("`input_ids` and `loss_mask` differ in length", f"{len(ids)} and {len(flags)}")
        if not ids:
            raise Rejected("no tokens")
        if not set(flags) <= {0, 1}:
            raise Rejected("`loss_mask` holds more than 0 and 1")
        wrong = next((number for number in ids if not 0 <= number < self._vocabulary), None)
        if wrong is not None:
            raise Rejected("token id outside the vocabulary", f"{wrong}, of {self._vocabulary}")
        limits = self._config.max_length, self._config.over_long
        kept, mask, truncated = within_limit(np.array(ids, np.int32), np.array(flags, np.bool_), *limits)
        return Sample(kept, mask, truncated=truncated)


def _numbers(row: Mapping[str, Any], name: str, types: tuple[type, ...]) -> list[int]:
    if name not in row:
        raise Rejected(f"no `{name}`")
    numbers = row[name]
    if not isinstance(numbers, list) or not all(type(number) in types for number in numbers):
        raise Rejected(f"`{name}` is not a list of whole numbers")
    return numbers
