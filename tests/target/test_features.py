from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from flowdflash.errors import ModelInvalid
from flowdflash.items import HeadProbe, TokenBatch
from flowdflash.stage import SilentReport
from flowdflash.target import features as features_module
from flowdflash.target.features import FeatureCache

from .models import batch_of, random_rows

FACTS: dict[str, Any] = {"layers": [0, 2], "hidden_size": 4, "dtype": "bfloat16", "weights": "w", "format": 1}


def made(batch: TokenBatch, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Features that depend on the sample's own ids and positions alone, zero on padding."""
    ids = torch.from_numpy(batch.input_ids).float()
    position = torch.arange(ids.shape[1])[None, :, None] * 0.01
    features = ids[..., None] * torch.linspace(0.5, 2, 8) + position
    return features.masked_fill(~torch.from_numpy(batch.loss_mask)[..., None], 0).to(dtype)


def filled(folder: Path, rows: Sequence[Sequence[int]], **options: Any) -> FeatureCache:
    cache = FeatureCache(folder, FACTS, **options)
    batch = batch_of(rows)
    cache.add(batch, made(batch))
    return cache


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=9), min_size=1, max_size=12),
    st.integers(1, 4000),
    st.randoms(use_true_random=False),
)
def test_whatever_the_order_and_the_batches_the_same_features_come_back(
    rows: list[list[int]], shard: int, order: Any
) -> None:
    with tempfile.TemporaryDirectory() as name:
        writer = FeatureCache(Path(name), FACTS, shard_bytes=shard)
        for start in range(0, len(rows), 3):
            batch = batch_of(rows[start : start + 3])
            writer.add(batch, made(batch))
        shuffled = list(rows)
        order.shuffle(shuffled)
        writer.close()
        reader = FeatureCache(Path(name), FACTS)
        batch = batch_of(shuffled)
        assert len(reader) == len({tuple(row) for row in rows})
        read = reader.read(batch)
        assert read is not None
        assert torch.equal(read, made(batch))
        assert reader.read(batch_of([*shuffled, [1] * 10])) is None


def test_l5_a_shard_says_what_it_holds(tmp_path: Path) -> None:
    filled(tmp_path, [[1, 2, 3], [4]]).close()
    (path,) = tmp_path.glob("shard-*.safetensors")
    with safe_open(str(path), framework="pt") as file:
        assert file.get_tensor("features").shape == (4, 2, 4)
        assert file.get_tensor("features").dtype == torch.bfloat16
        assert file.get_tensor("input_ids").tolist() == [1, 2, 3, 4]
        assert file.get_tensor("offsets").tolist() == [0, 3, 4]
        assert file.get_tensor("keys").shape == (2, 32)


def test_float32_features_are_kept_as_they_are(tmp_path: Path) -> None:
    facts = {**FACTS, "dtype": "float32"}
    cache = FeatureCache(tmp_path, facts)
    batch = batch_of([[3, 1, 2], [9]])
    cache.add(batch, made(batch, torch.float32))
    cache.close()
    read = FeatureCache(tmp_path, facts).read(batch)
    assert read is not None
    assert torch.equal(read, made(batch, torch.float32))


def test_pending_samples_can_be_read_before_they_are_written(tmp_path: Path) -> None:
    cache = filled(tmp_path, [[1, 2], [3]])
    assert cache.read(batch_of([[3]])) is not None
    assert list(tmp_path.glob("shard-*")) == []
    assert len(cache) == 2


def test_a_sample_is_kept_once(tmp_path: Path) -> None:
    cache = filled(tmp_path, [[1, 2], [1, 2]])
    cache.flush()
    size = cache.kept_bytes
    batch = batch_of([[1, 2]])
    cache.add(batch, made(batch))
    cache.close()
    assert cache.kept_bytes == size
    assert len(FeatureCache(tmp_path, FACTS)) == 1


def test_i5_features_of_something_else_are_refused_with_the_difference(tmp_path: Path) -> None:
    filled(tmp_path, [[1]]).close()
    with pytest.raises(ModelInvalid) as caught:
        FeatureCache(tmp_path, {**FACTS, "layers": [0, 1], "weights": "other"})
    text = str(caught.value)
    assert "layers: kept [0, 2], this run [0, 1]" in text
    assert "weights: kept w, this run other" in text
    assert "hidden_size" not in text


def test_an_unreadable_manifest_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ModelInvalid, match="another keep_dir"):
        FeatureCache(tmp_path, FACTS)


def test_only_whole_shards_count(tmp_path: Path) -> None:
    filled(tmp_path, [[1, 2], [3]]).close()
    (whole,) = tmp_path.glob("shard-*.safetensors")
    content = whole.read_bytes()
    (tmp_path / "shard-cut.safetensors").write_bytes(content[: len(content) // 2])
    shutil.copy(whole, tmp_path / ".shard-other.safetensors-1.tmp")
    whole.unlink()
    report = SilentReport()
    cache = FeatureCache(tmp_path, FACTS, report=report)
    assert len(cache) == 0
    assert cache.read(batch_of([[3]])) is None
    assert any("shard-cut" in line and "damaged" in line for line in report.lines)


def test_a_write_that_fails_leaves_no_shard_and_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = SilentReport()
    cache = filled(tmp_path, [[1, 2]], report=report)

    def broken(tensors: Any, path: str) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("disk gone")

    monkeypatch.setattr(features_module, "save_file", broken)
    cache.flush()
    assert "disk gone" in cache.full
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "manifest.json"]
    assert any("computed again" in line for line in report.lines)


def test_no_more_than_max_bytes_are_kept(tmp_path: Path) -> None:
    report = SilentReport()
    cache = FeatureCache(tmp_path, FACTS, max_bytes=20_000, shard_bytes=4000, report=report)
    rows = random_rows([100] * 30)
    for row in rows:
        batch = batch_of([row])
        cache.add(batch, made(batch))
    cache.close()
    assert "max_bytes" in cache.full
    assert 0 < cache.kept_bytes <= 20_000
    assert len([line for line in report.lines if "no more features" in line]) == 1
    kept = FeatureCache(tmp_path, FACTS)
    assert 0 < len(kept) < 30
    assert kept.read(batch_of(rows[:1])) is not None
    assert kept.read(batch_of(rows[-1:])) is None


def test_the_disk_is_never_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features_module, "SPARE_DISK_BYTES", shutil.disk_usage(tmp_path).free * 2)
    cache = filled(tmp_path, [[1, 2]])
    cache.close()
    assert "free on the disk" in cache.full
    assert cache.kept_bytes == 0


def test_replicas_and_runs_share_a_folder(tmp_path: Path) -> None:
    one, other = FeatureCache(tmp_path, FACTS), FeatureCache(tmp_path, FACTS)
    mine, yours = batch_of([[1, 2]]), batch_of([[3, 4, 5]])
    one.add(mine, made(mine))
    other.add(yours, made(yours))
    one.flush()
    other.flush()
    # The clock of a file system ticks in milliseconds: say that the folder has changed.
    os.utime(tmp_path, (1, 1))
    assert one.read(yours) is not None
    assert other.read(mine) is not None
    assert len(list(tmp_path.glob("shard-*"))) == 2


def test_a_head_probe_is_kept_with_the_features(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path, FACTS)
    assert cache.read_probe() is None
    cache.keep_probe(HeadProbe(torch.ones(2, 4), torch.zeros(2, 9)))
    probe = FeatureCache(tmp_path, FACTS).read_probe()
    assert probe is not None
    assert (probe.hidden.shape, probe.logits.shape) == ((2, 4), (2, 9))


def test_reading_does_not_copy_shards_into_memory(tmp_path: Path) -> None:
    filled(tmp_path, [np.arange(200).tolist()]).close()
    cache = FeatureCache(tmp_path, FACTS)
    (path,) = tmp_path.glob("shard-*")
    mapped = Path("/proc/self/maps")
    if mapped.exists():
        assert path.name in mapped.read_text()
    assert cache.read(batch_of([np.arange(200).tolist()])) is not None
