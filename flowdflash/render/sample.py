"""One sample for a person: its text, which of it is supervised, and its special tokens; for a terminal or as a page."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np

from flowdflash.items import IntArray

OPEN, CLOSE = "⟦", "⟧"
STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.6 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font:14px/1.6 ui-monospace,monospace}
.on{background:#2a82;box-shadow:inset 0 -2px #2a8}.special{border:1px solid;border-radius:3px;padding:0 2px}
""".strip()


@dataclass(frozen=True, slots=True)
class Span:
    """A run of tokens that are alike: its text, supervised or not, special tokens or not."""

    text: str
    supervised: bool
    special: bool


@dataclass(frozen=True, slots=True)
class Shown:
    """What became of a row: a line about it, and where it gave a sample, the text of that."""

    account: str
    spans: tuple[Span, ...] = ()


def spans(ids: IntArray, mask: np.ndarray[Any, Any], tokenizer: Any) -> Iterator[Span]:
    """The sample, decoded, cut where supervision or a special token starts or ends."""
    special = np.isin(ids, [n for n, token in tokenizer.added_tokens_decoder.items() if token.special])
    kinds = 2 * special + mask
    cuts = [0, *(np.flatnonzero(kinds[1:] != kinds[:-1]) + 1).tolist(), len(ids)]

    def decoded(tokens: IntArray) -> str:
        text = tokenizer.decode(tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    for last, (start, end) in zip([0, *cuts], pairwise(cuts), strict=False):
        # A token by itself may decode to something else than it does after others.
        before, text = decoded(ids[last:start]), decoded(ids[last:end])
        own = text[len(before) :] if text.startswith(before) else decoded(ids[start:end])
        yield Span(own, bool(mask[start]), bool(special[start]))


def visible(text: str) -> str:
    """Text that a terminal shows as it is: line ends get a sign, control and format characters become escapes."""
    return "".join(map(_visible, text))


def _visible(char: str) -> str:
    if char == "\n":
        return "↵\n"
    if char in (OPEN, CLOSE) or unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return char.encode("unicode_escape").decode()
    return char


def text(shown: Sequence[Shown], *, coloured: bool) -> str:
    """For a terminal; without colours, brackets stand around what is supervised."""
    return "\n".join(part for one in shown for part in (visible(one.account), _body(one.spans, coloured)) if part)


def _body(parts: Sequence[Span], coloured: bool) -> str:
    if coloured:
        return "".join(f"\033[{_codes(part)}m{visible(part.text)}\033[0m" for part in parts)
    lines, inside = [], False
    for part in parts:
        if part.supervised != inside:
            lines.append(CLOSE if inside else OPEN)
            inside = part.supervised
        lines.append(visible(part.text))
    return "".join([*lines, CLOSE if inside else ""])


def _codes(part: Span) -> str:
    """Bold green: supervised; grey: not; inverse: special tokens."""
    return ("1;32" if part.supervised else "90") + (";7" if part.special else "")


def page(shown: Sequence[Shown], title: str) -> str:
    """A page that needs nothing else."""
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f"<title>{escape(visible(title))}</title>\n<style>{STYLE}</style>\n</head>\n<body>",
        '<p><span class="on">supervised</span> <span class="special">special token</span></p>',
    ]
    for one in shown:
        marked = "".join(
            f'<span class="{" ".join(["on"] * part.supervised + ["special"] * part.special)}">'
            f"{escape(visible(part.text))}</span>"
            for part in one.spans
        )
        parts.append(f"<p>{escape(visible(one.account))}</p>\n<pre>{marked}</pre>")
    return "\n".join([*parts, "</body>\n</html>"]) + "\n"
