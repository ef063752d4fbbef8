"""The contract that every kind of runtime keeps: how a worker runs attempts, and finds them again after its restart."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fluster_services.worker.contract.attempt_records import ExitRecord, LaunchSpec
from fluster_services.worker.contract.faults import WorkerFaultError
from fluster_services.worker.contract.spool import SpoolRecord, SpoolRun


@dataclass(frozen=True)
class Spooled:
    """The log can be read up to `offset`."""

    offset: int


@dataclass(frozen=True)
class Progressed:
    """How far the task is, by its own word."""

    fraction: float
    message: str


@dataclass(frozen=True)
class Exited:
    """The attempt is over; its whole output can be read."""

    record: ExitRecord


class RunningTask(Protocol):
    """One attempt that was started here and is not forgotten. It may be over."""

    @property
    def spec(self) -> LaunchSpec: ...

    @property
    def key(self) -> str: ...

    @property
    def folder(self) -> Path:
        """What is its own on this machine's disk, and goes when it is forgotten."""

    @property
    def pid(self) -> int | None:
        """The task's main process, if there is one and it is known."""

    @property
    def started_at(self) -> float | None:
        """The wall clock when it started, if it did and that is known."""

    def events(self) -> AsyncIterator[Spooled | Progressed | Exited]:
        """What happens, for one reader at a time. `Exited` is the last; asked again, it comes at once. Steps may be skipped."""

    def read_log(self, start_offset: int = 0, *, max_bytes: int = 1024 * 1024) -> tuple[list[SpoolRun], int]:
        """Records from `start_offset` on, and the offset to go on from. Raises FileNotFoundError once it is forgotten."""

    def read_result(self, start: int, max_bytes: int) -> bytes:
        """Bytes of what its callable returned, pickled; fewer than `max_bytes` at their end. Raises OSError."""

    def read_log_end(self, *, max_bytes: int) -> tuple[list[SpoolRecord], bool]:
        """The records in about the last `max_bytes`, and whether those are all. Raises as `read_log` does."""

    async def flush(self) -> None:
        """Return when the reader of `events` has dealt with all that the task had written when this was called, or with its end.

        A keeper that is stopped, or of an earlier version, lets this wait until that end.
        """

    def kill(self, grace_s: float, reason: str, *, preempted: bool = False) -> None:
        """Have it stopped: politely, and by force after `grace_s`. `Exited` tells when that is done.

        With `preempted` the task is to be tried elsewhere.
        """

    def renew(self, fence_after_s: float | None) -> None:
        """Have it stopped unless this is called again within that time; None: never."""

    async def forget(self) -> None:
        """Delete all that is kept about it. Raises RuntimeError if `events` has not told its end."""


class Runtime(Protocol):
    """What runs attempts. They outlive it: the next runtime over the same state adopts them."""

    async def start(self, spec: LaunchSpec, payload: bytes | None = None) -> RunningTask:
        """Start an attempt; `payload` is the pickled (function, args, kwargs), if it is not in the spec's `payload_file`.

        Raises AlreadyStartedError if one with that key is there, LaunchError if it cannot be started. A command that does not exist
        ends the attempt with exit code 127, and raises nothing here. Cancelled, it may start all the same: `close` waits for it, and the
        next runtime adopts it.
        """

    async def adopt(self) -> Sequence[RunningTask]:
        """All attempts that an earlier runtime started and that are not forgotten, whether running or over.

        To be called once, before the first `start`.
        """

    def renew(self, ended_in_s: float) -> None:
        """Have what runs here ended by force after that time, unless this is called again before.

        For tasks whose keepers cannot fence them, with some time beyond those fences and their graces.
        """

    def trouble(self) -> str | None:
        """Why nothing more can be started; None when all is well."""

    def examine(self) -> str | None:
        """The same, with all asked that it depends on. Blocks meanwhile; to be called in a thread."""

    def places(self) -> list[Path]:
        """Folders on whose disks it makes what tasks need, beside the worker's own. To be called in a thread."""

    async def wait_broken(self) -> WorkerFaultError:
        """Wait until nothing can be started here until the worker process is replaced; returns the reason."""

    def limits(self) -> str:
        """What tasks are held to."""

    async def close(self) -> None:
        """Let go of the attempts without touching them."""
