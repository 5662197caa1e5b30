"""The keys of a pipeline file outside its stages, and sizes in bytes."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from flowdflash.config.spec import InputSpec, PipelineSpec
from flowdflash.stage import Bytes, StageConfig


class Sized(StageConfig):
    size: Bytes = 0


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4GiB", 4 << 30),
        ("4gib", 4 << 30),
        ("512MB", 512_000_000),
        ("1.5 GiB", 3 << 29),
        (" 2 KiB ", 2048),
        ("1TB", 10**12),
        ("100 b", 100),
    ],
)
def test_size_in_bytes_is_read_as_written(text: str, size: int) -> None:
    assert Sized.model_validate({"size": text}).size == size


@pytest.mark.parametrize("text", ["4G", "GiB", "-1", "4 GiB 2", "1e9", "", "٤GiB", "9" * 5000, "inf"])
def test_size_that_is_not_one_is_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        Sized.model_validate({"size": text})


def test_negative_number_of_bytes_is_refused() -> None:
    with pytest.raises(ValidationError):
        Sized.model_validate({"size": -1})


@pytest.mark.parametrize("name", ["", " x", "x ", "a/b", "a\\b", "..", "a\nb", "x" * 101])
def test_name_that_cannot_be_part_of_a_file_name_is_refused(name: str) -> None:
    for fields in ({"name": name, "stages": {"a": {}}}, {"name": "n", "stages": {name: {}}}):
        with pytest.raises(ValidationError):
            PipelineSpec.model_validate({"version": "1", **fields})


@pytest.mark.parametrize("name", ["a", "end", "x y", '"q"', "p-->q", "größe", "大"])
def test_odd_names_are_fine(name: str) -> None:
    assert list(PipelineSpec.model_validate({"version": "1", "stages": {name: {}}}).stages) == [name]


@pytest.mark.parametrize(
    "bad", [{"version": "2"}, {"seed": "-1"}, {"seed": str(2**63)}, {"ordering": "random"}, {"stages": {}}, {"x": "1"}]
)
def test_bad_top_level_values_are_refused(bad: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        PipelineSpec.model_validate({"version": "1", "stages": {"a": {}}, **bad})


def test_defaults_of_an_input() -> None:
    spec = InputSpec.model_validate({"from": "target"})
    assert (spec.from_, spec.capacity, spec.capacity_bytes) == ("target", 2, 0)


def test_every_key_is_described() -> None:
    for model in (PipelineSpec, InputSpec):
        assert all(info.description for info in model.model_fields.values())
