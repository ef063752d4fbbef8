"""How large the streams of a cluster may get: a server sets that much aside when it makes them, and refuses what does not fit.

The store, less what the system needs, is divided by the namespaces, and each namespace's budget by its shares. What a
tenant fills is a share of its own: those of others, and the system's, have their room set aside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from fluster_bus.core import buckets
from fluster_bus.core.errors import NamespaceFullError, StorageError
from fluster_bus.core.roles import MAX_PAYLOAD_BYTES


@dataclass(frozen=True)
class ObjectKind:
    """Objects that have a stream of their own, so that those of another kind never take their room."""

    name: str
    kept_s: int
    is_shared: bool = True  # else each is its writer's alone, and is stored whatever is there

    @property
    def shown_time(self) -> str:
        days, hours = divmod(self.kept_s // 3_600, 24)
        return f"{days} days" if days else f"{hours} hours"

    @property
    def renewed_after(self) -> timedelta:
        """What is put again later than this is stored anew."""
        return timedelta(seconds=self.kept_s / 4)


BUNDLES = ObjectKind("bundles", 7 * 86_400)
PAYLOADS = ObjectKind("payloads", 4 * 3_600)
REQUESTS = ObjectKind("requests", 7 * 86_400, is_shared=False)  # of jobs that wait to be recorded


_MIB, _GIB = 1 << 20, 1 << 30

SYSTEM_BYTES = _GIB
# What lies in that: the rest is for what operators make there themselves.
SUBMITTED_BYTES, WORKERS_BYTES, CONTROLLERS_BYTES, JOINS_BYTES = 768 * _MIB, 64 * _MIB, 8 * _MIB, 16 * _MIB
NAMESPACES_BYTES = 8 * _MIB
# Of a message in the queue of submissions, with its headers, and of a request in one. What is larger lies in a share of
# its namespace: so a bound on how many wait is one on their bytes too.
MAX_SUBMISSION_BYTES = 32 << 10
MAX_INLINE_BYTES = MAX_SUBMISSION_BYTES - (1 << 10)
_OF_A_MESSAGE = 512  # its subject, and what the server keeps beside it
MAX_BUDGET_BYTES = 12 * _GIB  # of a namespace, unless more is asked for
BUDGET_SETTING = "FLUSTER_NAMESPACE_BUDGET"

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


class Share(NamedTuple):
    """What one stream of a namespace has of the budget."""

    parts: int
    least_bytes: int  # its largest legal object, and some more; of `shrinks`, what is worth having
    refuses: bool  # what is new, when it is full; else its oldest go
    shrinks: bool = False  # the limit of its objects is its size, where that is smaller
    setting: str = BUDGET_SETTING  # by which it gets more


SHARES: Mapping[str, Share] = {
    "jobs": Share(10, 40 * _MIB, refuses=True),  # a request of 6 MiB with 10,000 tasks takes 26 MiB
    "registry": Share(1, _MIB, refuses=True),  # an endpoint takes up to 70 KiB
    "actors": Share(3, 8 * _MIB, refuses=True),  # a state takes up to 4 MiB
    "calls": Share(1, 9 * _MIB, refuses=True, setting="FLUSTER_CALLS_BUDGET"),  # each up to 8 MiB, as is set
    "secrets": Share(1, _MIB, refuses=True),  # 64 KiB of a job
    BUNDLES.name: Share(10, 16 * _MIB, refuses=False, shrinks=True),
    PAYLOADS.name: Share(9, 16 * _MIB, refuses=False, shrinks=True),
    REQUESTS.name: Share(1, 9 * _MIB, refuses=True),  # each up to 8 MiB
    "results": Share(4, 68 * _MIB, refuses=False, setting="FLUSTER_RESULTS_BUDGET"),  # 64 MiB of a task
    "logs": Share(4, 9 * _MIB, refuses=False, setting="FLUSTER_LOGS_BUDGET"),  # a message
    "events": Share(4, 9 * _MIB, refuses=False, setting="FLUSTER_EVENTS_BUDGET"),
}
MIN_BUDGET_BYTES = sum(share.least_bytes for share in SHARES.values())


@dataclass(frozen=True)
class NamespaceBounds:
    """How much room each namespace has, and how long it keeps what is in it.

    That is its history, results, calls to durable actors that wait, secrets and stored objects.
    Without `budget_bytes` a namespace has its part of the store; sizes of single streams go before the shares that they have
    of the budget. Of times and numbers, None is the default, or as the stream is if that is there already. Raises ValueError
    for what no stream can have.
    """

    budget_bytes: int | None = None
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
    max_secrets: int | None = None  # jobs that have some; beyond them they are refused
    workspaces_kept_s: float | None = None
    payloads_kept_s: float | None = None
    requests_kept_s: float | None = None  # of jobs that are not recorded yet

    def __post_init__(self) -> None:
        other = {
            "max_calls_of_actor": _COUNT,
            "max_call_bytes": (4 << 10, MAX_PAYLOAD_BYTES, "size from 4 KiB to 8 MiB, which a message may have"),
            "max_secrets": _COUNT,
            "workspaces_kept_s": _kept(BUNDLES),
            "payloads_kept_s": _kept(PAYLOADS),
            "requests_kept_s": _kept(PAYLOADS),  # as long as requests were kept before they had a stream
        }
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least, most, wanted = other.get(field.name, _SIZE if field.name.endswith("_bytes") else _TIME)
            if value is not None and not least <= value <= most:
                raise ValueError(f"{field.name}={value!r}: give a {wanted}")
        least_bytes = least_budget(self.given)
        if self.budget_bytes is not None and self.budget_bytes < least_bytes:
            raise ValueError(
                f"budget_bytes={self.budget_bytes!r}: give a size from {-(-least_bytes // _MIB)} MiB, for the largest object of each kind"
            )

    @property
    def given(self) -> dict[str, int]:
        """{share: its size} of those that are given by themselves."""
        sizes = {
            "logs": self.logs_bytes,
            "events": self.events_bytes,
            "results": self.results_bytes,
            "calls": self.calls_bytes,
        }
        return {name: size for name, size in sizes.items() if size is not None}


def submissions_of(namespaces: int) -> int:
    """How many submissions of one namespace may wait where there are so many.

    All of them together have room, and one more: so no namespace fills the queue for others. What is left is for users of a
    namespace that was dropped, who can still submit to it.
    """
    return max(1, SUBMITTED_BYTES // ((namespaces + 1) * (MAX_SUBMISSION_BYTES + _OF_A_MESSAGE)))


def least_budget(given: Mapping[str, int]) -> int:
    """What a namespace cannot do without, where these shares have the sizes that are given."""
    return sum(given.get(name, share.least_bytes) for name, share in SHARES.items())


def store_bytes(namespaces: int, bounds: NamespaceBounds | None = None) -> int:
    """What a store needs in which so many namespaces have what is given, else a gibibyte each."""
    bounds = bounds or NamespaceBounds()
    return SYSTEM_BYTES + namespaces * (bounds.budget_bytes or _GIB + sum(bounds.given.values()))


def budgets(limit_bytes: int | None, namespaces: int, bounds: NamespaceBounds) -> Iterator[int]:
    """The budgets of a namespace to be tried, the largest first, until the server has room for it; there may be none.

    `limit_bytes` is that of the store, None where the server does not tell it.
    """
    if bounds.budget_bytes is not None:
        yield bounds.budget_bytes
        return
    least, fixed = least_budget(bounds.given), sum(bounds.given.values())
    parts = sum(share.parts for share in SHARES.values())
    open_parts = sum(share.parts for name, share in SHARES.items() if name not in bounds.given)
    budget = MAX_BUDGET_BYTES * open_parts // parts + fixed
    if limit_bytes is not None:
        budget = min(budget, (limit_bytes - SYSTEM_BYTES) // namespaces)
    while budget > least:
        yield budget
        budget = fixed + (budget - fixed) // 2
    if limit_bytes is None or least * namespaces + SYSTEM_BYTES <= limit_bytes:
        yield least


def shares(budget_bytes: int, given: Mapping[str, int] | None = None) -> dict[str, int]:
    """{share: its size}: as given, or its part of the rest, but no less than its largest object. Raises ValueError."""
    given = given or {}
    if budget_bytes < least_budget(given):
        raise ValueError(f"{budget_bytes:,} bytes are less than the {least_budget(given):,} that a namespace needs")
    sizes = dict(given)
    open_shares = {name: share for name, share in SHARES.items() if name not in given}
    rest = budget_bytes - sum(sizes.values())
    while True:
        parts = sum(share.parts for share in open_shares.values())
        small = {name: share for name, share in open_shares.items() if rest * share.parts // parts < share.least_bytes}
        if not small:
            break
        for name, share in small.items():
            sizes[name] = share.least_bytes
            rest -= share.least_bytes
            del open_shares[name]
    return sizes | {name: rest * share.parts // parts for name, share in open_shares.items()}


def stream_of(share: str, namespace: str) -> str:
    """The name of the stream that has this share of a namespace's budget."""
    match share:
        case "jobs":
            return buckets.bucket_stream(buckets.jobs_bucket(namespace))
        case "registry":
            return buckets.bucket_stream(buckets.endpoints_bucket(namespace))
        case "actors":
            return buckets.bucket_stream(buckets.actors_bucket(namespace))
        case "calls":
            return buckets.calls_stream(namespace)
        case "secrets":
            return buckets.secrets_stream(namespace)
        case "results":
            return buckets.results_stream(namespace)
        case "logs":
            return buckets.logs_stream(namespace)
        case "events":
            return buckets.events_stream(namespace)
        case kind:
            return buckets.objects_stream(kind, namespace)


_ANY = "n"  # a namespace by which the streams' names are learnt
_PREFIXES = {stream_of(name, _ANY).removesuffix(_ANY): name for name in SHARES}


def full_error(what: str, stream: str) -> StorageError:
    """The error to raise where `what` was not stored, since the stream has no room for it."""
    for prefix, name in _PREFIXES.items():
        if stream.startswith(prefix):
            return namespace_full(what, name, stream.removeprefix(prefix))
    return StorageError(f"{what} was not stored: stream {stream} is full; try again when it has been worked off")


def namespace_full(what: str, share: str, namespace: str, detail: str = "") -> NamespaceFullError:
    """The error to raise where `what` was not stored, since a share of a namespace is used up."""
    setting = SHARES[share].setting
    more = setting if setting == BUDGET_SETTING else f"{setting} or {BUDGET_SETTING}"
    return NamespaceFullError(
        f"{what} was not stored: namespace {namespace!r} has used up its share of the store for {share}{detail}; "
        f"remove what is not needed, or give its controllers a larger {more}"
    )


def object_limit(share_bytes: int, most: int) -> int:
    """The largest object that a share of that size holds; `most` is the limit where there is room."""
    return min(most, share_bytes - share_bytes // 64)


def object_limits(sizes: Mapping[str, int], most: int) -> dict[str, int]:
    """{kind: its largest object} where the shares have these sizes."""
    limits = {name: object_limit(size, most) for name, size in sizes.items() if SHARES[name].shrinks}
    return limits | {REQUESTS.name: object_limit(sizes[REQUESTS.name], MAX_PAYLOAD_BYTES)}


# Of any kind: a share that holds no more than this would be too small for its namespace to be made.
SURE_OBJECT_BYTES = min(object_limit(share.least_bytes, MAX_BUDGET_BYTES) for share in SHARES.values() if share.shrinks)
