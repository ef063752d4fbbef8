"""What an operator asks one worker, and its answers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fluster_bus.core.names import JobId, Namespace, WorkerId
from fluster_bus.messages.jobs import JobRequest
from fluster_bus.messages.logs import LogLine
from fluster_bus.messages.parts.model import Message
from fluster_bus.messages.workers import Capacity


class DrainRequest(Message):
    """Asks a worker to take nothing new, to wait for what runs, and to leave.

    After `timeout_s` it hands back what still runs: stopped, and tried elsewhere at the cost of the preemption budget.
    """

    timeout_s: float | None = Field(default=None, ge=0)


class DrainReply(Message):
    """The worker drains; so many attempts it waits for."""

    worker_id: WorkerId
    running: int


class AttemptQuery(Message):
    """Asks for the attempt of a task that a worker has; the newest, unless told."""

    namespace: Namespace
    job_id: JobId
    task: int = Field(default=0, ge=0)
    # By which the task is shown, in an array its id there; before `task`.
    number: int | None = Field(default=None, ge=0)
    attempt: int | None = Field(default=None, ge=1)


class AttemptsFlushRequest(Message):
    """Asks a worker to have what its tasks of a job have written by now in the log stream, before it answers."""

    namespace: Namespace
    job_id: JobId


class AttemptStatus(Message):
    """One attempt at its worker."""

    namespace: Namespace
    job_id: JobId
    task: int
    array_id: int | None = None  # FLUSTER_ARRAY_ID, of a task of an array
    attempt: int
    phase: str  # reserved (for a job that is to run here, attempt 0), preparing (which takes in starting), or running
    resources: Capacity
    devices: tuple[str, ...] = ()
    pid: int | None = None
    started_at: float | None = None

    @property
    def number(self) -> int:
        """By which the task is shown: of an array by its number there."""
        return self.task if self.array_id is None else self.array_id


class AttemptList(Message):
    """What a worker has."""

    worker_id: WorkerId
    attempts: tuple[AttemptStatus, ...] = ()


class AttemptLogsRequest(AttemptQuery):
    """Asks for the last lines of an attempt's output, from the worker's own disk."""

    tail: int = Field(default=100, ge=0, le=10_000)
    stream: Literal["stdout", "stderr"] | None = None
    since: float | None = None  # seconds since the epoch
    grep: str | None = Field(default=None, max_length=1_000)  # a regular expression that is to be found in a line


class AttemptLogsReply(Message):
    """Lines, the oldest first. `searched_all` is false when there is output before the part that was looked through."""

    lines: tuple[LogLine, ...] = ()
    searched_all: bool = True
    array_id: int | None = None  # FLUSTER_ARRAY_ID, of a task of an array


class KillAttemptRequest(AttemptQuery):
    """Asks for an attempt to be stopped, and its task with it: the wish is written into the task's record."""

    reason: str = Field(default="killed at its worker", max_length=1_000)
    force: bool = False  # SIGKILL at once; also to one that is in its grace already


class RunRequest(Message):
    """Asks a worker to run a job now, before all that waits. What the job tries later it tries on this worker too."""

    namespace: Namespace
    job: JobRequest


class RunReply(Message):
    """The worker has room for the job, and has submitted it. `claimed` is false while no controller has recorded it yet.

    `submission` is its place in the stream of submitted jobs.
    """

    worker_id: WorkerId
    job_id: JobId
    submission: int
    claimed: bool


class WorkerHealth(Message):
    """How a worker is; `problems` is empty when all is well."""

    worker_id: WorkerId
    problems: tuple[str, ...] = ()
    draining: bool = False
    takes_work: bool = True
    running: int = 0
    total: Capacity
    free: Capacity
    disk_free: int
    """Bytes, of its state folder."""
    limits: str = ""
    """What is enforced."""
    uptime_s: float = 0.0
