"""Files that only their owner can read."""

from __future__ import annotations

import os

_OWNER_ONLY = 0o600


def open_private(path: str, flags: int) -> int:
    """An `opener` of `open`, whatever the umask; a file that is there already keeps its mode."""
    return os.open(path, flags, _OWNER_ONLY)
