"""How large a workspace may be: the same for who packs it and for who unpacks it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkspaceLimits:
    """Bounds of one workspace."""

    files: int = 50_000  # folders and links counted too
    bytes: int = 1 << 30  # unpacked
    archive_bytes: int = 256 << 20  # packed
    ratio: float = 200.0  # of unpacked to packed, counted where there is more than `free_bytes`
    free_bytes: int = 64 << 20  # this much may come out of however little: zeros pack a thousand to one


WORKSPACE_LIMITS = WorkspaceLimits()
