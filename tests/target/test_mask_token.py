from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowdflash.errors import ModelInvalid
from flowdflash.target.catalogue import facts_of
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
    known = facts_of("SmolLM2-135M-Instruct")
    assert resolve_mask_token(None, Tokenizer(49152, pad=2, eos=2), 49152, facts=known) == 16
    assert resolve_mask_token(270, byte, 272, facts=known) == 270


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


@pytest.mark.parametrize("facts", [{"eos_token_id": [7, 8]}, {"eos_token_id": 7}, {"bos_token_id": 7}])
def test_89_what_the_config_of_the_target_says_counts_as_well(facts: dict[str, Any]) -> None:
    with pytest.raises(ModelInvalid, match="bos, eos or pad"):
        resolve_mask_token(7, None, 272, facts=facts)
    assert resolve_mask_token(None, Tokenizer(100, mask=7), 272, facts=facts) == 100


def test_89_a_row_outside_the_tokenizer_is_allowed() -> None:
    assert resolve_mask_token(271, Tokenizer(261, pad=256), 272) == 271


def test_89_fewer_rows_than_the_tokenizer_needs_an_explicit_id() -> None:
    with pytest.raises(ModelInvalid, match="mask_token_id"):
        resolve_mask_token(None, Tokenizer(300, mask=280), 272)
    assert resolve_mask_token(5, None, 272) == 5
