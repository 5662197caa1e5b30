"""Which vocabulary id stands for "unknown" in a draft block: a row of the target's embedding that no text uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flowdflash.errors import ModelInvalid


def resolve_mask_token(
    explicit: int | None, tokenizer: Any | None, vocab_rows: int, *, facts: Mapping[str, Any] | None = None
) -> int:
    """The mask token, in this order: explicit, the one known of the target, the tokenizer's own mask token, the first
    embedding row after the tokenizer's last id.

    What is not explicit is skipped where it cannot be used; an explicit id that cannot be used is an error.

    Args:
        explicit: id that a person chose, or None.
        tokenizer: the target's tokenizer, or None where it has none.
        vocab_rows: rows of the target's embedding, which is never resized.
        facts: what is known of the target: ``mask_token_id`` and its bos, eos and pad tokens.

    Raises:
        ModelInvalid: the explicit id is no row or means something else already; or no id can be found.
    """
    known = facts or {}
    taken = set(_meaningful(known, tokenizer))
    if explicit is not None:
        wrong = _problem(explicit, taken, vocab_rows)
        if wrong:
            raise ModelInvalid(f"mask token {explicit} cannot be used: {wrong}; choose a row that means nothing")
        return explicit
    spare = len(tokenizer) if tokenizer is not None else None
    for candidate in (known.get("mask_token_id"), getattr(tokenizer, "mask_token_id", None), spare):
        if candidate is not None and not _problem(candidate, taken, vocab_rows):
            return int(candidate)
    size = "there is no tokenizer" if spare is None else f"the tokenizer uses {spare} ids"
    raise ModelInvalid(
        f"no mask token can be chosen: {size}, the embedding has {vocab_rows} rows, and none is spare "
        "(give the drafter mask_token_id: the id of a reserved special token that never occurs in text)"
    )


def _meaningful(facts: Mapping[str, Any], tokenizer: Any | None) -> Iterator[int]:
    """Ids of the tokens that begin, end and pad; a model may have several of one kind."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        for ids in (facts.get(name), getattr(tokenizer, name, None)):
            if ids is not None:
                yield from ids if isinstance(ids, (list, tuple)) else (ids,)


def _problem(token: int, taken: set[int], vocab_rows: int) -> str:
    if not 0 <= token < vocab_rows:
        return f"it is not a row of the target's embedding, which has {vocab_rows} rows, ids 0 to {vocab_rows - 1}"
    return "it is the target's bos, eos or pad token" if token in taken else ""
