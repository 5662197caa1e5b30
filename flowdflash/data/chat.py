"""One conversation out of a row, whatever dialect it is written in.

Read are ``messages`` or ``conversations`` with ``role``/``content`` or ``from``/``value`` and the role names human and
gpt; a ``prompt`` alone is a conversation of one question. All dialects give the same conversation; what cannot be read
without guessing is rejected under a name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowdflash.data.rejects import Rejected
from flowdflash.data.rows import parse_json

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
}
PLAIN_KEYS = frozenset({"role", "from", "content", "value"})
"""Keys of a message that has nothing but a role and a content."""
KEPT_KEYS = {
    "name": "name",
    "tool_call_id": "tool_call_id",
    "reasoning_content": "reasoning_content",
    "reasoning": "reasoning_content",
    "thinking": "thinking",
}
"""Keys of a message that reach the template besides its role, content and tool calls, and under which name."""
ARGUMENT_KEYS = ("args", "parameters", "input", "kwargs")
"""Other names for the arguments of a tool call."""
THOUGHT_KEYS = ("reasoning_details", "thinking_blocks", "thought", "thoughts")
"""Other names for a thought."""
UNREAD_KEYS = {
    "row": ("system_prompt", "functions", "documents", "image", "images", "videos", "audios"),
    "message": ("image", "images", "videos", "audios", "audio", *THOUGHT_KEYS),
    "content part": ("image", "image_url", "video", "audio"),
}
"""Keys that other tools give a meaning to. Left out in silence, a sample would not be what the target saw and wrote."""
OPTIONS_KEY = "chat_template_kwargs"
"""Key of a row for its own switches of the chat template, under the name that servers have for it."""
CONVERSATION_KEYS = frozenset({"messages", "conversations", "system", "tools", OPTIONS_KEY})
"""Keys of a row that are read here."""
RESERVED_OPTIONS = frozenset(
    {"conversation", "messages", "tools", "documents", "chat_template", "tokenize", "tokenizer_kwargs", "padding"}
    | {"add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask", "truncation", "max_length"}
    | {"return_tensors", "return_dict", "conversations"}
)
"""Names that a template option must not have: they steer the rendering itself."""
SURROGATE = re.compile("[\ud800-\udfff]")
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation in one form: what is handed to the chat template.

    Attributes:
        messages: each with ``role`` and ``content`` (text), and ``tool_calls``, ``tool_call_id``, ``name`` or
            ``reasoning_content`` where the row has them; arguments of tool calls are objects.
        tools: schemas of tools, as the template takes them.
        options: the row's own switches of the chat template.
        surrogates: half surrogate pairs were found; each has become U+FFFD.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    surrogates: bool = False

    @property
    def answers(self) -> tuple[int, ...]:
        """Positions of the assistant turns."""
        return tuple(i for i, message in enumerate(self.messages) if message["role"] == "assistant")

    @property
    def opening(self) -> tuple[Message, ...]:
        """Everything before the first assistant turn."""
        answers = self.answers
        return self.messages[: answers[0]] if answers else self.messages

    def texts(self) -> list[str]:
        """Every piece of text that came from the row, names of arguments among them."""
        texts: list[str] = []
        for message in self.messages:
            for value in message.values():
                if isinstance(value, str):
                    texts.append(value)
                else:
                    texts += _strings(value)
        if self.tools or self.options:
            texts += _strings([self.tools, self.options])
        return texts


def read_conversation(value: Any) -> Conversation:
    """The conversation in a parsed row. Its roles are known, its order is not checked.

    Raises:
        Rejected: the row holds no conversation that can be read without guessing.
    """
    if not isinstance(value, dict):
        raise Rejected("row is not an object", f"it is {_kind(value)}")
    entries = entries_of(value)
    messages = [_message(entry, number) for number, entry in enumerate(entries)]
    system = _text(value, "system", "the row")
    if not value.keys().isdisjoint(UNREAD_KEYS["row"]):
        _refuse_unread(
            value, "row", "the row", (system, *(m["content"] for m in messages[:1] if m["role"] == "system"))
        )
    if system.strip():
        if messages[0]["role"] == "system":
            raise Rejected("two system prompts", "`system` of the row and the first message")
        messages.insert(0, {"role": "system", "content": system})
    return _mended(Conversation(tuple(messages), _tools(value), _options(value)))


def _refuse_unread(value: Mapping[str, Any], what: str, where: str, read: Collection[str] = ()) -> None:
    """``read``: texts that are read, and may stand under another name as well."""
    if value.keys().isdisjoint(UNREAD_KEYS[what]):
        return
    for key in UNREAD_KEYS[what]:
        held = value.get(key)
        known = key == "system_prompt" and held in read
        known |= key in THOUGHT_KEYS and isinstance(held, str) and any(held in text for text in read)
        known |= key == "documents" and not isinstance(held, list)  # somebody's name or number for them
        if not held or known:
            continue
        raise Rejected(
            f"`{key}` is not read", f"{where} has it, so the sample would not be what the target saw and wrote"
        )


def entries_of(value: Mapping[str, Any]) -> Sequence[Any]:
    """The messages of a row, as they are written.

    Raises:
        Rejected: there are none, or it is not clear which.
    """
    filled = [name for name in ("messages", "conversations") if value.get(name) is not None]
    if len(filled) > 1:
        raise Rejected("both `messages` and `conversations`", "keep one of them")
    if not filled and isinstance(value.get("prompt"), str):
        return [{"role": "user", "content": value["prompt"]}]
    if not filled:
        named = [name for name in ("messages", "conversations") if name in value]
        raise Rejected(f"`{named[0]}` is null" if named else "no `messages` or `conversations`")
    entries = value[filled[0]]
    if not isinstance(entries, list):
        raise Rejected("conversation is not a list", f"`{filled[0]}` is {_kind(entries)}")
    if not entries:
        raise Rejected("empty conversation")
    return entries


def _message(entry: Any, number: int) -> Message:
    where = f"message {number + 1}"
    if not isinstance(entry, dict):
        raise Rejected("message is not an object", f"{where} is {_kind(entry)}")
    name = either(entry, "role", "from", where)
    if not isinstance(name, str) or name not in ROLES:
        raise Rejected("unknown role", f"{where} has {name!r}, which is none of {', '.join(ROLES)}")
    role = ROLES[name]
    message: dict[str, Any] = {"role": role, "content": _content(either(entry, "content", "value", where), where)}
    if not entry.keys() <= PLAIN_KEYS:
        _add_more(message, entry, where)
    if role in ("user", "assistant") and not message.get("tool_calls") and not message["content"].strip():
        raise Rejected(f"{'blank' if message['content'] else 'empty'} {role} message", where)
    return message


def _add_more(message: dict[str, Any], entry: Mapping[str, Any], where: str) -> None:
    """What a message has besides its role and content."""
    if entry.get("function_call") is not None:
        raise Rejected("`function_call` is not supported", f"{where}: write it as `tool_calls`")
    if entry.get("tool_calls"):
        if message["role"] != "assistant":
            raise Rejected("tool call outside an assistant turn", where)
        message["tool_calls"] = [_tool_call(call, where) for call in _as_list(entry["tool_calls"], where)]
    for key, kept in KEPT_KEYS.items():
        text = _text(entry, key, where)
        if text.strip() and message.setdefault(kept, text) != text:
            raise Rejected(f"both `{kept}` and `{key}`", f"{where}: keep one of them")
    thought = any(kept in message for kept in ("reasoning_content", "thinking"))
    rest = {key: held for key, held in entry.items() if not (thought and key in THOUGHT_KEYS)}
    _refuse_unread(rest, "message", where, (message["content"],))


def either(entry: Mapping[str, Any], name: str, other: str, where: str) -> Any:
    """What a message has under one of two names. Columns of a table have both, one of them null."""
    one, two = entry.get(name), entry.get(other)
    if one is not None and two is not None:
        raise Rejected(f"both `{name}` and `{other}`", f"{where}: keep one of them")
    return two if one is None else one


def _text(value: Mapping[str, Any], key: str, where: str) -> str:
    """A text that may be absent."""
    text = value.get(key)
    if not isinstance(text, str | None):
        raise Rejected(f"`{key}` is not text", f"{where} has {_kind(text)}")
    return text or ""


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Rejected("content is not text", f"{where} has {_kind(content)}")
    return "".join(_part(part, where) for part in content)


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        _refuse_unread(part, "content part", where)
        return str(part["text"])
    found = f"one of type {part.get('type')!r}" if isinstance(part, dict) else _kind(part)
    raise Rejected("content part is not text", f"{where} has {found}, and no `text` that is text")


def _as_list(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise Rejected("tool calls are not a list", f"{where} has {_kind(value)}")
    return value


def _tool_call(call: Any, where: str) -> Mapping[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Rejected("tool call without a name", where)
    unread = [key for given in (call, function) for key in ARGUMENT_KEYS if given.get(key)]
    if function is not call:
        unread += [key for key in ("arguments",) if call.get(key)]
    if unread:
        raise Rejected("tool call with keys that are not read", f"{where}: {', '.join(unread)} beside its `arguments`")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except (ValueError, RecursionError) as error:
            raise Rejected("tool call arguments are not JSON", f"{where}: {error}") from None
    if not isinstance(arguments, dict):
        raise Rejected("tool call arguments are not an object", f"{where} has {_kind(arguments)}")
    kept = {"id": call["id"]} if _text(call, "id", where) else {}
    return {**kept, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _given(row: Mapping[str, Any], key: str) -> Any:
    """The value of a key; tables hold objects of many shapes as JSON text."""
    value = row.get(key)
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise Rejected(f"`{key}` is not JSON", str(error)) from None


def _tools(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    tools = _given(row, "tools")
    if not tools:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Rejected("`tools` is not a list of objects")
    return tuple(tools)


def _options(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The switches that a row sets; null is none, since in a table each row has those of all."""
    options = _given(row, OPTIONS_KEY)
    if not isinstance(options, dict | None):
        raise Rejected(f"`{OPTIONS_KEY}` is not an object", f"it is {_kind(options)}")
    options = {name: value for name, value in (options or {}).items() if value is not None}
    for name in sorted(RESERVED_OPTIONS & set(options)):
        raise Rejected(f"`{OPTIONS_KEY}` steers the rendering", f"{name} is no switch of a chat template")
    return options


def _mended(conversation: Conversation) -> Conversation:
    """The conversation with U+FFFD for every half surrogate pair.

    ``json.loads`` joins whole pairs; what is left of the range is a half, which no UTF-8 writer takes. The arguments of
    a tool call are JSON inside JSON and may bring their own halves.
    """
    try:
        text = "".join(conversation.texts())
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError:
        parts = [conversation.messages, conversation.tools, conversation.options]
        text = json.dumps(parts, ensure_ascii=False, default=str)
        messages, tools, options = json.loads(SURROGATE.sub("\ufffd", text))
        return Conversation(tuple(messages), tuple(tools), options, surrogates=True)
    return conversation


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else f"of type {type(value).__name__}")
