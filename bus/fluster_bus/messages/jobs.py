"""What a user submits, and what they are shown of it."""

from __future__ import annotations

import functools
import inspect
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Literal, Self, cast

from pydantic import Field, field_validator, model_validator

from fluster_bus.core import codec
from fluster_bus.core.names import JobId, Namespace, WorkerId, check_name, masked
from fluster_bus.messages.parts.arrays import TaskArray, number_in
from fluster_bus.messages.parts.environments import EnvironmentConfig
from fluster_bus.messages.parts.images import UsedImage
from fluster_bus.messages.parts.model import Many, Message, is_carried
from fluster_bus.messages.parts.origin import Origin
from fluster_bus.messages.parts.resources import ResourceConfig

MAX_REPLICAS = 10_000
MAX_AFTER = 1_000
MAX_PRIORITY = 1_000
_MAX_SHOWN = 200  # characters of a command
MAX_ENTRYPOINT_BYTES = 4 << 20  # base64 makes 5.4 MiB of it
# Of a whole request: its record, with how the job ended, must stay below the server's message limit of 8 MiB.
MAX_REQUEST_BYTES = 6 << 20
# Of a record when it is written first. A number of five bytes in a request may have eighteen in it.
MAX_NEW_RECORD_BYTES = 7 << 20


class JobStatus(StrEnum):
    """Where a job or a task stands."""

    PENDING = "PENDING"
    BUILDING = "BUILDING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    KILLED = "KILLED"
    WORKER_FAILED = "WORKER_FAILED"
    UNSCHEDULABLE = "UNSCHEDULABLE"

    def finished(self) -> bool:
        """True when it will not change again."""
        return self not in _UNFINISHED


_UNFINISHED = frozenset({JobStatus.PENDING, JobStatus.BUILDING, JobStatus.RUNNING})


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text) or ["python", "train.py"]
    except ValueError:  # a quote that is not closed
        return text.split()


def _is_generator(function: Callable[..., object]) -> bool:
    """Whether calling it runs none of its code, and gives a generator, or an asynchronous one, that would."""
    while isinstance(function, functools.partial):
        function = function.func
    candidates = (function, getattr(type(function), "__call__", None))  # noqa: B004 - what a call of it runs is asked for
    return any(inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each) for each in candidates)


class Entrypoint(Message):
    """What a task runs: a command, or a callable with its arguments.

    A callable is pickled here and now, so that what runs is what you see at this line. An `async def` runs on an event loop of
    its own. Raises ValueError when neither or both are given, and TypeError for a callable that is a generator, or cannot be
    pickled.
    """

    command: Many[str] | None = None
    python: str | None = None
    """The minor version that pickled the callable, such as 3.12."""
    pickled: bytes | None = Field(default=None, max_length=MAX_ENTRYPOINT_BYTES, repr=False)
    callable: Callable[..., object] | None = Field(default=None, exclude=True)
    args: Many[object] = Field(default=(), exclude=True)
    kwargs: Mapping[str, object] = Field(default_factory=dict, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _pickle(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        fields = cast("dict[str, object]", data)
        text, function = fields.get("command"), fields.get("callable")
        if isinstance(text, str):
            raise ValueError(f"command={text[:_MAX_SHOWN]!r}: give it as a list, such as {_words(text[:_MAX_SHOWN])!r}")
        if function is None:
            return fields
        if not callable(function):  # as is everything that JSON can say
            raise ValueError(f"callable={function!r} cannot be called: pass the function itself, without ()")
        if _is_generator(function):
            name = getattr(function, "__qualname__", repr(function))
            raise TypeError(
                f"callable={name} is a generator: calling it would run none of its code; pass a function that returns, with "
                "what it yields in a list"
            )
        args = tuple(cast("Iterable[object]", fields.get("args", ())))
        kwargs = dict(cast("Mapping[str, object]", fields.get("kwargs") or {}))
        pickled = codec.encode((function, args, kwargs))
        if len(pickled) > MAX_ENTRYPOINT_BYTES:
            raise ValueError(
                f"the pickled callable and its arguments have {len(pickled):,} bytes, over the limit of "
                f"{MAX_ENTRYPOINT_BYTES:,}: pass a Ref (cluster.put gives one), or a path, and load the data inside the job"
            )
        return {**fields, "pickled": pickled, "python": f"{sys.version_info.major}.{sys.version_info.minor}"}

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.command is None) == (self.pickled is None):
            raise ValueError("give an Entrypoint either callable=… (with args, kwargs) or command=[…]")
        if self.command is not None and (not self.command or not self.command[0]):
            raise ValueError(
                f"command={list(self.command)!r} names no program: give it as a list, such as ['python', 'train.py']"
            )
        for argument in self.command or ():
            if not is_carried(argument):
                raise ValueError(
                    f"invalid argument {argument!r} of command: expected UTF-8 text without NUL; put other bytes into a file"
                )
        return self


def port_variable(name: str) -> str:
    """The environment variable in which a task finds the number of the port of that name."""
    return f"FLUSTER_PORT_{name.upper().replace('-', '_')}"  # FLUSTER_PORT_SIDE_CAR


class JobRequest(Message):
    """A job as it is submitted: an entrypoint, resources for each task, an environment, 1..n tasks."""

    name: str
    entrypoint: Entrypoint
    resources: ResourceConfig = ResourceConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    replicas: int = Field(default=1, ge=1, le=MAX_REPLICAS)
    array: TaskArray | None = None
    """Instead of replicas, "0-99", "0-99:10%8" or a range: tasks that find their number in FLUSTER_ARRAY_ID. One that fails
    stops no other, unless max_task_failures says so; after the % stands how many may run at once."""
    gang: bool = False
    """All tasks start together or none does; one that is lost or fails starts all of them again."""
    ports: Many[str] = ()
    """Names: each task finds the number in FLUSTER_PORT_<NAME>."""
    max_retries_failure: int = Field(default=0, ge=0, le=1_000_000)
    retry_window_s: float | None = Field(default=None, gt=0)
    """Failures before so many seconds of running no longer count; None: all do."""
    max_retries_preemption: int = Field(default=100, ge=0, le=1_000_000)
    max_task_failures: int = Field(default=0, ge=0, le=MAX_REPLICAS)
    """Tasks that may fail for good before the others are stopped as well."""
    retry_backoff_s: float = Field(default=1.0, ge=0, le=3_600)
    """Seconds before the first retry; they double with each retry, up to 64 times."""
    must_return: bool = False
    """A task whose process leaves with exit code 0 before its callable has returned, as os._exit(0) does, has failed."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Seconds that each attempt may take, from its start."""
    on_disconnect: Literal["stop", "continue"] = "stop"
    """When the cluster does not hear the worker for `fence_after`: stop the task, so that it never runs beside its retry; or
    let it run on, which may overlap with that retry."""
    scheduling_timeout_s: float | None = Field(default=None, gt=0)
    """Seconds that each attempt may wait for a worker."""
    priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """Tasks of a higher priority go first."""
    job_id: JobId | None = None
    """Made from the name when it is left out."""
    on_conflict: Literal["error", "keep", "replace"] = "error"
    """When a job of that id exists: refuse this one; give the other back, unless it failed; or stop it and take its place."""
    submission: str | None = Field(default=None, min_length=1, max_length=128, repr=False)
    """Chosen by the sender, anew for each submission: it tells one that is sent again from one that is made again."""
    parent: JobId | None = None
    """The job that launched it: it ends when that one does."""
    parent_task: int | None = None
    """The task that launched it, and that task's attempt: it ends with the attempt, and the next one waits for that."""
    parent_attempt: int | None = None
    owner: str | None = None
    """A program that runs outside of the cluster: the job ends when it does. The program reports to the controller."""
    detached: bool = False
    """Launched from within a job, it is not its child and lives on."""
    after: Many[JobId] = Field(default=(), max_length=MAX_AFTER)
    """Jobs, by id or JobInfo, that must end first."""
    after_failure: Literal["fail", "run"] = "fail"
    """What to do when a job of `after` does not succeed: fail as well, or run."""
    origin: Origin | None = Field(default=None, repr=False)
    """Where a command was submitted, noted by `Cluster.launch`."""

    @model_validator(mode="before")
    @classmethod
    def _count_array(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        fields = cast("dict[str, object]", data)
        if fields.get("array") is None:
            return fields
        array = TaskArray.model_validate(fields["array"])
        count, replicas = len(array.ids), fields.get("replicas", 1)
        if count > MAX_REPLICAS:
            raise ValueError(f"array {array} has {count:,} tasks: a job has at most {MAX_REPLICAS:,}")
        if replicas not in (1, count):
            tasks = "1 task" if count == 1 else f"{count:,} tasks"
            raise ValueError(f"array {array} has {tasks}: leave replicas={replicas!r} out")
        return {**fields, "array": array, "replicas": count}

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        return check_name("job name", value)

    @field_validator("job_id", "parent")
    @classmethod
    def _check_id(cls, value: JobId | None) -> JobId | None:
        return None if value is None else JobId(check_name("job id", value))

    @field_validator("owner")
    @classmethod
    def _check_owner(cls, value: str | None) -> str | None:
        return None if value is None else check_name("owner", value)

    @field_validator("after", mode="before")
    @classmethod
    def _ids_of(cls, value: object) -> object:
        if isinstance(value, str):
            raise ValueError(f"after={value!r} is a text: give a list of job ids, such as ['prepare-3f2a']")
        if not isinstance(value, Sequence):
            return value
        jobs = cast("Sequence[object]", value)
        return tuple(each.job_id if isinstance(each, JobInfo) else each for each in jobs)

    @field_validator("after")
    @classmethod
    def _check_after(cls, value: tuple[JobId, ...]) -> tuple[JobId, ...]:
        return tuple(dict.fromkeys(JobId(check_name("job id", job_id)) for job_id in value))

    @model_validator(mode="after")
    def _names_what_it_meets(self) -> Self:
        if self.on_conflict != "error" and self.job_id is None:
            raise ValueError(
                f"on_conflict={self.on_conflict!r} needs job_id=…: without one each launch is a job of its own"
            )
        return self

    @model_validator(mode="after")
    def _waits_for_others(self) -> Self:
        if self.job_id is not None and self.job_id in self.after:
            raise ValueError(f"job {self.job_id!r} cannot wait for itself: take it out of after=…")
        if self.parent is not None and self.parent in self.after:
            raise ValueError(
                f"job {self.parent!r} is its parent, and stops it on ending: take it out of after=…, or say detached=True"
            )
        return self

    @field_validator("ports")
    @classmethod
    def _check_ports(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(value) > 64 or len(set(value)) != len(value):
            raise ValueError(f"ports={list(value)!r}: give at most 64 names, each once")
        variables: dict[str, str] = {}  # {variable: the name that has it}
        for name in value:
            before = variables.setdefault(port_variable(check_name("port name", name)), name)
            if before != name:
                raise ValueError(
                    f"ports: {before!r} and {name!r} would both be {port_variable(name)}: rename one of them"
                )
        return value

    @model_validator(mode="after")
    def _can_return(self) -> Self:
        if self.must_return and self.entrypoint.command is not None:
            raise ValueError(
                "must_return=True is for callables: a command ends by its exit code alone, so leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_gang(self) -> Self:
        if self.gang and self.array is not None:
            raise ValueError(f"array {self.array} and gang=True exclude each other: tasks of an array are independent")
        if self.gang and self.max_task_failures:
            raise ValueError(
                f"max_task_failures={self.max_task_failures} makes no sense with gang=True, whose tasks all succeed or "
                "none does: leave it out, or let failed tasks be tried again with max_retries_failure"
            )
        return self


class TaskError(Message):
    """Why an attempt failed, as text, and as the exception itself where it can be pickled."""

    type: str
    message: str
    traceback: str = ""
    pickled: bytes | None = Field(default=None, repr=False)
    is_final: bool = False
    """Trying again would not help: whatever is left of the budget for failures is spent."""


class TaskResult(Message):
    """What a task's callable returned, other than None: how large it is, or why it could not be kept."""

    size: int = Field(default=0, ge=0)
    """Of the pickle, and of the JSON behind it."""
    json_size: int = Field(default=0, ge=0)
    """0 when it has no JSON form, or one of more than 1 MiB."""
    error: str = ""
    object: str = ""
    """The SHA-256 under which it lies among the payloads, when it is too large for the results."""


class Progress(Message):
    """How far a task is, by its own word."""

    fraction: float = Field(ge=0, le=1)
    message: str = Field(default="", max_length=500)


class TaskStatus(Message):
    """One task of a job, at its newest attempt."""

    task: int
    status: JobStatus
    attempt: int
    worker_id: WorkerId | None = None
    exit_code: int | None = None
    error_message: str = ""
    started_at: float | None = None
    finished_at: float | None = None
    has_output: bool = False
    """Its logs may hold something: it began to run, or what it needs was being made."""
    failures: int = 0
    preemptions: int = 0
    will_retry: bool = False
    """This attempt has ended, and another follows."""
    last_failure: str = ""
    """Why the newest of the attempts that failed or were lost did."""
    result: TaskResult | None = None
    """None: it returned None, or has not returned."""
    progress: Progress | None = None
    """As the task reported it; None: it has reported nothing."""
    array_id: int | None = None
    """FLUSTER_ARRAY_ID, of a task of an array."""
    image: UsedImage | None = None
    """The image in which it runs or ran last, if that was in a container."""
    gpus: tuple[str, ...] = ()
    """UUIDs of those that its worker has, or had, given it."""

    @property
    def number(self) -> int:
        """By which the task is shown, and named in commands: its number in the job's array, else `task`."""
        return self.task if self.array_id is None else self.array_id


class JobDetails(Message):
    """What a job was asked to run. Values of variables that are likely to be secrets are masked."""

    command: Many[str] | None = None
    """None: a callable."""
    resources: ResourceConfig
    environment: EnvironmentConfig

    @classmethod
    def of(cls, request: JobRequest) -> JobDetails:
        """Those of a request, fit to be shown."""
        environment = request.environment
        shown = masked(environment.env_vars, environment.secrets)
        return cls(
            command=request.entrypoint.command,
            resources=request.resources,
            environment=environment.model_copy(update={"env_vars": shown}),
        )


class JobInfo(Message):
    """A job at one moment. Times are seconds since the epoch."""

    job_id: JobId
    name: str
    namespace: Namespace
    status: JobStatus
    submitted_at: float | None = None
    started_at: float | None = None
    finished_at: float | None = None
    error_message: str = ""
    error: TaskError | None = Field(default=None, repr=False)
    parent: JobId | None = None
    after: tuple[JobId, ...] = ()
    priority: int = 0
    first_attempt: int = 1
    """Lower ones, in logs and events, belong to jobs that had the id before."""
    tasks: tuple[TaskStatus, ...] = ()
    """Empty while it waits for other jobs to end."""
    array: TaskArray | None = None
    details: JobDetails | None = None
    """What it was asked to run, where that was asked for."""

    def task_of(self, number: int) -> int:
        """The rank of the task that is shown as `number`: of an array by its number there. Raises ValueError."""
        if self.array is None:
            return number
        if number not in self.array.ids:
            raise ValueError(f"job {self.job_id} has no task {number}: its array is {self.array}")
        return self.array.ids.index(number)

    def number_of(self, task: int) -> int:
        """The number by which the task of that rank is shown."""
        return number_in(self.array, task)

    @property
    def worker_id(self) -> WorkerId | None:
        """The worker of the first task, once it has one."""
        return self.tasks[0].worker_id if self.tasks else None

    @property
    def progress(self) -> float | None:
        """How much is done, from 0 to 1, as the mean of its tasks; None when none of them has told."""
        if all(task.progress is None for task in self.tasks):
            return None
        return sum(map(_fraction, self.tasks)) / len(self.tasks)

    @property
    def progress_message(self) -> str:
        """What the first task that runs says about it, else the first that said anything."""
        told = [task for task in self.tasks if task.progress is not None and task.progress.message]
        told.sort(key=lambda task: task.status.finished())
        return told[0].progress.message if told and told[0].progress is not None else ""

    @property
    def exit_code(self) -> int | None:
        """The first exit code other than 0, else 0 once all tasks have ended."""
        codes = [task.exit_code for task in self.tasks]
        failed = [code for code in codes if code]
        if failed:
            return failed[0]
        return None if None in codes or not codes else 0

    def _repr_html_(self) -> str:
        """What notebooks show."""
        from fluster_bus.messages.notebook import job_view

        return job_view(self)


def _fraction(task: TaskStatus) -> float:
    if task.status is JobStatus.SUCCEEDED:
        return 1.0
    return task.progress.fraction if task.progress is not None else 0.0
