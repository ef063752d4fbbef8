"""How the daemons are set up."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from fluster_bus.core.stream_bounds import NamespaceBounds


@dataclass(frozen=True)
class Timing:
    """Who is given how long. Seconds, each measured by the observer's own monotonic clock.

    A worker counts `fence_after_s` from sending its last acknowledged heartbeat; the controller gives its tasks away
    after `worker_timeout_s`, which is longer by the grace that ending them takes. Raises ValueError when it is not.
    """

    heartbeat_s: float = 5.0
    fence_after_s: float = 90.0
    worker_timeout_s: float = 120.0
    kill_grace_s: float = 10.0
    unschedulable_after_s: float = 60.0  # a job that fits no registered worker is given up after this time
    leader_lease_s: float = 6.0  # a controller that leads is followed by another when it is silent for so long
    # A worker that no controller has heard for this time, and for two heartbeats, releases what it holds for gangs.
    hold_s: float = 20.0
    reserve_after_s: float = 30.0  # a task or gang that others have overtaken for so long has workers kept free for it
    unfit_retry_s: float = (
        30.0  # a worker that lacked what a job names is asked again then: a folder may have been made
    )
    endpoint_lease_s: float = 10.0  # an endpoint of no job is removed when it was not renewed for so long
    seat_lease_s: float = 10.0  # an actor that has one instance is followed by another when it is silent for so long
    owner_lease_s: float = 600.0  # a program from which nothing was heard for so long is gone, and what it owns ends

    def __post_init__(self) -> None:
        fields = dataclasses.fields(self)
        for each in fields:
            _check(self, each.name, "number of seconds above 0", above=0)
        _check(self, "endpoint_lease_s", "number of seconds from 1", above=0.999)
        _check(self, "seat_lease_s", "number of seconds from 1 to 3600", above=0.999, most=3_600)
        if self.worker_timeout_s <= self.ended_by_s:
            raise ProportionError(self, [each.name for each in fields if getattr(self, each.name) != each.default])

    @property
    def ended_by_s(self) -> float:
        """A task of a worker that is silent has ended after this time."""
        return self.fence_after_s + self.kill_grace_s + self.heartbeat_s


_UNTIL_ENDED = ("fence_after_s", "kill_grace_s", "heartbeat_s")


class ProportionError(ValueError):
    """Times that are each possible, and not together. Its text begins with one that was given."""

    def __init__(self, timing: Timing, given: Collection[str]) -> None:
        self._timing = timing
        super().__init__(self.naming(given))

    def naming(self, given: Collection[str]) -> str:
        """Return the text where these were given."""
        shown = {name: f"{name}={getattr(self._timing, name):g}" for name in (*_UNTIL_ENDED, "worker_timeout_s")}
        limit, least = shown.pop("worker_timeout_s"), f"{self._timing.ended_by_s:g}"
        first = next((name for name in _UNTIL_ENDED if name in given), None)
        why = "else a task that is slow to end runs beside its retry"
        if first is None:
            return f"{limit}: give more than {least}, which {', '.join(shown.values())} make together, {why}"
        begin, others = shown.pop(first), " and ".join(shown.values())
        return f"{begin}: with {others} it makes {least}, which must be less than {limit}, {why}: lower it, or raise worker_timeout_s"


@dataclass(frozen=True)
class RecordLimits:
    """How long, and how many, records of finished jobs a namespace keeps. Beyond that the longest finished go.

    What happened to them stays in the event stream for its own time.
    """

    kept_s: float = 7 * 86_400
    max_finished: int = 25_000  # each takes up to 6 KB of a controller's memory
    # A controller removes nothing for its age before it has run so long: a clock that was wrong is put right by then.
    sure_after_s: float = 3_600.0
    kept_at_least_s: float = 300.0  # however many there are: a client that waited for one finds it
    sweep_s: float = 5.0  # between two looks
    secrets_sweep_s: float = 60.0  # between two looks for secrets of no job
    secrets_orphaned_s: float = 600.0  # for so long they may be those of a job that is about to be recorded

    def __post_init__(self) -> None:
        _check(self, "kept_s", "number of seconds above 0", above=0)
        _check(self, "sure_after_s", "number of seconds, or 0")
        _check(self, "kept_at_least_s", "number of seconds, or 0")
        _check(self, "max_finished", "number above 0", above=0)
        _check(self, "secrets_sweep_s", "number of seconds above 0", above=0)
        _check(self, "secrets_orphaned_s", "number of seconds, or 0")


@dataclass(frozen=True)
class CacheLimits:
    """How much of its disk a worker gives to what it may need again, beside what is in use."""

    workspaces_bytes: int = 8 << 30
    environments_bytes: int = 32 << 30

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            _check(self, each.name, "size, or 0 to keep nothing that is not in use", most=1 << 60)


@dataclass(frozen=True)
class LogLimits:
    """How much of what a task writes is kept: of each of its two streams, and of a line."""

    stream_bytes: int = 64 << 20
    line_bytes: int = 64 << 10

    def __post_init__(self) -> None:
        _check(self, "stream_bytes", "size up to 1 TiB, or 0 to keep nothing", most=1 << 40)
        _check(self, "line_bytes", "size from 1 KiB to 128 KiB", above=1023, most=128 << 10)


@dataclass(frozen=True)
class TaskLimits:
    """What a worker lets each task have, beside what its job asks for."""

    max_processes: int = 16_384  # with their threads; where limits are enforced

    def __post_init__(self) -> None:
        _check(self, "max_processes", "number from 16 to 4194304", above=15, most=1 << 22)


@dataclass(frozen=True)
class DiskLimits:
    """When a worker takes nothing new for want of room. It does again where there is twice as much, so that it does not come and go."""

    least_free_bytes: int = 32 << 20  # with less it can neither start tasks nor note how they end

    def __post_init__(self) -> None:
        _check(self, "least_free_bytes", "size from 1 MiB to 1 PiB", above=(1 << 20) - 1, most=1 << 50)

    @property
    def well_free_bytes(self) -> int:
        """So much lets it take work again."""
        return 2 * self.least_free_bytes


@dataclass(frozen=True)
class WorkerLimits:
    """All of a worker's limits."""

    caches: CacheLimits = field(default_factory=CacheLimits)
    logs: LogLimits = field(default_factory=LogLimits)
    tasks: TaskLimits = field(default_factory=TaskLimits)
    disk: DiskLimits = field(default_factory=DiskLimits)


@dataclass(frozen=True)
class DaemonLogs:
    """How large the log of a daemon on this machine may get. Then it is set aside, and the one before it dropped."""

    file_bytes: int = 10 << 20

    def __post_init__(self) -> None:
        _check(self, "file_bytes", "size from 64 KiB to 1 TiB", above=(64 << 10) - 1, most=1 << 40)


@dataclass(frozen=True)
class LocalLimits:
    """The limits of a cluster on one machine."""

    records: RecordLimits = field(default_factory=RecordLimits)
    bounds: NamespaceBounds = field(default_factory=NamespaceBounds)
    worker: WorkerLimits = field(default_factory=WorkerLimits)
    daemon_logs: DaemonLogs = field(default_factory=DaemonLogs)


def _check(group: object, name: str, wanted: str, *, above: float = -1, most: float = sys.float_info.max) -> None:
    value = getattr(group, name)
    if not (above < value <= most and value >= 0):
        raise ValueError(f"{name}={value!r}: give a {wanted}")


# Everything is on one machine: a process that is silent for seconds is gone.
LOCAL_TIMING = Timing(
    heartbeat_s=1.0,
    fence_after_s=10.0,
    worker_timeout_s=15.0,
    kill_grace_s=3.0,
    unschedulable_after_s=5.0,
    leader_lease_s=3.0,
    hold_s=5.0,
    reserve_after_s=5.0,
)


def local_timing(given: Mapping[str, float]) -> Timing:
    """Return the timing of a cluster on one machine, with what is given in place of the usual. Raises ValueError."""
    known = [field.name for field in dataclasses.fields(Timing)]
    for name in given:
        if name not in known:
            raise ValueError(f"{name!r} is not known: there are {', '.join(known)}")
    try:
        return dataclasses.replace(LOCAL_TIMING, **given)
    except ProportionError as error:
        raise ValueError(error.naming(given)) from error
