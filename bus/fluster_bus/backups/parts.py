"""Which streams of a cluster belong into a backup, and in which order they are read and restored. Pure.

They are read one after the other while the cluster runs. So that each agrees with those before it, though it shows a later moment:

    submissions   first: what is not recorded yet is recorded later; what was meanwhile, the records tell
    requests      as soon after the submissions as can be: they go as soon as their job is recorded
    events        before the records, which tell again what the leader has not published
    calls         before the actors' rows, which tell which of them are handled
    secrets       before the records and again after them: they go as soon as their job has ended
    records       each job and task as it is at one moment
    all else      after the records: what a record names is there

Restored they are with the submissions last: so a submission finds all else.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fluster_bus.core import buckets
from fluster_bus.core.stream_bounds import BUNDLES, PAYLOADS, REQUESTS, stream_of

_BEFORE = (REQUESTS.name, "events", "calls", "secrets")
_JOBS = "jobs"
_AFTER = ("actors", "registry", "results", "logs", BUNDLES.name, PAYLOADS.name)
_READ_AGAIN = ("secrets",)
KINDS = (*_BEFORE, _JOBS, *_AFTER)  # of a namespace

_SYSTEM = {
    "joins": buckets.bucket_stream(buckets.JOINS_BUCKET),
    "namespaces": buckets.bucket_stream(buckets.NAMESPACES_BUCKET),
}
# What lives only as long as the processes do which write it: they write it anew.
ALIVE_ONLY = (
    buckets.bucket_stream(buckets.WORKERS_BUCKET),
    buckets.bucket_stream(buckets.CONTROLLERS_BUCKET),
    buckets.ROOM_STREAM,
)
_PREFIXES = tuple(stream_of(kind, "n").removesuffix("n") for kind in KINDS)


@dataclass(frozen=True)
class Part:
    """A stream that belongs into a backup."""

    stream: str
    kind: str
    namespace: str | None = None

    @property
    def tells_of_use(self) -> bool:
        """Whether a cluster that has something there has been used: its controllers and actors alone write none of it."""
        return self.kind not in ("registry", "namespaces")


@dataclass(frozen=True)
class Plan:
    """What is to be read, in this order; a stream may be there twice, and is read on then. `left_out` are the other streams."""

    steps: tuple[Part, ...]
    left_out: tuple[str, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        """Each once."""
        return tuple(dict.fromkeys(self.steps))


def plan(streams: Collection[str]) -> Plan:
    """How a cluster is read that has these streams."""
    namespaces = {each.removeprefix(prefix) for each in streams for prefix in _PREFIXES if each.startswith(prefix)}
    steps = [Part(buckets.SUBMIT_STREAM, "submissions")]
    for namespace in sorted(namespaces):
        kinds = (*_BEFORE, _JOBS, *_READ_AGAIN, *_AFTER)
        steps += [Part(stream_of(kind, namespace), kind, namespace) for kind in kinds]
    steps += [Part(stream, kind) for kind, stream in _SYSTEM.items()]
    present = tuple(step for step in steps if step.stream in streams)
    known = {*(step.stream for step in present), *ALIVE_ONLY}
    return Plan(present, tuple(sorted(each for each in streams if each not in known)))


def restoring_order(parts: Collection[Part]) -> list[Part]:
    """The records after what they name, the submissions last."""
    last = {_JOBS: 1, "submissions": 2}
    return sorted(parts, key=lambda part: last.get(part.kind, 0))
