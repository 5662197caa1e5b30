"""Which vocabulary id stands for "unknown" in a draft block: a row of the target's embedding that no text uses."""

from __future__ import annotations

from typing import Any

from flowdflash.errors import ModelInvalid
from flowdflash.target.catalogue import facts_of


def resolve_mask_token(explicit: int | None, tokenizer: Any | None, vocab_rows: int, *, ref: str = "") -> int:
    """The mask token, in this order: explicit, the known model's recommended reserved token, the tokenizer's own mask
    token, the first embedding row after the tokenizer's last id.

    What is not explicit is skipped where it cannot be used; an explicit id that cannot be used is an error.

    Args:
        explicit: id that a person chose, or None.
        tokenizer: the target's tokenizer, or None where it has none.
        vocab_rows: rows of the target's embedding, which is never resized.
        ref: the target, for models of the catalogue.

    Raises:
        ModelInvalid: the explicit id is out of range or an alias of pad, end or begin; or no id can be found.
    """
    taken = {name: getattr(tokenizer, f"{name}_token_id", None) for name in ("pad", "eos", "bos")}
    if explicit is not None:
        wrong = _problem(explicit, taken, vocab_rows)
        if wrong:
            raise ModelInvalid(f"mask token {explicit} cannot be used: {wrong}")
        return explicit
    known = (facts_of(ref) or {}) if ref else {}
    spare = len(tokenizer) if tokenizer is not None else None
    for candidate in (known.get("mask_token_id"), getattr(tokenizer, "mask_token_id", None), spare):
        if candidate is not None and not _problem(candidate, taken, vocab_rows):
            return int(candidate)
    size = "there is no tokenizer" if spare is None else f"the tokenizer uses {spare} ids"
    raise ModelInvalid(
        f"no mask token can be chosen: {size}, the embedding has {vocab_rows} rows, and none is spare "
        "(give the drafter mask_token_id: the id of a reserved special token that never occurs in text)"
    )


def _problem(token: int, taken: dict[str, Any], vocab_rows: int) -> str:
    if not 0 <= token < vocab_rows:
        return f"the target's embedding has {vocab_rows} rows, ids 0 to {vocab_rows - 1}"
    for name, ids in taken.items():
        if ids is not None and token in (ids if isinstance(ids, (list, tuple)) else (ids,)):
            return f"it is the tokenizer's {name} token"
    return ""
