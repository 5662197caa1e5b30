"""The limit on the length of a sample: cut it or leave it out, and what must be left of it."""

from __future__ import annotations

from typing import Literal

import numpy as np

from flowdflash.data.align import Ids, Mask
from flowdflash.data.rejects import ANCHORLESS_AFTER_CUT, TOO_LONG, UNSUPERVISED_AFTER_CUT, Rejected


def within_limit(
    ids: Ids, mask: Mask, max_length: int, over_long: Literal["truncate", "drop"], turn: int = -1
) -> tuple[Ids, Mask, bool]:
    """Ids and mask of at most ``max_length`` tokens, and whether they were cut; no end token is added.

    Raises:
        Rejected: the sample is to be dropped, or a draft could learn nothing from it.
    """
    truncated = len(mask) > max_length
    if truncated:
        if over_long == "drop":
            raise Rejected(TOO_LONG, f"{len(mask)} tokens", turn)
        ids, mask = ids[:max_length], mask[:max_length]
    supervised = np.count_nonzero(mask)
    if not supervised:
        raise Rejected(UNSUPERVISED_AFTER_CUT if truncated else "no supervised token", turn=turn)
    # Where more than half are, two stand side by side.
    if 2 * supervised <= len(mask) + 1 and not (mask[:-1] & mask[1:]).any():
        raise Rejected(ANCHORLESS_AFTER_CUT if truncated else "fewer than two supervised tokens in a row", turn=turn)
    return ids, mask, truncated
