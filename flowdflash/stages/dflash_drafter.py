"""The built-in drafter."""

from __future__ import annotations

from flowdflash.stage import Drafter
from flowdflash.training.drafter import DraftTraining
from flowdflash.training.options import DrafterOptions


class DFlashDrafter(DraftTraining, Drafter):
    """Trains a DFlash draft: random anchors, block mask, weighted cross-entropy, normalised over the whole window."""

    type = "dflash"

    class Config(DrafterOptions):
        """Options of the drafter ``dflash``."""
