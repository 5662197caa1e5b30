"""Where models, tokens and features are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path

VARIABLE = "FLOWDFLASH_CACHE_DIR"


def cache_dir() -> Path:
    """The user's cache of flowdflash, or the folder that the environment variable ``FLOWDFLASH_CACHE_DIR`` names."""
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser().resolve() if named else user_cache_path("flowdflash")
