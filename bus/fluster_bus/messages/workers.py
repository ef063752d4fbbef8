"""What workers and the controller tell each other, also when a machine becomes a worker by a join token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import Field

from fluster_bus.core.names import JobId, Namespace, WorkerId
from fluster_bus.messages.jobs import Progress
from fluster_bus.messages.nodes import NodeInfo
from fluster_bus.messages.parts.counted import CountsField
from fluster_bus.messages.parts.model import Message
from fluster_bus.messages.parts.resources import from_words
from fluster_bus.messages.parts.wire_range import WireRange
from fluster_bus.messages.records import TaskRecord


class Capacity(Message):
    """What a worker has, or has left."""

    cpu: float = Field(default=0, ge=0)
    memory: int = Field(default=0, ge=0)
    """Bytes."""
    disk: int = Field(default=0, ge=0)
    """Bytes."""
    device: str = "cpu"
    """cpu, gpu or tpu."""
    variant: str = "none"
    devices: int = Field(default=0, ge=0)
    """Of `variant`."""
    other_devices: tuple[tuple[str, Annotated[int, Field(ge=0)]], ...] = Field(default=(), max_length=64)
    """Of a machine with several models: (model, count) of the others, sorted. Versions that do not know it use those above alone."""
    tasks: int | None = Field(default=None, ge=0)
    """How many it may have at once; None: as many as the rest has room for."""
    labels: tuple[str, ...] = ()
    """Sorted, as `zone=a`; those that a task needs are among those that its worker has."""
    namespaces: tuple[Namespace, ...] = ()
    """Of a worker, sorted: whose jobs it runs; none: it does not say. Of a need: that of its job."""
    resources: CountsField = ()
    """What is counted by names of the users' own; what is not named is not there."""
    elsewhere: tuple[WorkerId, ...] = ()
    """Of a need: sorted, workers that lack what the job names, whatever room they have."""


class WorkerInfo(Message):
    """A worker as it registers."""

    worker_id: WorkerId
    host: str
    pid: int
    total: Capacity
    version: str
    python: str
    started_at: float
    detecting: bool = False
    """It may have devices that it has not found yet."""
    draining: bool = False
    """It takes nothing new, and leaves when what it has is over."""
    worker_timeout_s: float = 0.0
    """Silent for less than this, it may still run what it had; a controller waits longer if its own setting is longer."""
    trouble: str = ""
    """Why it takes nothing new for the time being; empty while it is well."""
    withheld: tuple[str, ...] = ()
    """Which of its GPUs it gives to no task for the time being, and why."""
    withheld_devices: tuple[tuple[str, Annotated[int, Field(ge=0)]], ...] = Field(default=(), max_length=65)
    """(model, count) of those."""
    wire: WireRange | None = None
    """What it speaks."""
    node: NodeInfo | None = None
    """The machine that it is on; None: it does not say."""

    @property
    def labels(self) -> Mapping[str, str]:
        """By what it differs from others."""
        return from_words(self.total.labels)


class VMTrouble(Message):
    """Why a VM is not there that should be; nothing when it is there again."""

    vm_id: WorkerId  # its worker's id, too
    trouble: str = Field(default="", max_length=2_000)
    counts_for_s: float = Field(default=60.0, gt=0, le=3_600)  # unless it is reported again


class Offer(Message):
    """Asks a worker to look at a task's record; `revision` is the one in which the task was free."""

    namespace: Namespace
    job_id: JobId
    task: int
    attempt: int
    revision: int
    epoch: int = 0  # of a gang: the gathering for which the task is to be held
    spared: tuple[WorkerId, ...] = ()  # who are kept free for what waits longer, and are to decline

    @classmethod
    def of(cls, task: TaskRecord, revision: int, *, epoch: int = 0, spared: tuple[WorkerId, ...] = ()) -> Self:
        """The offer of a task whose record was read at that revision."""
        return cls(
            namespace=task.namespace,
            job_id=task.job_id,
            task=task.task,
            attempt=task.attempt,
            revision=revision,
            epoch=epoch,
            spared=spared,
        )


class OfferReply(Message):
    """Whether the worker claimed the task, and why not."""

    worker_id: WorkerId
    accepted: bool
    unfit: bool = False  # it lacks what the job names, and not room: others may have it
    spared: bool = False  # it is one of those that are kept free: others may have room
    reason: str = ""


class RecordChanged(Message):
    """Tells a worker that the record of a task which it holds has changed."""

    namespace: Namespace
    job_id: JobId
    task: int


class ProgressReport(Message):
    """How far a task is."""

    namespace: Namespace
    job_id: JobId
    task: int
    attempt: int
    progress: Progress
    is_preparing: bool = False  # the message is the worker's, about what the task needs before it can start


class Heartbeat(Message):
    """A worker lives; what it has left, and the attempts it holds (keys `<ns>.<job>.<task>.<attempt>`)."""

    worker_id: WorkerId
    free: Capacity
    attempts: tuple[str, ...] = ()


class HeartbeatReply(Message):
    """The controller has heard it. `registered` is false when it does not know the worker: register again."""

    registered: bool = True
    wire: WireRange | None = None  # what the controller speaks


class WorkerStatus(Message):
    """A worker as the controller sees it."""

    info: WorkerInfo
    free: Capacity
    alive: bool
    silent_for_s: float
    running: int

    def without_node(self) -> Self:
        """The same without the machine, of which each worker tells some kilobytes."""
        if self.info.node is None:
            return self
        return self.model_copy(update={"info": self.info.model_copy(update={"node": None})})


class WorkerList(Message):
    """Registered workers, by name."""

    workers: tuple[WorkerStatus, ...] = ()
    more: bool = False  # there are others after these


JOIN_REFUSED = "JoinRefused"  # the code of the error
MAX_NAMESPACES = 64  # of a token
MAX_USES = 1_000
_Text = Annotated[str, Field(max_length=256)]


class JoinRequest(Message):
    """Asks to be the worker of this id. Keys are public: the sender has made them, and keeps the seeds."""

    worker_id: _Text
    key: _Text
    job_keys: Annotated[Mapping[_Text, _Text], Field(max_length=MAX_NAMESPACES)]  # {namespace: of what its jobs get}


class JoinReply(Message):
    """Signed tokens for the keys of a JoinRequest."""

    worker: str
    jobs: Mapping[str, str]  # {namespace: of its jobs}


class JoinTokenRecord(Message):
    """What a join token is good for, and who has used it. It holds no secret. Times are Unix times in seconds."""

    token_id: str
    namespaces: tuple[str, ...]
    uses: int
    expires_at: float
    used_by: Mapping[str, str] = Field(default_factory=dict)  # {public key of a worker: its id}


class JoinedWorker(Message):
    """Whose the id of a worker is that joined by a token."""

    worker_id: str
    token_id: str
    key: str
    job_keys: Mapping[str, str]  # {namespace: public key}
    joined_at: float
    revoked_at: float | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """All that was signed for it, its jobs' too."""
        return (self.key, *self.job_keys.values())


class IssuedWorkers(Message):
    """The names of workers and of the cluster's own users whose credentials were made by hand: no machine can join by one of them."""

    names: tuple[str, ...] = ()
