"""Which order of turns is a conversation, and what of one is to be answered."""

from __future__ import annotations

from flowdflash.data.chat import Conversation, Message
from flowdflash.data.rejects import Rejected


def check_turns(conversation: Conversation, *, answered: bool) -> None:
    """Check that the turns alternate, and that the last is an answer where one is wanted.

    Raises:
        Rejected: they do not.
    """
    roles = [message["role"] for message in conversation.messages]
    if set(roles) <= {"system", "developer"}:
        raise Rejected("system prompt only")
    before = ""
    for number, role in enumerate(roles):
        _check_step(before, role, conversation.messages[number - 1] if number else {}, number)
        before = role
    if answered and "assistant" not in roles:
        raise Rejected("no assistant turn", "answers are read from `messages` or `conversations`")
    if answered and before != "assistant":
        raise Rejected("ends without an answer", f"the last turn is {before!r}")


def questions(conversation: Conversation) -> tuple[Message, ...]:
    """What is to be answered turn by turn: the messages without the old answers.

    Raises:
        Rejected: the turns do not alternate (where there is no answer at all, user turns may follow one another), or
            one of them belongs to an old answer.
    """
    turns = tuple(message for message in conversation.messages if message["role"] != "assistant")
    if conversation.answers:
        check_turns(conversation, answered=False)
    else:
        gap = {"role": "assistant", "content": ""}
        spread = [part for turn in turns for part in ((turn, gap) if turn["role"] == "user" else (turn,))]
        check_turns(Conversation(tuple(spread)), answered=False)
    if any(message["role"] == "tool" for message in turns):
        raise Rejected("tool result of an answer that is asked for anew")
    return turns


def _check_step(before: str, role: str, last: Message, number: int) -> None:
    where = f"message {number + 1}"
    if role in ("system", "developer"):
        if before:
            raise Rejected("system prompt in the middle", where)
    elif role == "user":
        if before == "user":
            raise Rejected("two user turns in a row", where)
        if before == "tool":
            raise Rejected("tool result without an answer", where)
        if last.get("tool_calls"):
            raise Rejected("tool call without a result", where)
    elif role == "assistant":
        if before in ("", "system", "developer"):
            raise Rejected("opens with an assistant turn", where)
        if before == "assistant":
            raise Rejected("two assistant turns in a row", where)
    elif not (before == "tool" or (before == "assistant" and last.get("tool_calls"))):
        raise Rejected("tool result without a call", where)
