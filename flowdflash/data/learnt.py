"""What a row says of its answers: which are to be learnt, and whether the last was cut off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowdflash.data.chat import PLAIN_KEYS, ROLES, either, entries_of
from flowdflash.data.rejects import Rejected

LEARNT_KEYS = {"weight": 1, "train": True, "training": True, "loss": True, "masked": False}
"""Keys of an answer that say whether it is to be learnt, and what they say if it is."""


def unlearnt(row: Mapping[str, Any]) -> frozenset[int]:
    """Which answers of a row that could be read are not to be learnt, by their number.

    Raises:
        Rejected: a key says neither yes nor no, or nothing is to be learnt.
    """
    entries = entries_of(row)
    if "weight" not in row and all(entry.keys() <= PLAIN_KEYS for entry in entries):
        return frozenset()
    answers = [(n, e) for n, e in enumerate(entries, 1) if ROLES[either(e, "role", "from", "")] == "assistant"]
    found = frozenset(n for n, (number, entry) in enumerate(answers) if not _is_learnt(entry, f"message {number}"))
    if (answers and len(found) == len(answers)) or row.get("weight") == 0:
        raise Rejected("no answer is to be learnt", "`weight` of the row, or each answer, says so")
    return found


def _is_learnt(entry: Mapping[str, Any], where: str) -> bool:
    if entry.keys() <= PLAIN_KEYS:
        return True
    told = {key: entry[key] for key in LEARNT_KEYS if entry.get(key) is not None}
    if not isinstance(told.get("loss"), bool):
        told.pop("loss", None)  # somebody's measurement
    for key, value in told.items():
        if value not in (0, 1):
            raise Rejected(f"`{key}` of an answer says neither yes nor no", f"{where} has {value!r}")
    return all(value == LEARNT_KEYS[key] for key, value in told.items())


def is_cut_off(row: Mapping[str, Any]) -> bool:
    """The last answer of a row was cut off when it was generated."""
    return row.get("finish_reason") == "length" or row.get("stop_reason") == "max_tokens"
