"""How large the streams of a cluster may get: a server sets that much aside when it makes them, and refuses what does not fit."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

KEPT_BYTES = 1 << 30  # of logs, of events, and of what is submitted and not recorded
MAX_RESULTS_BYTES = 1 << 30  # of a namespace; beyond them the oldest go
MAX_CALLS_BYTES = 128 << 20  # of all durable actors of a namespace
NAMESPACE_BYTES = 2 * KEPT_BYTES + MAX_RESULTS_BYTES + MAX_CALLS_BYTES
HISTORY_KEPT_S = 7 * 86_400.0  # of logs and events
RESULTS_KEPT_S = CALLS_KEPT_S = 7 * 86_400.0
_LEAST_BYTES, _MOST_BYTES = 64 << 20, 1 << 50
_LEAST_S = 120.0  # a server remembers ids for so long, and keeps what it needs for that
_MOST_S = 100 * 366 * 86_400.0


@dataclass(frozen=True)
class NamespaceBounds:
    """How much each namespace keeps of its history, of results, and of calls to durable actors that wait.

    None: the default, or as its stream is if that is there already. Raises ValueError for what no stream can have.
    """

    logs_bytes: int | None = None
    events_bytes: int | None = None
    results_bytes: int | None = None
    calls_bytes: int | None = None
    history_kept_s: float | None = None  # logs and events
    results_kept_s: float | None = None
    calls_kept_s: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, is_size = getattr(self, field.name), field.name.endswith("_bytes")
            least, most = (_LEAST_BYTES, _MOST_BYTES) if is_size else (_LEAST_S, _MOST_S)
            if value is not None and not least <= value <= most:
                wanted = "size from 64 MiB to 1 PiB" if is_size else f"number of seconds from {_LEAST_S:g} to 100 years"
                raise ValueError(f"{field.name}={value!r}: give a {wanted}")

    @property
    def namespace_bytes(self) -> int:
        """What a new namespace sets aside."""
        histories = (self.logs_bytes or KEPT_BYTES) + (self.events_bytes or KEPT_BYTES)
        return histories + (self.results_bytes or MAX_RESULTS_BYTES) + (self.calls_bytes or MAX_CALLS_BYTES)


def set_aside_bytes(namespaces: int, bounds: NamespaceBounds | None = None) -> int:
    """What a cluster with so many namespaces of these bounds has set aside in all.

    One byte more: a server has to have that left when it makes a stream without a bound, which may be the last.
    """
    return KEPT_BYTES + namespaces * (bounds or NamespaceBounds()).namespace_bytes + 1
