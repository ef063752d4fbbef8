"""How large the streams of a cluster may get: a server sets that much aside when it makes them, and refuses what does not fit."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from fluster_bus.object_kinds import BUNDLES, PAYLOADS, ObjectKind
from fluster_bus.roles import MAX_PAYLOAD_BYTES

KEPT_BYTES = 1 << 30  # of logs, of events, and of what is submitted and not recorded
MAX_RESULTS_BYTES = 1 << 30  # of a namespace; beyond them the oldest go
MAX_CALLS_BYTES = 128 << 20  # of all durable actors of a namespace
NAMESPACE_BYTES = 2 * KEPT_BYTES + MAX_RESULTS_BYTES + MAX_CALLS_BYTES
HISTORY_KEPT_S = 7 * 86_400.0  # of logs and events
RESULTS_KEPT_S = CALLS_KEPT_S = 7 * 86_400.0
MAX_CALLS_OF_ACTOR = 100_000  # that wait, and some that were handled
MAX_CALL_BYTES = 1 << 20
MAX_SECRETS = 20_000  # jobs of a namespace that have some
SECRETS_KEPT_S = 30 * 86_400.0  # a job that waits for longer is submitted again
_MOST_S = 100 * 366 * 86_400.0
_SIZE = (64 << 20, 1 << 50, "size from 64 MiB to 1 PiB")
# A server remembers ids for two minutes, and keeps what it needs for that.
_TIME = (120.0, _MOST_S, "number of seconds from 120 to 100 years")
_COUNT = (1, 1_000_000_000, "number from 1 to 1000000000")


def _kept(kind: ObjectKind) -> tuple[float, float, str]:
    """Not for less long than clients take for granted, who renew in time what they use."""
    return kind.kept_s, _MOST_S, f"number of seconds from {kind.kept_s} to 100 years"


@dataclass(frozen=True)
class NamespaceBounds:
    """How much each namespace keeps of its history, results, calls to durable actors that wait, secrets and stored objects. None: the default, or as its stream is if that is there already.

    Raises ValueError for what no stream can have.
    """

    logs_bytes: int | None = None
    events_bytes: int | None = None
    results_bytes: int | None = None
    calls_bytes: int | None = None
    history_kept_s: float | None = None  # logs and events
    results_kept_s: float | None = None
    calls_kept_s: float | None = None
    max_calls_of_actor: int | None = None
    max_call_bytes: int | None = None
    secrets_kept_s: float | None = None
    max_secrets: int | None = None  # jobs that have some; beyond them those of the oldest go
    workspaces_kept_s: float | None = None
    payloads_kept_s: float | None = None

    def __post_init__(self) -> None:
        other = {
            "max_calls_of_actor": _COUNT,
            "max_call_bytes": (4 << 10, MAX_PAYLOAD_BYTES, "size from 4 KiB to 8 MiB, which a message may have"),
            "max_secrets": _COUNT,
            "workspaces_kept_s": _kept(BUNDLES),
            "payloads_kept_s": _kept(PAYLOADS),
        }
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least, most, wanted = other.get(field.name, _SIZE if field.name.endswith("_bytes") else _TIME)
            if value is not None and not least <= value <= most:
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
