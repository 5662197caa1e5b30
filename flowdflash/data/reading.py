"""In what form a template reads what a message has besides its text, so that the same row can go to any of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowdflash.data.chat import Message

THOUGHTS = ("reasoning_content", "thinking")
"""Names of what was thought before an answer."""
_ASKED = {"role": "user", "content": "flowdflash-asks"}
_ARGUMENTS = {"flowdflash": "argument"}


@dataclass(frozen=True, slots=True)
class Reading:
    """How a template reads messages.

    Attributes:
        thought: the name under which it reads a thought, if it is one only.
        arguments_as_text: the arguments of a tool call are JSON text, and not an object.
    """

    thought: str = ""
    arguments_as_text: bool = False

    def of(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """The messages as the template reads them; the same where it reads them as they are."""
        for message in messages:
            if len(message) > 2:
                return tuple(self._of(message) for message in messages)
        return messages

    def _of(self, message: Message) -> Message:
        if message["role"] != "assistant" or len(message) == 2:
            return message
        read = dict(message)
        named = [name for name in THOUGHTS if name in message]
        if self.thought and len(named) == 1:
            read[self.thought] = read.pop(named[0])
        if self.arguments_as_text and "tool_calls" in message:
            read["tool_calls"] = [_as_text(call) for call in message["tool_calls"]]
        return read


def reading_of(template: str, render: Callable[[Sequence[Message]], str | None]) -> Reading:
    """How a template reads messages: by the names in it, and by what it makes of a tool call.

    ``render`` gives None for what the template refuses.
    """
    named = [name for name in THOUGHTS if re.search(rf"\.{name}\b|['\"]{name}['\"]", template)]
    return Reading(named[0] if len(named) == 1 else "", _wants_text(render))


def _wants_text(render: Callable[[Sequence[Message]], str | None]) -> bool:
    """A template that refuses an object, or writes it as Python does, and not as JSON."""
    call = {"id": "flowdflas", "type": "function", "function": {"name": "flowdflash", "arguments": _ARGUMENTS}}
    given, text = (
        render((_ASKED, {"role": "assistant", "content": "", "tool_calls": [form]})) for form in (call, _as_text(call))
    )
    wanted = json.dumps(_ARGUMENTS)
    return text is not None and wanted in text and (given is None or str(_ARGUMENTS) in given)


def _as_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}
