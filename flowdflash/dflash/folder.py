"""A draft on disk, in any format: a folder of ``config.json`` and ``model.safetensors``.

Servers ignore unknown tensors and do not report missing ones, so names, shapes and values are compared here, before
anything is written and whenever something is read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowdflash.dflash.config import DraftConfig, tensor_shapes
from flowdflash.errors import ModelInvalid

ExportDtype = Literal["bfloat16", "float16", "float32"]
DTYPES: dict[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CONFIG, WEIGHTS = "config.json", "model.safetensors"
PROVENANCE = "flowdflash"
"""Key of a config that says where the draft comes from; what has it was written here."""


def check_tensors(config: DraftConfig, tensors: Mapping[str, Tensor], what: str) -> None:
    """Refuse tensors whose names or shapes are not exactly those of a draft of this shape."""
    wanted = tensor_shapes(config)
    problems = [f"{name} is missing" for name in wanted if name not in tensors]
    problems += [f"{name} does not belong to a draft" for name in tensors if name not in wanted]
    problems += [
        f"{name} has shape {list(tensors[name].shape)} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    problems += [f"{n} holds values that are not finite" for n in wanted if n in tensors and not _finite(tensors[n])]
    if problems:
        shown = "; ".join(problems[:6]) + (f"; and {len(problems) - 6} more" if len(problems) > 6 else "")
        raise ModelInvalid(f"{what}: {shown}")


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def check_target(config: DraftConfig, facts: Mapping[str, Any]) -> None:
    """Refuse a draft of another target than the one with these facts; those that are not known are passed over.

    Raises:
        ModelInvalid: its vocabulary, width or depth is another.
    """
    same = (("vocab_size", "vocab_size"), ("hidden_size", "hidden_size"), ("num_target_layers", "num_layers"))
    wrong = [
        f"{name} {getattr(config, name)} is not the target's {facts[fact]}"
        for name, fact in same
        if facts.get(fact, getattr(config, name)) != getattr(config, name)
    ]
    if wrong:
        raise ModelInvalid(
            f"export: {'; '.join(wrong)} (padding rows of the embedding count); a server that shares the target's "
            "embedding, head and states would reject every draft"
        )


def write_folder(
    folder: str | Path,
    written: Mapping[str, Any],
    config: DraftConfig,
    tensors: Mapping[str, Tensor],
    *,
    dtype: ExportDtype,
    target_facts: Mapping[str, Any] | None = None,
) -> Path:
    """Check a draft, write it beside ``folder`` and rename it into place; an earlier export of ours is replaced.

    Args:
        folder: made if absent.
        written: the ``config.json``.
        config: shape of the draft.
        tensors: exactly the draft's own tensors; nothing of the target.
        dtype: of the file.
        target_facts: vocabulary, width and depth of the target, where known.

    Returns:
        The folder.

    Raises:
        ModelInvalid: something is wrong with the draft, or the folder is not ours; nothing is written then.
    """
    check_target(config, target_facts or {})
    eos = config.eos_token_id if isinstance(config.eos_token_id, tuple) else (config.eos_token_id,)
    if config.mask_token_id in (config.bos_token_id, config.pad_token_id, *eos):
        raise ModelInvalid(
            f"export: mask_token_id {config.mask_token_id} is also the target's bos, eos or pad token: servers treat "
            "those specially; train with a row of its own"
        )
    check_tensors(config, tensors, "export")
    # Copies: tensors that share memory cannot be saved, and the live model may be training on.
    stored = {name: t.detach().to("cpu", DTYPES[dtype], copy=True).contiguous() for name, t in tensors.items()}
    check_tensors(config, stored, f"export in {dtype}")
    out = Path(folder).resolve()
    replaces = _is_ours(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary, old = (out.with_name(f".{out.name}.{state}-{os.getpid()}") for state in ("writing", "replaced"))
    try:
        temporary.mkdir(exist_ok=True)
        save_file(stored, temporary / WEIGHTS, metadata={"format": "pt"})
        (temporary / CONFIG).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        # safetensors writes for the owner alone; a server may be another user.
        (temporary / WEIGHTS).chmod((temporary / CONFIG).stat().st_mode)
        if replaces:
            out.rename(old)
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
    return out


def _is_ours(out: Path) -> bool:
    """The folder holds an export of ours, and nothing else. False if there is nothing.

    Raises:
        ModelInvalid: it holds something else, or is part of a checkpoint, whose files are vouched for.
    """
    if not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir())):
        return False
    ours = out.is_dir() and {path.name for path in out.iterdir()} == {CONFIG, WEIGHTS}
    if not ours or PROVENANCE not in read_json(out / CONFIG) or (out.parent / "checkpoint.json").is_file():
        raise ModelInvalid(f"{out} is there already and is not an export of flowdflash alone; name another folder")
    return True


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file.

    Raises:
        ModelInvalid: there is none.
    """
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ModelInvalid(f"{path} cannot be read: {error}") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Raises:
        ModelInvalid: it cannot be read.
    """
    try:
        return dict(load_file(path))
    except Exception as error:
        raise ModelInvalid(f"{path} cannot be read: {error}") from error
