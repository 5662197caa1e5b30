"""Where each token of a rendered conversation stands in its text, and the loss mask that follows.

A whole text is tokenised once. An answer starts at the token where tokenising its prompt alone ends, and those tokens
must be the first of the whole text, since serving tokenises the prompt alone. It ends with its end-of-turn token, the
first special token that the template writes after it; what follows that token is not supervised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowdflash.data.chat import Conversation
from flowdflash.data.rejects import Rejected
from flowdflash.data.template import Rendering, Turn, special_names
from flowdflash.errors import DataInvalid

Ids = NDArray[np.int32]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Specials:
    """Special tokens of a tokenizer.

    Attributes:
        names: their texts.
        cutting: ``[vocabulary]`` bool by id, special tokens at which a text falls into pieces tokenised on their own.
        normalise: what the tokenizer does to text before it looks for special tokens that are matched after it.
    """

    names: frozenset[str]
    cutting: Mask
    normalise: Callable[[str], str] | None

    @classmethod
    def of(cls, tokenizer: Any, backend: Any) -> Specials:
        """Those of a transformers tokenizer and the tokenizer behind it."""
        names = special_names(tokenizer)
        special = {n: token for n, token in backend.get_added_tokens_decoder().items() if token.content in names}
        cutting = np.zeros(max(backend.get_vocab_size(with_added_tokens=True), max(special, default=0) + 1), np.bool_)
        cutting[[n for n, token in special.items() if not (token.normalized or token.single_word)]] = True
        late = backend.normalizer is not None and any(token.normalized for token in special.values())
        return cls(names, cutting, backend.normalizer.normalize_str if late else None)

    def found_in(self, conversation: Conversation) -> str:
        """The name of a special token that stands in the text of a conversation, or nothing."""
        for text in conversation.texts():
            for form in {text, self.normalise(text)} if self.normalise else (text,):
                for name in self.names:
                    if name in form:
                        return name
        return ""


class AlignedText:
    """A rendering with its tokens and where each stands in the text."""

    def __init__(self, rendering: Rendering, encoding: Any, specials: Specials) -> None:
        self.rendering, self._specials = rendering, specials
        self.ids: Ids = np.asarray(encoding.ids, dtype=np.int32)
        spans = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        self.starts, self.ends = spans[:, 0], spans[:, 1]

    def _cut_before(self, turn: Turn) -> int:
        """The last token before an answer at which the text falls into pieces; 0 if there is none."""
        cuts = np.flatnonzero(self._specials.cutting[self.ids] & (self.ends <= turn.prompt_end))
        return int(cuts[-1]) if len(cuts) else 0

    def tail(self, turn: Turn) -> str:
        """The end of a prompt, from the token that ``_cut_before`` names."""
        cut = self._cut_before(turn)
        return self.rendering.text[int(self.starts[cut]) if cut else 0 : turn.prompt_end]

    def mask(self, tails: Sequence[list[int]]) -> Mask:
        """The loss mask; ``tails`` are the tokens of the ``tail`` of each turn.

        Raises:
            Rejected: the tokens of a prompt are not the first tokens of the text.
        """
        mask = np.zeros(len(self.ids), np.bool_)
        for turn, tail in zip(self.rendering.turns, tails, strict=True):
            cut = self._cut_before(turn)
            first = cut + len(tail)
            if not np.array_equal(self.ids[cut:first], tail):
                text = self.rendering.text
                raise Rejected(
                    "token boundary",
                    f"a token reaches from the prompt into the answer at {text[max(0, turn.prompt_end - 20) :][:40]!r}",
                    self.rendering.turn,
                )
            if turn.start > turn.prompt_end:
                first += int(np.searchsorted(self.starts[first:], turn.start, side="left"))
            mask[first : self._after(turn)] = True
        return mask

    def _after(self, turn: Turn) -> int:
        """One past the last supervised token of a turn."""
        if turn.closed:  # an end-of-turn token may take white space behind it along
            return int(np.searchsorted(self.starts, turn.end, side="left"))
        return int(np.searchsorted(self.ends, turn.end, side="right"))

    def _text_of(self, token: int) -> str:
        return self.rendering.text[int(self.starts[token]) : int(self.ends[token])]

    def compare_marks(self, mask: Mask, where: str) -> None:
        """Check the mask against the generation marks of the template.

        Raises:
            DataInvalid: they differ.
        """
        marked = np.zeros(len(mask), np.bool_)
        for start, end in self.rendering.marks or ():
            marked |= (self.ends > start) & (self.starts < end)
        if self.rendering.turn >= 0:  # earlier turns of this text have samples of their own
            marked &= self.ends > self.rendering.turns[0].prompt_end
        wrong = np.flatnonzero(marked != mask)
        if len(wrong):
            token = int(wrong[0])
            here, there = ("inside", "not supervised") if marked[token] else ("outside", "supervised")
            raise DataInvalid(
                f"{where}: token {token} ({self._text_of(token)!r}) is {here} the generation marks of the template, "
                f"but by its generation prompt and end-of-turn token it is {there}; correct the template, or set "
                "generation_marks: ignore to go by the generation prompt alone"
            )
