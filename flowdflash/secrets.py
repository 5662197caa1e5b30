"""Secrets of the environment, told by the names of their variables, and kept out of all that is written and shown."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

MIN_CHARS = 8
"""A shorter secret would be found in many a text that has nothing to do with it."""

_NAMED_SECRET = re.compile(
    r"(?i)(KEYS?|TOKEN|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|CREDENTIALS?|COOKIE|AUTH)(?=_|$)(?!.*_(DIR|FILE|PATH|SOCK)$)"
)


def is_secret(name: str) -> bool:
    """An environment variable of this name holds a secret: ``HF_TOKEN``, ``OPENAI_API_KEY``, ``DB_PASSWORD``."""
    return _NAMED_SECRET.search(name) is not None


def hidden(text: str, spelt: Callable[[str], str] = str) -> str:
    """The text with ``${env:NAME}`` in place of the value of each secret; ``spelt`` is how the text spells a value."""
    found = [(value, name) for name, value in os.environ.items() if len(value) >= MIN_CHARS and is_secret(name)]
    for value, name in sorted(found, key=lambda pair: -len(pair[0])):
        text = text.replace(spelt(value), f"${{env:{name}}}")
    return text
