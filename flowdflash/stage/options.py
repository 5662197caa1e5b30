"""What a person writes in the options of a stage: paths, model references, sizes, and the base of every ``Config``."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema


def path_from(folder: Path, written: str | Path) -> Path:
    """A path that is written in a file of ``folder``, absolute.

    Raises:
        ValueError: it starts with the home of nobody, or goes through a link to itself.
    """
    try:
        return (folder / Path(written).expanduser()).resolve()
    except (RuntimeError, OSError) as error:
        reason = "there is no such user" if "home" in str(error) else str(error)
        raise ValueError(f"input should be a path: {reason}") from error


def _against_base(path: Path, info: ValidationInfo) -> Path:
    base = (info.context or {}).get("base")
    return path.expanduser() if path.is_absolute() or base is None else path_from(Path(base), path)


PipelinePath = Annotated[Path, AfterValidator(_against_base)]
"""A path in a pipeline file: relative to the folder of the file that it is written in."""


def _model_ref(text: str, info: ValidationInfo) -> str:
    if text.startswith((".", "~", "/")):
        return str(_against_base(Path(text), info))
    return text


ModelRef = Annotated[str, AfterValidator(_model_ref)]
"""A model: a local folder (starts with ``.``, ``/`` or ``~``), one that flowdflash can fetch, or a Hugging Face id."""


_UNITS = {"": 1, "b": 1} | {
    f"{p}{i}b": (1024 if i else 1000) ** (n + 1) for n, p in enumerate("kmgt") for i in ("", "i")
}


def _bytes(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]{0,3})\s*", value, re.ASCII)
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError("input should be a size such as 512MB, 1.5 GiB or a number of bytes")
    return round(Fraction(found[1]) * _UNITS[found[2].lower()])


_BYTES_SCHEMA = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}], "examples": ["512MB", "4GiB"]}

Bytes = Annotated[int, BeforeValidator(_bytes), Field(ge=0), WithJsonSchema(_BYTES_SCHEMA)]
"""A number of bytes, written as ``4GiB`` (1024s), ``512MB`` (1000s), ``1.5 GiB`` or a plain number."""


class StageConfig(BaseModel):
    """Base of every ``Config``: frozen, unknown keys refused, NaN and infinity refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, protected_namespaces=()
    )
