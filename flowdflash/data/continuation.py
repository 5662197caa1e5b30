"""What the target writes after its prompt, where a template renders a finished answer otherwise than its prompt.

Serving renders what stands before an answer, and the target goes on from there. Most templates render the finished
answer as that text and more. Others drop an earlier thought or move the system prompt once the answer is there, or
write into the prompt alone that a thought begins, or that there is none. There the sample is the prompt as it is
served, and after it what the template writes behind the header of the answer; or, where the prompt has begun a thought,
the answer word by word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from flowdflash.data.chat import Message
from flowdflash.data.reading import THOUGHTS

ANSWER = "flowdflash-answers"
"""Stands for an answer, to see what a template writes around one."""
OPENED = re.compile(r"<think>(\s*)$")
"""The end of a prompt that begins a thought."""
EMPTY_BLOCK = re.compile(r"<[^<>\s]+>[^<>]*<[^<>\s]+>\s*$")
"""The end of a prompt that says that there is no thought: two marks with nothing or a word between."""
LEAST_CHARS = 4
"""Of the end of a prompt, to find it again in a template without a header for answers."""
LONG_CHARS = 6
"""Of a message, to be known again; shorter ones occur in names of channels."""
MOST_CHARS = 64
"""Between the header and the text of an answer: the name of a channel, an empty thought."""


def after_prompt(
    prompt: str,
    text: str,
    messages: Sequence[Message],
    bare: Callable[[], str],
    other: Callable[[], str],
    ending: str,
) -> tuple[str, int] | None:
    """What the target writes after a prompt that ``text`` does not begin with; None where that cannot be told.

    Args:
        prompt: as it is served.
        text: the conversation up to and with the answer.
        messages: of the conversation, the answer being the last.
        bare: gives the prompt without the header that asks for an answer.
        other: gives the text with ``ANSWER`` as the answer.
        ending: what the template writes behind an answer.

    Returns:
        What is written, and where it stands in ``text``; -1 if it does not.
    """
    *before, message = messages
    if opened := OPENED.search(prompt):
        written = word_by_word(opened, text, message, ending)
        return None if written is None else (written, -1)
    rendered, content = bare(), message["content"].lstrip()
    header = prompt[len(rendered) :] if prompt.startswith(rendered) else ""
    empty = EMPTY_BLOCK.search(header)
    if empty and not content.startswith("<") and not any(name in message for name in THOUGHTS):
        header = header[: empty.start()]
    place = _after_header(header, text, other(), rendered, before) if header else _after_end(prompt, text, other())
    return None if place is None else (text[place:], place)


def own_words(content: str, opened: re.Match[str] | None) -> str:
    """An answer as the target wrote it, without what its prompt has written of it already."""
    thought = content.lstrip()
    if opened and thought.startswith("<think>"):
        thought = thought.removeprefix("<think>")
        return thought[common(thought, opened[1]) :]
    return content


def word_by_word(opened: re.Match[str], text: str, message: Message, ending: str) -> str | None:
    """An answer that goes on with the thought that its prompt has begun, and the ending that the template gives it.

    None where it does not go on with one.
    """
    content = message["content"]
    visible = content.rpartition("</think>")[2].strip()
    body = text.removesuffix(ending)
    if len(message) > 2 or "</think>" not in content or body == text or not visible:
        return None
    if not body.rstrip().endswith(visible):
        return None
    return own_words(content, opened).rstrip() + body[len(body.rstrip()) :] + ending


def _after_header(header: str, text: str, other: str, bare: str, before: Sequence[Message]) -> int | None:
    """Where the header of the answer ends.

    One that stands in the text without the answer too is an earlier one, or was typed by a user; where the two texts
    part before that, an earlier one has an earlier message behind it.
    """
    shared = common(text, other)
    found = text.rfind(header, 0, shared)
    end = found + len(header)
    said = [content for message in before[-2:] if len(content := message["content"].strip()) >= LONG_CHARS]
    if found < 0 or end <= common(text, bare) or end + MOST_CHARS < shared:
        return None
    return None if any(content in text[end:shared] for content in said) else end


def _after_end(prompt: str, text: str, other: str) -> int | None:
    """Where the prompt ends, in a template without a header for answers: before the answer and white space."""
    place, shared = other.find(ANSWER), common(text, other)
    while LEAST_CHARS <= place <= shared:
        if prompt.endswith(text[place - LEAST_CHARS : place]):
            return place
        if not text[place - 1].isspace():
            return None
        place -= 1
    return None


def common(one: str, other: str) -> int:
    """Characters in which two texts begin alike."""
    differ = (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))
