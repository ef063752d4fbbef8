"""How large the streams of a cluster may get: a server sets that much aside when it makes them, and refuses what does not fit."""

from __future__ import annotations

KEPT_BYTES = 1 << 30  # of logs, of events, and of what is submitted and not recorded
MAX_RESULTS_BYTES = 1 << 30  # of a namespace; beyond them the oldest go
MAX_CALLS_BYTES = 128 << 20  # of all durable actors of a namespace
NAMESPACE_BYTES = 2 * KEPT_BYTES + MAX_RESULTS_BYTES + MAX_CALLS_BYTES


def set_aside_bytes(namespaces: int) -> int:
    """What a cluster with so many namespaces has set aside in all.

    One byte more: a server has to have that left when it makes a stream without a bound, which may be the last.
    """
    return KEPT_BYTES + namespaces * NAMESPACE_BYTES + 1
