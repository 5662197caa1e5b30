from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowdflash.errors import ModelInvalid
from flowdflash.target.load import load_tokenizer
from flowdflash.target.mask_token import resolve_mask_token


class Tokenizer:
    def __init__(self, size: int, **ids: Any) -> None:
        self.size = size
        for name in ("pad", "eos", "bos", "mask"):
            setattr(self, f"{name}_token_id", ids.get(name))

    def __len__(self) -> int:
        return self.size


def test_89_unset_follows_the_stated_order(cache: Path) -> None:
    byte = load_tokenizer("toy:{}", cache)
    assert resolve_mask_token(None, byte, 272) == 260
    assert resolve_mask_token(None, Tokenizer(261, pad=256, eos=256), 272) == 261
    assert resolve_mask_token(None, Tokenizer(49152, pad=2, eos=2), 49152, ref="SmolLM2-135M-Instruct") == 16
    assert resolve_mask_token(270, byte, 272, ref="SmolLM2-135M-Instruct") == 270


def test_89_the_fallback_is_never_pad_end_or_begin() -> None:
    assert resolve_mask_token(None, Tokenizer(261, pad=256, eos=259, bos=258, mask=256), 272) == 261
    with pytest.raises(ModelInvalid, match="none is spare"):
        resolve_mask_token(None, Tokenizer(272, pad=256, eos=259, mask=259), 272)


@pytest.mark.parametrize(
    ("token", "message"), [(300, "272 rows"), (-1, "272 rows"), (256, "pad"), (259, "eos"), (258, "bos")]
)
def test_89_an_explicit_id_that_means_something_else_is_refused(token: int, message: str) -> None:
    with pytest.raises(ModelInvalid, match=message):
        resolve_mask_token(token, Tokenizer(261, pad=256, eos=[259, 257], bos=258), 272)


def test_89_a_row_outside_the_tokenizer_is_allowed() -> None:
    assert resolve_mask_token(271, Tokenizer(261, pad=256), 272) == 271


def test_89_fewer_rows_than_the_tokenizer_needs_an_explicit_id() -> None:
    with pytest.raises(ModelInvalid, match="mask_token_id"):
        resolve_mask_token(None, Tokenizer(300, mask=280), 272)
    assert resolve_mask_token(5, None, 272) == 5
