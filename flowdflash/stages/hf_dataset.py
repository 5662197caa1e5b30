"""Source ``hf_dataset``: conversations of a data set of the ``datasets`` library, as tokens with a loss mask."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from flowdflash.data.arrow import arrow_rows, check_columns, optional
from flowdflash.data.chat_source import ChatOptions, ChatSource
from flowdflash.data.rows import CHUNK_ROWS, Progress, Row, RowInput
from flowdflash.errors import DataInvalid
from flowdflash.stage import Check, ModelRef, Source


class HfDataset(ChatSource, Source):
    """Reads conversations from a Hugging Face data set and renders them with the chat template of the target.

    Rows are read, rejected, counted and kept as those of ``chat_jsonl``. A null inside a row counts as absent, since
    the library cannot tell the two apart.
    """

    type = "hf_dataset"

    class Config(ChatOptions):
        """Options of the source of Hugging Face data sets."""

        dataset: ModelRef = Field(
            description="id on the Hugging Face hub, or a folder (./name) that save_to_disk has written"
        )
        subset: str = Field("", description="configuration of a data set on the hub; empty for its only one")
        dataset_split: str = Field(
            "train", min_length=1, description="which split of the data set; on the hub also a slice, train[:1000]"
        )
        revision: str = Field("", description="commit, tag or branch of a data set on the hub; empty for the newest")

    config: Config

    def check(self, check: Check) -> Mapping[str, Any]:
        """A folder is there and takes no option of the hub; the options fit each other."""
        config = self.config
        if Path(config.dataset).is_absolute():
            if not Path(config.dataset).is_dir():
                check.refuse(
                    "dataset", f"there is no folder {config.dataset}", "name one that save_to_disk has written"
                )
            for option in ("subset", "revision"):
                if getattr(config, option):
                    check.refuse(option, "a folder that save_to_disk has written has none", "remove it")
        return super().check(check)

    def _rows(self) -> RowInput:
        config = self.config
        name = f"{config.dataset}[{config.dataset_split}]"
        data = self._loaded(name)
        check_columns(data.column_names, name)
        files = tuple(Path(file["filename"]) for file in data.cache_files)
        if not files and len(data):
            raise DataInvalid(f"{name}: lies in memory only; unset HF_DATASETS_IN_MEMORY_MAX_SIZE")
        return RowInput(name, files, partial(_read, data), "rows", ("arrow", config.dataset_split, str(len(data))))

    def _loaded(self, name: str) -> Any:
        config = self.config
        library = optional("datasets", "hf", name)
        try:
            if not Path(config.dataset).is_absolute():
                return library.load_dataset(
                    config.dataset,
                    config.subset or None,
                    split=config.dataset_split,
                    revision=config.revision or None,
                    keep_in_memory=False,
                )
            data = library.load_from_disk(config.dataset, keep_in_memory=False)
        except Exception as error:  # of network, hub, files or a builder, each with classes of its own
            raise DataInvalid(
                f"{name}: cannot be loaded: {' '.join(f'{type(error).__name__}: {error}'.split())}"
            ) from error
        splits = data if isinstance(data, dict) else {str(data.split or "train"): data}
        if config.dataset_split not in splits:
            raise DataInvalid(f"{name}: no such split; the folder holds {', '.join(splits)} (set dataset_split)")
        return splits[config.dataset_split]


def _read(data: Any, *, limit: int = 0, progress: Progress | None = None) -> Iterator[Row]:
    return arrow_rows(data.with_format("arrow").iter(CHUNK_ROWS), len(data), limit=limit, progress=progress)
