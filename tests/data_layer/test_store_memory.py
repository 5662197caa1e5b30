from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from flowdflash.data import rows
from flowdflash.data.encode import ChatEncoder, EncodeOptions
from flowdflash.data.store import open_or_build

from .fixtures import make_tokenizer, say

PEAK = Path("/proc/self/clear_refs")
CHUNK_BYTES = 1 << 17


def peak_bytes(path: Path, encoder: ChatEncoder) -> int:
    """Most memory that this process holds while a store is built from a file."""
    PEAK.write_text("5")  # the peak starts anew
    store = open_or_build(path.parent, path.stem, partial(rows.read_jsonl, path), encoder)
    assert store.accounts.rows_kept == store.accounts.rows_read > 0
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


@pytest.mark.skipif(not PEAK.exists(), reason="only Linux forgets the peak of a process")
def test_memory_does_not_grow_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and tokens held to the end would take several times the size of the large file."""
    monkeypatch.setattr(rows, "CHUNK_BYTES", CHUNK_BYTES)
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)  # by words, which is fast
    encoder = ChatEncoder(tokenizer, EncodeOptions(max_length=1 << 20))
    line = json.dumps(say("long", "word " * 800)) + "\n"
    small, large = tmp_path / "small.jsonl", tmp_path / "large.jsonl"
    small.write_text(line * 400, "utf-8")
    large.write_text(line * 2000, "utf-8")
    assert large.stat().st_size > 50 * CHUNK_BYTES
    before = peak_bytes(small, encoder)
    assert peak_bytes(large, encoder) - before < large.stat().st_size
