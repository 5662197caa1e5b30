"""An answer and its rendering: what of the one is missing in the other, and what the template has added in front."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from flowdflash.data.chat import Message
from flowdflash.data.reading import THOUGHTS

EMPTY_THINKING = re.compile(r"\s*<think>\s*</think>\s*")
CLOSED_THINKING = re.compile(r"\s*</think>\s*")
OPENED_THINKING = re.compile(r"\s*<think>(\s*</think>)?")
"""What a generation prompt may have written of an answer already."""


def template_thinking(prompt: str, text: str, message: Message) -> int:
    """Length of what the template, and not the message, writes of an empty think block before an answer."""
    block = (CLOSED_THINKING if prompt.rstrip().endswith("<think>") else EMPTY_THINKING).match(text)
    own, content = message.get("reasoning_content") or message["content"], message["content"]
    if block is None or own.lstrip().startswith(("<think>", "</think>")):
        return 0
    indent = content[: len(content) - len(content.lstrip())].rpartition("\n")[2]  # an answer may begin with code
    return block.end() - len(indent) if indent and block.group().endswith(indent) else block.end()


def left_out(text: str, message: Message, specials: Collection[str]) -> str:
    """What of an answer is not in its rendering, white space aside; nothing if it is all there.

    What was found is taken out of the text, the longest first: a call that an answer speaks of is not written by that.
    """
    content = message["content"]
    if len(message) == 2 and content in text:
        return ""
    for name in specials:
        text = text.replace(name, "\0")
    written = [("tool call", call["function"]["name"]) for call in message.get("tool_calls", ())]
    opened = OPENED_THINKING.match(content)
    written.append(("content", content[opened.end() if opened else 0 :]))
    # A thought may be there under both names, or in the content too.
    thoughts = {message[name].strip(): name for name in reversed(THOUGHTS) if name in message}
    in_content = content.partition("</think>")[0] if opened else ""
    written += [(name, part) for part, name in thoughts.items() if part not in in_content]
    letters = _letters(text)
    for call in message.get("tool_calls", ()):
        if any(not _is_in(leaf, letters) for leaf in _leaves(call["function"]["arguments"])):
            return "arguments of a tool call"
    for name, part in sorted(written, key=lambda named: len(named[1]), reverse=True):
        if part not in text:
            text, part = ("".join(either.split()) for either in (text, part))
        if part not in text:
            return name
        text = text.replace(part, "\0", 1)
    return ""


def _is_in(text: str, letters: str) -> bool:
    """Is a text there, as it is or as JSON has it? Templates write arguments in many ways, so letters count."""
    forms = (text, json.dumps(text, ensure_ascii=False), json.dumps(text))
    return any(_letters(form) in letters for form in forms)


def _letters(text: str) -> str:
    return re.sub(r"\W+", "", text)


def _leaves(value: Any) -> Iterator[str]:
    """The texts in the arguments of a call, which may be JSON text themselves."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
