from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flowdflash.target.load import LoadedTarget, load_target

from .models import TOY_REF


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def toy(cache: Path) -> LoadedTarget:
    return load_target(TOY_REF, cache, dtype="float32", device="cpu")
