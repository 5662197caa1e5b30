"""A conversation rendered with the chat template of the target, and which of its text the target would have written.

The template itself says what is supervised. Rendering everything before an answer with the generation prompt gives the
text that serving hands to the target; rendering up to and with the answer gives the same text plus what the target
writes. What lies between is supervised, and no role header is searched for, so a user who types one changes nothing.
Where the second text does not begin with the first, ``continuation`` tells what the target writes, or the answer is
rejected.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from typing import Any, NamedTuple

from flowdflash.data.answer import EMPTY_THINKING, left_out, template_thinking
from flowdflash.data.chat import Conversation, Message
from flowdflash.data.compiled import prepare, variables
from flowdflash.data.continuation import ANSWER, MOST_CHARS, OPENED, after_prompt, common, own_words, word_by_word
from flowdflash.data.reading import Reading, reading_of
from flowdflash.data.rejects import Rejected, Rejection
from flowdflash.data.rendering import Marks, Rendering, Turn, first_special, fitted, special_names
from flowdflash.errors import ModelInvalid

SUPPLIED = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "namespace"}
"""What a template reads that is no switch."""
NO_THOUGHT = "; where the template reads enable_thinking, template_options: {enable_thinking: false} asks for none"
MARK = re.compile(r"\s*(<[^<>\s]+>)")
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
RENDERING = threading.Lock()
"""transformers keeps one copy of a template per process, and in it the place where it follows generation marks."""
DATE = date(2025, 1, 1)
"""Today, for a template that writes the date: the same rows give the same tokens on any day."""


class _Answer(NamedTuple):
    """The text of one answer, with all that stands before it; ``as_rendered`` if the template itself writes it so."""

    text: str
    turn: Turn
    number: int
    marks: Marks
    as_rendered: bool

    def alone(self, header: str) -> Rendering:
        """A sample of its own."""
        return Rendering(self.text, (self.turn,), self.number, fitted(self.marks, self.text, (self.turn,), header))


class ChatTemplate:
    """The chat template of a tokenizer, with fixed options.

    Args:
        tokenizer: a transformers tokenizer; used are its template, its special tokens and, where a model was read along
            with it, ``generation_stops``: texts of the tokens that the model stops at.
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
        named = {name: str(token) for name, token in tokens.items()}
        decisive = [tokenizer.chat_template, options, marks, named, getattr(tokenizer, "generation_stops", ())]
        self.fingerprint = json.dumps(decisive, sort_keys=True)
        self._templates: dict[bool, tuple[str, bool]] = {}
        self._specials = special_names(tokenizer)
        self._stops: tuple[str, ...] = getattr(tokenizer, "generation_stops", ())
        self._certain = {*self._stops, *([str(tokenizer.eos_token)] if tokenizer.eos_token else ())}
        self._suffix: str | None = None
        self._header = self._closing = ""
        try:
            for with_tools in (False, True):
                template = tokenizer.get_chat_template(tools=[] if with_tools else None)
                self._templates[with_tools] = template, marks and MARKS.search(template) is not None
                prepare(template)
        except ValueError as error:
            name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
            raise ModelInvalid(
                f"{name} has no chat template, so there is no telling what the target would be asked; "
                "use the tokenizer of an instruction-tuned model"
            ) from error
        self._check_switches(options, getattr(tokenizer, "name_or_path", ""))
        self._readings = {with_tools: self._reading(with_tools) for with_tools in self._templates}
        self._probe()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for template, _ in self._templates.values():
            prepare(template)

    def prompt(self, conversation: Conversation) -> str:
        """What serving hands to the target: the messages and the generation prompt.

        Raises:
            Rejected: the template refuses the messages.
        """
        conversation = self._as_read(conversation)
        return self._render(conversation, conversation.messages, prompt=True)[0]

    def render(
        self, conversation: Conversation, *, cut_off: bool = False
    ) -> tuple[Sequence[Rendering], list[Rejection]]:
        """One rendering with all answers supervised; one per answer where the template rewrites earlier turns, or where
        some answers cannot be used.

        And why answers cannot be used: the template refuses the conversation, does not start an answer with its
        generation prompt, or leaves out something that the target wrote. ``cut_off``: the last answer was cut off when
        it was generated.
        """
        conversation = self._as_read(conversation)
        answers, left = list[_Answer](), list[Rejection]()
        places = conversation.answers
        for number, place in enumerate(places):
            try:
                answers.append(self._answer(conversation, number, place, cut_off and place == places[-1]))
            except Rejected as rejected:
                left.append(replace(rejected.rejection, turn=number))
        if not answers:
            return [], left
        full = answers[-1].text
        whole = not left
        for each in answers:
            # What follows an end-of-turn token is not the target's, and may stand at the end of all only.
            same = each.text is full or full.startswith(each.text[: each.turn.end])
            whole = whole and each.as_rendered and same
        if whole:
            turns = tuple([each.turn for each in answers])
            return [Rendering(full, turns, marks=fitted(answers[-1].marks, full, turns, self._header))], left
        return [each.alone(self._header) for each in answers], left

    def _answer(self, conversation: Conversation, number: int, place: int, cut_off: bool) -> _Answer:
        """The text of one answer, with all that stands before it."""
        messages = conversation.messages[: place + 1]
        prompt, _ = self._render(conversation, conversation.messages[:place], prompt=True)
        text, spans = self._render(conversation, messages)
        message, end = messages[-1], len(prompt)
        content = message["content"]
        if self._closing and content.rstrip().endswith(self._closing):
            raise Rejected("markup in content", f"{self._closing}, which the template writes behind every answer")
        if text.startswith(prompt) and "think>" not in text:
            written, at, start = text[end:], end, end
        elif cut_off and len(message) == 2 and (content.lstrip().startswith("<think>") or OPENED.search(prompt)):
            whole = prompt + own_words(content, OPENED.search(prompt))  # the template would end the thought
            if len(whole) == end:
                raise Rejected("cut off before the first token", "nothing but the beginning of a thought is left")
            return _Answer(whole, Turn(end, end, len(whole), True), number, None, False)
        else:
            written, at = self._composed(conversation, prompt, text, messages)
            start = end + template_thinking(prompt, written, message)
        if missing := left_out(written, message, self._specials):
            raise Rejected("template leaves part of the answer out", f"its {missing}")
        whole = text if at == end else prompt + written
        turn = Turn(end, start, *self._turn_end(whole, start, cut_off))
        if at != end and at >= 0 and (behind := self._repeated(conversation, messages, text, turn.end + at - end)):
            raise Rejected("generation prompt is no prefix of the answer", f"{behind[:60]!r} stands behind it")
        if spans is not None and at != end:
            moved = [(max(a, at) + end - at, b + end - at) for a, b in spans if b > at]
            spans = tuple(moved) if at >= 0 else None
        if spans is not None and cut_off:  # the template ends the answer, and marks that
            spans = tuple((a, min(b, turn.end)) for a, b in spans)
        return _Answer(whole, turn, number, spans, at == end)

    def _composed(
        self, conversation: Conversation, prompt: str, text: str, messages: Sequence[Message]
    ) -> tuple[str, int]:
        """What the target writes after the prompt, and where it stands in the text; -1 if it does not."""
        content, opened = messages[-1]["content"], OPENED.search(prompt)
        if content.lstrip().startswith("<think>") and "</think>" not in content:
            raise Rejected("thought without an end", "if it was cut off, the row's finish_reason is length")
        written, at = self._written(conversation, prompt, text, messages)
        if opened and (own := word_by_word(opened, text, messages[-1], self._suffix or "")) not in (None, written):
            written, at = str(own), -1
        if (empty := EMPTY_THINKING.match(written)) and written.startswith("<think>", empty.end()):
            # The template's, and then the message's own.
            written, at = written[empty.end() :], at if at < 0 else at + empty.end()
        if opened and ("</think>" not in written or written.lstrip().startswith("<think>")):
            raise Rejected(
                "no thought where the generation prompt begins one", f"it ends in {prompt[-40:]!r}{NO_THOUGHT}"
            )
        return written, at

    def _repeated(self, conversation: Conversation, messages: Sequence[Message], text: str, end: int) -> str:
        """What of an answer that ends at ``end`` the template writes there whether an answer is in the text or not."""
        bare, _ = self._render(conversation, messages[:-1])
        start = len(text) - common(text[::-1], bare[::-1])
        return text[start:end] if end - start > MOST_CHARS else ""

    def _written(
        self, conversation: Conversation, prompt: str, text: str, messages: Sequence[Message]
    ) -> tuple[str, int]:
        """What the target writes after the prompt, and where it stands in the text; -1 if it does not."""
        if text.startswith(prompt):
            return text[len(prompt) :], len(prompt)
        probe = {"role": "assistant", "content": ANSWER}
        found = after_prompt(
            prompt,
            text,
            messages,
            lambda: self._render(conversation, messages[:-1])[0],
            lambda: self._render(conversation, (*messages[:-1], probe))[0],
            self._suffix or "",
        )
        if found is None:
            raise Rejected(
                "generation prompt is no prefix of the answer",
                f"it ends in {prompt[-40:]!r}, the template writes {text[max(0, len(prompt) - 40) :][:60]!r}",
            )
        return found

    def _render(
        self, conversation: Conversation, messages: Sequence[Message], *, prompt: bool = False
    ) -> tuple[str, Marks]:
        """The text of messages of a conversation, and the spans in generation marks; None where no marks are looked at,
        and for a prompt."""
        template, marked = self._templates[bool(conversation.tools)]
        marked = marked and not prompt
        try:
            with RENDERING:
                (text,), spans = self._jinja(
                    conversations=[list(messages)],
                    tools=list(conversation.tools) or None,
                    chat_template=template,
                    return_assistant_tokens_mask=marked,
                    add_generation_prompt=prompt,
                    **(self._variables if not conversation.options else {**self._variables, **conversation.options}),
                )
        except self._refusals as error:
            raise Rejected("template refuses the conversation", f"{type(error).__name__}: {error}") from error
        return text, tuple((int(start), int(end)) for start, end in spans[0]) if marked else None

    def _check_switches(self, options: Mapping[str, Any], name: str) -> None:
        read = [switches for template, _ in self._templates.values() if (switches := variables(template)) is not None]
        known = set().union(*read)
        switches = known - SUPPLIED - (set(self._variables) - set(options))
        for option in sorted(set(options) - known) if read else ():
            own = ", ".join(sorted(switches)) or "none"
            raise ModelInvalid(
                f"template_options: the chat template of {name or 'the target'} does not read {option}; it reads {own}"
            )

    def _as_read(self, conversation: Conversation) -> Conversation:
        messages = self._readings[bool(conversation.tools)].of(conversation.messages)
        return conversation if messages is conversation.messages else replace(conversation, messages=messages)

    def _reading(self, with_tools: bool) -> Reading:
        def rendered(messages: Sequence[Message]) -> str | None:
            try:
                return self._render(Conversation((), ({},) if with_tools else ()), messages)[0]
            except Rejected:
                return None

        return reading_of(self._templates[with_tools][0], rendered)

    def _probe(self) -> None:
        ask, answer = "flowdflash-asks", ANSWER
        messages = {"role": "user", "content": ask}, {"role": "assistant", "content": answer}
        conversation = Conversation(messages)
        try:
            text, _ = self._render(conversation, messages)
            prompt, bare = (self._render(conversation, messages[:1], prompt=asked)[0] for asked in (True, False))
        except Rejected:
            return  # a template may demand more than this; then the rows decide
        self._header = prompt.removeprefix(bare) if prompt.startswith(bare) else ""
        if ask not in text and answer not in text:
            raise ModelInvalid(
                f"the chat template renders no message: it turns a question and an answer into {text[:80]!r}"
            )
        if answer in text:
            self._suffix = text.rpartition(answer)[2]
            mark = MARK.match(self._suffix)
            self._closing = mark[1] if mark and mark[1] not in self._specials else ""

    def _turn_end(self, text: str, start: int, cut_off: bool) -> tuple[int, bool]:
        """Where an answer ends, and whether with a special token or cut off; ``text`` ends with its turn.

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
        if cut_off:
            return body, True
        length, closed = first_special(text[body:], self._specials, self._stops)
        # Generation stops at such a token, whatever the template writes behind it.
        ends = [place + len(stop) for stop in self._certain if (place := text.find(stop, start, body)) >= 0]
        return (min(ends), True) if ends else (body + length, closed)
