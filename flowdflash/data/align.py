"""Where each token of a rendered conversation stands in its text, and the loss mask that follows.

A text falls into pieces at special tokens, and a tokenizer never looks across one; so pieces are tokenised apart, and
one that comes often, such as a system prompt, only once. An answer starts at the token where tokenising its prompt
alone ends, and those tokens must be the first of the whole text, since serving tokenises the prompt alone. It ends
with its end-of-turn token, the first special token that the template writes after it; what follows that token is not
supervised.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowdflash.data.chat import Conversation
from flowdflash.data.rejects import Rejected
from flowdflash.data.rendering import Rendering, Turn, special_names
from flowdflash.errors import DataInvalid

Ids = NDArray[np.int32]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Specials:
    """Special tokens of a tokenizer, and where its added tokens cut a text.

    Attributes:
        names: texts of the special tokens.
        firsts: the characters that they begin with.
        special: ``[vocabulary]`` bool by id, the special tokens.
        added: finds the tokens that the tokenizer looks for before anything else, as it does: the longest at a place.
        cutting: texts of those whose place is where their text begins, whatever stands before it.
        normalise: what the tokenizer does to text before it looks for special tokens that are found only then.
    """

    names: frozenset[str]
    firsts: frozenset[str]
    special: Mask
    added: re.Pattern[str]
    cutting: frozenset[str]
    normalise: Callable[[str], str] | None

    @classmethod
    def of(cls, tokenizer: Any, backend: Any) -> Specials:
        """Those of a transformers tokenizer and the tokenizer behind it."""
        names = special_names(tokenizer)
        tokens = backend.get_added_tokens_decoder()
        ids = [n for n, token in tokens.items() if token.content in names]
        special = np.zeros(max(backend.get_vocab_size(with_added_tokens=True), max(tokens, default=0) + 1), np.bool_)
        special[ids] = True
        added = [token for token in tokens.values() if not token.normalized]
        texts = sorted((token.content for token in added), key=len, reverse=True)
        # Merges make no special token of bytes; another model takes what is in its vocabulary, special or not.
        late = any(tokens[n].normalized for n in ids) or type(backend.model).__name__ != "BPE"
        return cls(
            names,
            frozenset(name[:1] for name in names),
            special,
            re.compile("|".join(map(re.escape, texts)) or r"(?!)"),
            frozenset(token.content for token in added if not (token.single_word or token.lstrip)),
            backend.normalizer.normalize_str if late and backend.normalizer else None,
        )

    def found_in(self, conversation: Conversation) -> str:
        """The name of a special token that stands in the text of a conversation, or nothing."""
        texts = conversation.texts()
        if self.normalise:
            texts += [self.normalise(text) for text in texts]
        everything = "\0".join(texts)
        if not any(first in everything for first in self.firsts):
            return ""
        return next((name for name in self.names if name in everything), "")

    def cuts(self, text: str) -> list[int]:
        """Where pieces of a text begin, and its end."""
        found = (match.start() for match in self.added.finditer(text) if match.group() in self.cutting)
        return [0, *(place for place in found if place), len(text)]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Tokens of a piece.

    Attributes:
        ids: ``[n]`` int32.
        starts, ends: ``[n]`` characters from the start of the piece; empty where nobody needs them.
    """

    ids: Ids
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


def tokenise(backend: Any, texts: Sequence[AlignedText]) -> None:
    """Give each text its tokens; each different piece is tokenised once."""
    located = dict.fromkeys(piece for text in texts for piece in text.located())
    others = dict.fromkeys(piece for text in texts for piece in text.needed() if piece not in located)
    nowhere = np.zeros(0, np.int64)
    pieces: dict[str, Piece] = {}
    for piece, encoding in zip(others, backend.encode_batch_fast(list(others), add_special_tokens=False), strict=True):
        pieces[piece] = Piece(np.array(encoding.ids, np.int32), nowhere, nowhere)
    for piece, encoding in zip(located, backend.encode_batch(list(located), add_special_tokens=False), strict=True):
        spans = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        pieces[piece] = Piece(np.array(encoding.ids, np.int32), spans[:, 0], spans[:, 1])
    for text in texts:
        text.take(pieces)


class AlignedText:
    """A rendering, cut into pieces; once it has their tokens, ids and a loss mask."""

    def __init__(self, rendering: Rendering, specials: Specials) -> None:
        self.rendering = rendering
        self._cuts = specials.cuts(rendering.text)
        self._texts = [rendering.text[start:end] for start, end in pairwise(self._cuts)]
        self._prompt_texts = [self._prompt(turn) for turn in rendering.turns]
        self._pieces: list[Piece] = []
        self._prompts: list[Ids] = []
        self._firsts: list[int] = []
        self.ids: Ids = np.zeros(0, np.int32)

    def _piece_at(self, place: int) -> int:
        return bisect_right(self._cuts, place) - 1

    def _prompt(self, turn: Turn) -> str:
        """The end of the prompt of an answer, from the start of the piece that it ends in."""
        return self.rendering.text[self._cuts[self._piece_at(turn.prompt_end)] : turn.prompt_end]

    def needed(self) -> Iterator[str]:
        """What must be tokenised: every piece, and the ends of the prompts."""
        return chain(self._texts, self._prompt_texts)

    def located(self) -> Iterator[str]:
        """The pieces inside which something starts or ends, so that the places of their tokens are needed."""
        turns = self.rendering.turns
        places = [turn.end for turn in turns] + [turn.start for turn in turns if turn.start > turn.prompt_end]
        places += [place for span in self.rendering.marks or () for place in span]
        for place in places:
            piece = self._piece_at(place)
            if self._cuts[piece] < place:
                yield self._texts[piece]

    def take(self, pieces: Mapping[str, Piece]) -> None:
        """Take the tokens of what was needed."""
        self._pieces = [pieces[text] for text in self._texts]
        self._prompts = [pieces[text].ids for text in self._prompt_texts]
        self._firsts = [0, *accumulate(len(piece.ids) for piece in self._pieces)]
        self.ids = np.concatenate([piece.ids for piece in self._pieces])

    def _started_before(self, place: int) -> int:
        """How many tokens start before a place in the text."""
        piece = self._piece_at(place)
        inside = place - self._cuts[piece]
        return self._firsts[piece] + (int(np.searchsorted(self._pieces[piece].starts, inside)) if inside else 0)

    def _ended_at(self, place: int) -> int:
        """How many tokens end before a place in the text, or at it."""
        piece = self._piece_at(place)
        inside = place - self._cuts[piece]
        return self._firsts[piece] + (int(np.searchsorted(self._pieces[piece].ends, inside, "right")) if inside else 0)

    def _first_of(self, turn: Turn, prompt: Ids) -> int:
        """The first token of an answer, where the tokens of its prompt end."""
        piece = self._piece_at(turn.prompt_end)
        if self._pieces[piece].ids[: len(prompt)].tobytes() != prompt.tobytes():
            text = self.rendering.text
            raise Rejected(
                "token boundary",
                f"a token reaches from the prompt into the answer at {text[max(0, turn.prompt_end - 20) :][:40]!r}",
                self.rendering.turn,
            )
        return self._firsts[piece] + len(prompt)

    def mask(self, unlearnt: Collection[int] = ()) -> Mask:
        """The loss mask; ``unlearnt`` turns, by their place in the rendering, are left out of it.

        Raises:
            Rejected: the tokens of a prompt are not the first tokens of the text.
        """
        mask = np.zeros(len(self.ids), np.bool_)
        for number, (turn, prompt) in enumerate(zip(self.rendering.turns, self._prompts, strict=True)):
            if number not in unlearnt:
                mask[self._tokens_of(turn, prompt)] = True
        return mask

    def _tokens_of(self, turn: Turn, prompt: Ids) -> slice:
        first = self._first_of(turn, prompt)
        if turn.start > turn.prompt_end:
            first = max(first, self._started_before(turn.start))
        # An end-of-turn token may take white space behind it along.
        return slice(first, (self._started_before if turn.closed else self._ended_at)(turn.end))

    def compare_marks(self, mask: Mask, where: str) -> None:
        """Check the mask against the generation marks of the template.

        Raises:
            DataInvalid: they differ.
        """
        marked = np.zeros(len(mask), np.bool_)
        turns = {(t.start, t.end): (t, prompt) for t, prompt in zip(self.rendering.turns, self._prompts, strict=True)}
        for start, end in self.rendering.marks or ():
            # A token may take white space along that stands on the other side of a mark.
            same = turns.get((start, end))
            marked[self._tokens_of(*same) if same else slice(self._ended_at(start), self._started_before(end))] = True
        if self.rendering.turn >= 0:  # earlier turns of this text have samples of their own
            marked[: self._first_of(self.rendering.turns[0], self._prompts[0])] = False
        wrong = np.flatnonzero(marked != mask)
        if len(wrong):
            token = int(wrong[0])
            here, there = ("inside", "not supervised") if marked[token] else ("outside", "supervised")
            raise DataInvalid(
                f"{where}: token {token} ({self._text_of(token)!r}) is {here} the generation marks of the template, "
                f"but by its generation prompt and end-of-turn token it is {there}; correct the template, or set "
                "generation_marks: ignore to go by the generation prompt alone"
            )

    def _text_of(self, token: int) -> str:
        """The text of a token, or of its piece where its place in that is not known."""
        number = bisect_right(self._firsts, token) - 1
        piece, text, inside = self._pieces[number], self._texts[number], token - self._firsts[number]
        return text[int(piece.starts[inside]) : int(piece.ends[inside])] if len(piece.starts) else text[:40]
