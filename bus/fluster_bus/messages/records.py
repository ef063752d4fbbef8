"""The one truth about jobs and tasks: the records in the bucket of a namespace's jobs. And the record of who leads."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from fluster_bus.core.names import JobId, Namespace, WorkerId
from fluster_bus.messages.jobs import JobRequest, JobStatus, Progress, TaskError, TaskResult
from fluster_bus.messages.parts.images import UsedImage
from fluster_bus.messages.parts.model import Message
from fluster_bus.messages.parts.resources import ResourceConfig

KEPT_EARLIER = 16
KEPT_TRANSITIONS = 16  # of each record; the whole history is in the event stream


_FAILED = (JobStatus.FAILED, JobStatus.WORKER_FAILED)


class Transition(Message):
    """A change of state. `number` counts a record's transitions from 1, so none is reported twice."""

    number: int
    state: JobStatus
    time: float
    reason: str = ""
    attempt: int = 0
    worker_id: WorkerId | None = None
    gpus: tuple[str, ...] = ()  # UUIDs; of the transition with which an attempt was given them


class TaskRecord(Message):
    """One task; everything but the budgets belongs to its newest attempt."""

    job_id: JobId
    namespace: Namespace
    task: int
    order: int  # the job's place in the submission order
    priority: int = 0
    resources: ResourceConfig = ResourceConfig()
    max_retries_failure: int = 0
    max_retries_preemption: int = 100
    retry_window_s: float | None = None
    retry_backoff_s: float = 0.0
    scheduling_timeout_s: float | None = None
    attempt: int = 1
    backoff_s: float = 0.0  # this attempt is not offered before that time has passed, by the controller's own clock
    state: JobStatus = JobStatus.PENDING
    worker_id: WorkerId | None = None
    gpus: tuple[str, ...] = ()  # UUIDs of those that its worker has given it
    kill_requested: str | None = None  # the reason
    kill_at_once: bool = False  # without its grace
    # Of a task of a gang. The epoch is the gathering for which it was last claimed: until the job's record decides that
    # epoch the claim is a hold, under which nothing starts.
    gang: bool = False
    epoch: int = 0
    is_ready: bool = False  # the hold has all that its process needs
    waiting_since: datetime | None = (
        None  # by the bus's clock, of an attempt that was held: it waits for longer than its record is old
    )
    gang_address: str | None = None  # of the first task: where the others will find it, as host:port
    restart_requested: str | None = None  # why the attempt is to be stopped and made again, at the cost of no budget
    exit_code: int | None = None
    error: TaskError | None = None
    last_words: str = ""  # the end of its output, when it failed
    result: TaskResult | None = None
    progress: Progress | None = None  # written with the end; before it the worker tells
    failures: int = 0
    preemptions: int = 0
    spared: int = 0  # ends that were a worker's own fault, and charged to no budget
    disk_filled: tuple[WorkerId, ...] = ()  # the workers whose disks its attempts have filled, one for each time
    # With a window: how long ago the failures in it were. Only running counts, each attempt by its worker's own clock.
    failure_ages_s: tuple[float, ...] = ()
    image: UsedImage | None = None  # in which the newest attempt that began to run did so; the next one has the same
    started_at: float | None = None
    finished_at: float | None = None
    has_output: bool = (
        False  # an attempt, this or an earlier one, began to run, or said something while it was prepared
    )
    transitions: tuple[Transition, ...] = ()

    @property
    def last_failure(self) -> str:
        """Why the newest attempt that failed did so; empty while none has."""
        failed = (each for each in reversed(self.transitions) if each.state in _FAILED)
        return next((each.reason for each in failed), "")


class Replacement(Message):
    """The submission that takes over a job's id once that job is gone."""

    order: int
    kill_requested: str | None = None  # why it is to be stopped, before it could be recorded


class JobRecord(Message):
    """A job. Its state is written when it is recorded and when it ends; between, its tasks tell.

    Another may take over its id: its own record then stands under the same key, with a higher `order`, and goes on counting
    attempts and transitions where the one before stopped.
    """

    job_id: JobId
    namespace: Namespace
    request: JobRequest
    order: int
    submitted_at: float
    state: JobStatus = JobStatus.PENDING
    kill_requested: str | None = None
    released: bool = False  # what it was to run `after` has ended; its tasks have no records before that
    # Of a gang: the newest epoch that was decided, whether its tasks may start, and where they find the first of them.
    epoch: int = 0
    is_go: bool = False
    gang_address: str | None = None
    replacement: Replacement | None = None
    earlier: tuple[int, ...] = ()  # the `order` of those that had the id before, the last ones
    earlier_submissions: tuple[str, ...] = ()  # and how these were named by their submitters
    first_attempt: int = 1  # lower ones belong to those
    told_before: int = 0  # as do transitions, of the job and of its tasks, up to this number
    error_message: str = ""
    error: TaskError | None = None
    started_at: float | None = None
    finished_at: float | None = None
    transitions: tuple[Transition, ...] = ()

    @property
    def is_over(self) -> bool:
        """True when it has ended, and no other is about to take over its id."""
        return self.state.finished() and self.replacement is None


class Event(Message):
    """A transition as it stands in the event stream."""

    job_id: JobId
    task: int | None = None
    transition: Transition


QUOTA_EXCEEDED = "QuotaExceeded"  # the code of what a quota refuses


class RefusedJob(Message):
    """Why a submitted message was not recorded."""

    sequence: int
    job_id: JobId | None = None
    reason: str = Field(max_length=10_000)
    code: str = Field(default="", max_length=100)  # what kind of reason it is, where that matters to programs


_FENCE_CHARACTERS = 512


class Leader(Message):
    """The controller that leads, as it says itself. It does as long as it writes this again and again."""

    controller_id: str
    instance: str  # of the process, and of its time as leader: another one under the same id is another
    since: float  # by the leader's wall clock, for people
    restoring: bool = False  # it is none: the store is being restored, and no controller may lead until that is over


class Fence(Message):
    """In a bucket of jobs: whose verdicts are taken there."""

    controller_id: str
    instance: str
    padding: str = ""  # makes all of one size: in a full bucket a record is replaced by none that is larger

    @classmethod
    def of(cls, leader: Leader) -> Fence:
        """The fence of who leads."""
        return cls(
            controller_id=leader.controller_id,
            instance=leader.instance,
            padding=" " * max(0, _FENCE_CHARACTERS - len(leader.controller_id) - len(leader.instance)),
        )
