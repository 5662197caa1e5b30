"""Which mode W&B will be in and whether it has a key, without importing it: it would ask, and it takes a second."""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

MODES = ("auto", "online", "offline", "disabled")

_ALIASES = {"dryrun": "offline", "run": "online"}


def effective_mode(configured: str) -> str:
    """The mode of the pipeline, unless WANDB_MODE in the environment says otherwise.

    Raises:
        ValueError: WANDB_MODE holds something else than a mode.
    """
    wanted = os.environ.get("WANDB_MODE", "").strip().lower()
    mode = _ALIASES.get(wanted, wanted) or configured
    if mode not in MODES:
        raise ValueError(f"the environment variable WANDB_MODE is {wanted!r}; it can be {', '.join(MODES)}")
    return mode


def has_api_key() -> bool:
    """Is a key, or another identity, configured for the W&B host in use?"""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    named = os.environ.get("NETRC")
    files = [Path(named).expanduser()] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]
    return any(_login(path, host) for path in files)


def _login(path: Path, host: str) -> bool:
    try:
        return bool(netrc.netrc(path).authenticators(host))
    except (OSError, netrc.NetrcParseError):
        return False
