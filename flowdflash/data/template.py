"""A conversation rendered with the chat template of the target, and which of its text the target would have written.

The template itself says what is supervised. Rendering everything before an answer with the generation prompt gives the
text that serving hands to the target; rendering up to and with the answer gives the same text plus what the target
writes. What lies between is supervised. No role header is ever searched for in the text, so a user who types one
changes nothing.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from typing import Any

from flowdflash.data.chat import Conversation, Message
from flowdflash.data.rejects import Rejected
from flowdflash.errors import ModelInvalid

MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
RENDERING = threading.Lock()
"""transformers keeps one copy of a template per process, and in it the place where it follows generation marks."""
DATE = date(2025, 1, 1)
"""Today, for a template that writes the date: the same rows give the same tokens on any day."""
EMPTY_THINKING = re.compile(r"\s*<think>\s*</think>\s*")
CLOSED_THINKING = re.compile(r"\s*</think>\s*")
OPENED_THINKING = re.compile(r"\s*<think>(\s*</think>)?")
"""What a generation prompt may have written of an answer already."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One supervised assistant turn, in characters of its rendering.

    Attributes:
        prompt_end: where the generation prompt ends; the target writes from here.
        start: where supervision starts: later than ``prompt_end`` if the template puts in an empty think block, or ends
            one that its generation prompt has begun.
        end: where it ends: after the end-of-turn token.
        closed: a special token is the end-of-turn token; without one, ``end`` is the end of the answer.
    """

    prompt_end: int
    start: int
    end: int
    closed: bool


@dataclass(frozen=True, slots=True)
class Rendering:
    """The text of one sample.

    Attributes:
        text: rendered conversation.
        turns: supervised turns, in order.
        turn: the assistant turn that this sample stands for, from 0; -1 for all turns of the row.
        marks: spans in the template's generation marks; None where it has none.
    """

    text: str
    turns: tuple[Turn, ...]
    turn: int = -1
    marks: tuple[tuple[int, int], ...] | None = None


class ChatTemplate:
    """The chat template of a tokenizer, with fixed options.

    Args:
        tokenizer: a transformers tokenizer; only its template and special tokens are used.
        options: values for the template's own switches, such as ``enable_thinking``; a row's own come before them.
        marks: look at generation marks where the template has them.

    Attributes:
        fingerprint: everything here that changes a rendering, as text.

    Raises:
        ModelInvalid: the tokenizer has no chat template, or one that leaves the messages out.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None = None, *, marks: bool = True) -> None:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        self._jinja = render_jinja_template
        self._refusals = TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError
        tokens, options = tokenizer.special_tokens_map, dict(options or {})
        self._variables = {"strftime_now": DATE.strftime, **tokens, **options}
        decisive = [tokenizer.chat_template, options, marks, {name: str(token) for name, token in tokens.items()}]
        self.fingerprint = json.dumps(decisive, sort_keys=True)
        self._templates: dict[bool, tuple[str, bool]] = {}
        self._specials = special_names(tokenizer)
        self._suffix: str | None = None
        try:
            for with_tools in (False, True):
                template = tokenizer.get_chat_template(tools=[] if with_tools else None)
                self._templates[with_tools] = template, marks and MARKS.search(template) is not None
                _prepare(template)
        except ValueError as error:
            name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
            raise ModelInvalid(
                f"{name} has no chat template, so there is no telling what the target would be asked; "
                "use the tokenizer of an instruction-tuned model"
            ) from error
        self._probe()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for template, _ in self._templates.values():
            _prepare(template)

    def prompt(self, conversation: Conversation) -> str:
        """What serving hands to the target: the messages and the generation prompt.

        Raises:
            Rejected: the template refuses the messages.
        """
        return self._render(conversation, len(conversation.messages), prompt=True)[0]

    def render(self, conversation: Conversation) -> list[Rendering]:
        """One rendering with all answers supervised; one per answer where the template rewrites earlier turns.

        Raises:
            Rejected: the template refuses the conversation, does not start an answer with its generation prompt, or
                leaves out something that the target wrote.
        """
        messages = conversation.messages
        texts, marks, turns = [], [], []
        for number, place in enumerate(conversation.answers):
            prompt, _ = self._render(conversation, place, prompt=True)
            text, spans = self._render(conversation, place + 1)
            if not text.startswith(prompt):
                raise Rejected(
                    "generation prompt is no prefix of the answer",
                    f"it ends in {prompt[-40:]!r}, the template writes {text[max(0, len(prompt) - 40) :][:60]!r}",
                    number,
                )
            if missing := _left_out(text[len(prompt) :], messages[place]):
                raise Rejected("template leaves part of the answer out", f"its {missing}", number)
            start = len(prompt) + _template_thinking(prompt, text[len(prompt) :], messages[place])
            texts.append(text)
            marks.append(spans)
            turns.append(Turn(len(prompt), start, *self._turn_end(text, start)))
        full = texts[-1]
        if all(full.startswith(text) for text in texts):
            return [Rendering(full, tuple(turns), marks=marks[-1])]
        return [
            Rendering(text, (turn,), number, spans)
            for number, (text, turn, spans) in enumerate(zip(texts, turns, marks, strict=True))
        ]

    def _render(
        self, conversation: Conversation, end: int, *, prompt: bool = False
    ) -> tuple[str, tuple[tuple[int, int], ...] | None]:
        """The text of the first messages, and the spans in generation marks; None where no marks are looked at, and for
        a prompt."""
        template, marked = self._templates[bool(conversation.tools)]
        marked = marked and not prompt
        try:
            with RENDERING:
                (text,), spans = self._jinja(
                    conversations=[list(conversation.messages[:end])],
                    tools=list(conversation.tools) or None,
                    chat_template=template,
                    return_assistant_tokens_mask=marked,
                    add_generation_prompt=prompt,
                    **{**self._variables, **conversation.options},
                )
        except self._refusals as error:
            raise Rejected("template refuses the conversation", f"{type(error).__name__}: {error}") from error
        return text, tuple((int(start), int(end)) for start, end in spans[0]) if marked else None

    def _probe(self) -> None:
        ask, answer = "flowdflash-asks", "flowdflash-answers"
        messages = {"role": "user", "content": ask}, {"role": "assistant", "content": answer}
        try:
            text, _ = self._render(Conversation(messages), len(messages))
        except Rejected:
            return  # a template may demand more than this; then the rows decide
        if ask not in text and answer not in text:
            raise ModelInvalid(
                f"the chat template renders no message: it turns a question and an answer into {text[:80]!r}"
            )
        if answer in text:
            self._suffix = text.rpartition(answer)[2]

    def _turn_end(self, text: str, start: int) -> tuple[int, bool]:
        """Where an answer ends, and whether with a special token; ``text`` ends with its turn.

        What the template writes after an answer was seen once, on a probe. Where this answer has another ending, it is
        the run of special tokens and white space at the end of the text.
        """
        body = len(text.removesuffix(self._suffix)) if self._suffix is not None and text.endswith(self._suffix) else -1
        if body < start:
            body = len(text)
            while body > start:
                name = next((name for name in self._specials if text.endswith(name, start, body)), "")
                if not name and not text[body - 1].isspace():
                    break
                body -= len(name) or 1
        length, closed = _first_special(text[body:], self._specials)
        return body + length, closed


def _prepare(template: str) -> None:
    """Put the globals of a template, which transformers has compiled, into one dict.

    They lie in two, one behind the other, and jinja2 copies them for each rendering, key by key: half of its time.
    """
    from jinja2 import TemplateError
    from transformers.utils import chat_template_utils

    compiler = getattr(chat_template_utils, "_compile_jinja_template", None)
    with suppress(TemplateError):  # it will be told of each row
        if compiler is not None:
            compiled = compiler(template)
            compiled.globals = dict(compiled.globals)


@lru_cache(maxsize=64)
def _first_special(ending: str, names: frozenset[str]) -> tuple[int, bool]:
    """Where the first special token in an ending ends, of those that start alike the longest; 0 without one."""
    found = [(ending.find(name), -len(name)) for name in names if name in ending]
    if not found:
        return 0, False
    place, length = min(found)
    return place - length, True


def special_names(tokenizer: Any) -> frozenset[str]:
    """Texts of the special tokens of a tokenizer, its end-of-text token among them."""
    added = tokenizer.added_tokens_decoder.values()
    named = {tokenizer.eos_token} if tokenizer.eos_token else set()
    return frozenset(token.content for token in added if token.special) | named


def _template_thinking(prompt: str, text: str, message: Message) -> int:
    """Length of what the template, and not the message, writes of an empty think block before an answer."""
    block = (CLOSED_THINKING if prompt.rstrip().endswith("<think>") else EMPTY_THINKING).match(text)
    own = message.get("reasoning_content") or message["content"]
    return 0 if block is None or own.lstrip().startswith(("<think>", "</think>")) else block.end()


def _left_out(text: str, message: Message) -> str:
    """What of an answer is not in its rendering, white space aside; nothing if it is all there.

    What was found is taken out of the text, the longest first: a call that an answer speaks of is not written by that.
    """
    content = message["content"]
    if len(message) == 2 and content in text:
        return ""
    written = [("tool call", call["function"]["name"]) for call in message.get("tool_calls", ())]
    opened = OPENED_THINKING.match(content)
    written.append(("content", content[opened.end() if opened else 0 :]))
    # A thought may be there under both names, or in the content too.
    thoughts = {message[name].strip(): name for name in ("thinking", "reasoning_content") if name in message}
    in_content = content.partition("</think>")[0] if opened else ""
    written += [(name, part) for part, name in thoughts.items() if part not in in_content]
    for name, part in sorted(written, key=lambda named: len(named[1]), reverse=True):
        if part not in text:
            text, part = ("".join(either.split()) for either in (text, part))
        if part not in text:
            return name
        text = text.replace(part, "\0", 1)
    return ""
