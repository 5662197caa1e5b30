from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from flowdflash.data.align import AlignedText, Specials, tokenise
from flowdflash.data.rendering import Rendering, Turn

from .fixtures import make_tokenizer

MERGES = (("a", "b"), ("Ġ", "a"), ("Ġ", "b"), ("ab", "a"))


def tokenizer_like(kind: str) -> Any:
    """Tokenizers that treat the start of a text, white space or added tokens in ways of their own."""
    tokenizer = make_tokenizer(merges=MERGES)
    backend = tokenizer.backend_tokenizer
    if kind == "prefix space":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif kind == "words":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    elif kind == "normaliser":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("b"), normalizers.Lowercase()])
    elif kind == "greedy tokens":
        backend.add_special_tokens([AddedToken("<|im_end|>b", special=True, normalized=False)])
        backend.add_tokens([AddedToken("<x>", lstrip=True, normalized=False), AddedToken("a<|pad|>", normalized=False)])
        backend.add_tokens([AddedToken("ba", single_word=True, normalized=False), AddedToken("<y>", rstrip=True)])
    return tokenizer


KINDS = ("plain", "prefix space", "words", "normaliser", "greedy tokens")
PARTS = ("<|im_start|>", "<|im_end|>", "<|pad|>", "<x>", "<y>", "a", "b", "ab", " ", "\n", "é", "B")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=14).map("".join), st.data())
def test_pieces_give_the_tokens_of_the_whole_text(kind: str, text: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_like(kind)
    backend = tokenizer.backend_tokenizer
    place = data.draw(st.integers(0, len(text)))
    aligned = AlignedText(Rendering(text, (), marks=((0, place),)), Specials.of(tokenizer, backend))
    tokenise(backend, [aligned])
    whole = backend.encode(text, add_special_tokens=False)
    assert aligned.ids.tolist() == whole.ids
    assert aligned._ended_at(place) == sum(end <= place for _, end in whole.offsets)
    assert aligned._started_before(place) == sum(start < place for start, _ in whole.offsets)


def test_a_piece_that_comes_often_is_tokenised_once() -> None:
    tokenizer = make_tokenizer()
    asked: list[str] = []

    class Counting:
        def encode_batch(self, texts: list[str], **options: Any) -> Any:
            asked.extend(texts)
            return tokenizer.backend_tokenizer.encode_batch(texts, **options)

        encode_batch_fast = encode_batch

    system = "<|im_start|>system\nbe brief<|im_end|>\n"
    texts = [f"{system}<|im_start|>user\n{n}<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n" for n in range(20)]
    specials = Specials.of(tokenizer, tokenizer.backend_tokenizer)
    aligned = []
    for text in texts:
        start, end = text.index("yes"), text.rindex("\n")
        aligned.append(AlignedText(Rendering(text, (Turn(start, start, end, True),)), specials))
    tokenise(Counting(), aligned)
    assert len(asked) == len(set(asked)) == 20 + len({"system", "end", "answer", "prompt"})
    for text in aligned:
        assert tokenizer.decode(text.ids[text.mask()]) == "yes<|im_end|>"
        assert np.count_nonzero(text.mask()) == 4
