"""Rows to samples: conversation, rendering, tokens and loss mask, in chunks.

Markup in the text of a row (the name of a special token) rejects the row: a tokenizer would make a special token of it.
A row whose ``finish_reason`` is ``length`` ends in an answer that was cut off when it was generated: its sample ends
with the last token of that answer, since no end-of-turn token was the target's own.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from flowdflash.data.align import AlignedText, Ids, Mask, Specials, tokenise
from flowdflash.data.chat import CONVERSATION_KEYS, OPTIONS_KEY, Conversation, read_conversation
from flowdflash.data.learnt import is_cut_off, unlearnt
from flowdflash.data.limit import within_limit
from flowdflash.data.rejects import TOO_LONG, Rejected, Rejection
from flowdflash.data.rendering import Rendering
from flowdflash.data.rows import TOO_DEEP, Row
from flowdflash.data.split import Split
from flowdflash.data.template import ChatTemplate
from flowdflash.data.turn_order import check_turns, questions
from flowdflash.errors import ModelInvalid


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    """How rows become samples; part of the key of a token store.

    Attributes:
        task: ``train`` gives conversations with a loss mask, ``generate`` prompts with the mask all False.
        max_length: most tokens per sample.
        over_long: cut a longer sample at the end, or leave it out. A prompt is never cut.
        prompt_until: a prompt holds everything before the first or before the last answer of its row, or everything
            up to its end. ``every_answer``: its tokens are those before the first answer, its note holds all questions.
        surrogates: half surrogate pairs reject the row, or become U+FFFD.
        template_options: switches of the chat template.
        generation_marks: compare the mask with the template's generation marks, or take no notice of them.
    """

    task: Literal["train", "generate"] = "train"
    max_length: int = 2048
    over_long: Literal["truncate", "drop"] = "truncate"
    prompt_until: Literal["first_answer", "last_answer", "every_answer", "end"] = "first_answer"
    surrogates: Literal["reject", "replace"] = "reject"
    template_options: dict[str, Any] = field(default_factory=dict)
    generation_marks: Literal["check", "ignore"] = "check"


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Tokens and loss mask of one sample.

    Attributes:
        ids: ``[n]`` int32.
        mask: ``[n]`` bool, True where a token carries a loss.
        turn: the assistant turn that it stands for, from 0; -1 for all of its row.
        truncated: it was cut to the limit.
        open_turns: supervised turns that no special token closes.
        note: JSON text kept beside the tokens; for a prompt, its row, cut to it.
    """

    ids: Ids
    mask: Mask
    turn: int = -1
    truncated: bool = False
    open_turns: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class RowResult:
    """What became of one row: samples, rejections, or neither if it is of the other part of a split."""

    samples: tuple[Sample, ...] = ()
    rejections: tuple[Rejection, ...] = ()


@dataclass(frozen=True, slots=True)
class _Draft:
    """A text that waits for its tokens: number of its row within the chunk, what it was rendered from, and which of its
    turns are not to be learnt."""

    row: int
    rendering: Rendering
    note: str = ""
    cut_off: bool = False
    unlearnt: frozenset[int] = frozenset()


class ChatEncoder:
    """Turns chunks of rows into samples.

    Works on a copy of the tokenizer, so no other user of the tokenizer can change its settings or borrow it meanwhile.
    Several threads may use one encoder; inside, the tokenizer uses all cores. A pickled copy gives the same samples.

    Raises:
        ModelInvalid: the tokenizer is not a fast one, or has no usable chat template.
    """

    def __init__(self, tokenizer: Any, options: EncodeOptions, split: Split | None = None) -> None:
        self._options, self._split = options, split or Split()
        self._template = ChatTemplate(tokenizer, options.template_options, marks=options.generation_marks == "check")
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ModelInvalid(
                f"{getattr(tokenizer, 'name_or_path', '') or 'the tokenizer'} is not a fast tokenizer, so tokens "
                "cannot be traced back to text; convert it to tokenizer.json"
            )
        self._backend_json: str = tokenizer.backend_tokenizer.to_str()
        self._set_up()
        self._specials = Specials.of(tokenizer, self._backend)

    def _set_up(self) -> None:
        from tokenizers import Tokenizer  # type: ignore[import-untyped]

        # Two threads that both render take the interpreter from each other, which costs a quarter of their time, and
        # then both wait for the tokenizer.
        self._interpreter = threading.Lock()
        self._backend = Tokenizer.from_str(self._backend_json)
        self._backend.no_padding()
        self._backend.no_truncation()
        self._backend.encode_special_tokens = False
        self._backend.post_processor = None  # without special tokens to add it could only trim white space off offsets

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_interpreter", "_backend")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._set_up()

    @property
    def fingerprint(self) -> str:
        """Hash over tokenizer, chat template, options and split: equal hashes give equal samples from equal rows."""
        parts = [
            self._backend_json,
            self._template.fingerprint,
            json.dumps([asdict(self._options), self._split.fingerprint]),
        ]
        parts.append(json.dumps(sorted(self._specials.names)))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def encode(
        self, rows: Sequence[Row], where: Callable[[Row], str] = lambda row: f"line {row.line}"
    ) -> list[RowResult]:
        """What becomes of each row, in order. ``where`` names a row for an error.

        Raises:
            DataInvalid: the template's generation marks contradict its generation prompt.
        """
        rejections: list[list[Rejection]] = [[] for _ in rows]
        with self._interpreter:
            drafts = self._rendered(rows, rejections)
            texts = [AlignedText(draft.rendering, self._specials) for draft in drafts]
        tokenise(self._backend, texts)
        samples: list[list[Sample]] = [[] for _ in rows]
        with self._interpreter:
            for draft, text in zip(drafts, texts, strict=True):
                try:
                    samples[draft.row].append(self._sample(draft, text, where(rows[draft.row])))
                except Rejected as rejected:
                    rejections[draft.row].append(rejected.rejection)
        return [RowResult(tuple(kept), tuple(left)) for kept, left in zip(samples, rejections, strict=True)]

    def _rendered(self, rows: Sequence[Row], rejections: list[list[Rejection]]) -> list[_Draft]:
        drafts: list[_Draft] = []
        for number, row in enumerate(rows):
            try:
                drafts += self._drafts(number, row, rejections[number])
            except Rejected as rejected:
                rejections[number].append(rejected.rejection)
            except RecursionError:
                rejections[number].append(Rejection(TOO_DEEP))
        return drafts

    def _drafts(self, number: int, row: Row, rejections: list[Rejection]) -> list[_Draft]:
        if row.problem:
            raise Rejected(row.problem, row.detail)
        conversation = read_conversation(row.value)
        if not self._split.wants(conversation):
            return []
        if conversation.surrogates and self._options.surrogates == "reject":
            raise Rejected("half a surrogate pair", "set surrogates: replace to put U+FFFD in its place")
        training, until = self._options.task == "train", self._options.prompt_until
        if until == "every_answer":
            conversation = replace(conversation, messages=questions(conversation))
        else:
            check_turns(conversation, answered=training)
        if found := self._specials.found_in(conversation):
            raise Rejected("markup in content", found)
        if training:
            return self._answers(number, row.value, conversation, rejections)
        messages = conversation.messages
        if conversation.answers and until != "end":
            messages = messages[: conversation.answers[0 if until == "first_answer" else -1]]
        opening = messages
        if until == "every_answer":
            opening = messages[: [message["role"] for message in messages].index("user") + 1]
        others = {key: value for key, value in row.value.items() if key not in CONVERSATION_KEYS}
        given = {"messages": messages, "tools": conversation.tools, OPTIONS_KEY: conversation.options}
        read = {key: value for key, value in given.items() if value}
        note = json.dumps({**others, **read}, default=str)  # in ASCII: other keys may hold half surrogate pairs
        return [_Draft(number, Rendering(self._template.prompt(replace(conversation, messages=opening)), ()), note)]

    def _answers(
        self, number: int, row: Mapping[str, Any], conversation: Conversation, rejections: list[Rejection]
    ) -> list[_Draft]:
        skipped, cut_off = unlearnt(row), is_cut_off(row)
        renderings, left = self._template.render(conversation, cut_off=cut_off)
        if not (skipped or cut_off or left):
            return [_Draft(number, rendering) for rendering in renderings]
        last = len(conversation.answers) - 1
        rejections += [rejection for rejection in left if rejection.turn not in skipped]
        return [
            _Draft(
                number,
                rendering,
                cut_off=cut_off and last not in skipped and rendering.turn in (-1, last),
                unlearnt=skipped if rendering.turn < 0 else frozenset(),
            )
            for rendering in renderings
            if rendering.turn not in skipped
        ]

    def _sample(self, draft: _Draft, text: AlignedText, where: str) -> Sample:
        limit, turn = self._options.max_length, draft.rendering.turn
        if self._options.task == "generate":
            if len(text.ids) > limit:
                raise Rejected(TOO_LONG, f"{len(text.ids)} tokens")
            if not len(text.ids):
                raise Rejected("prompt without a token")
            return Sample(text.ids, np.zeros(len(text.ids), np.bool_), note=draft.note)
        mask = text.mask(draft.unlearnt)
        if draft.rendering.marks is not None:
            text.compare_marks(text.mask() if draft.unlearnt else mask, where)
        ids = text.ids
        if draft.cut_off:
            ids, mask = self._without_ending(ids, mask)
        ids, mask, truncated = within_limit(ids, mask, limit, self._options.over_long, turn)
        return Sample(ids, mask, turn, truncated, sum(not turn.closed for turn in draft.rendering.turns))

    def _without_ending(self, ids: Ids, mask: Mask) -> tuple[Ids, Mask]:
        """An answer that was cut off at a token limit: the template closes it, but the target did not (pitfall D7)."""
        written = mask & ~self._specials.special[ids]
        end = int(np.flatnonzero(written)[-1]) + 1 if written.any() else 0
        return ids[:end], mask[:end]
