"""Which task of which job this process runs: the variables by which it knows, and what code in it finds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fluster.errors import NoTaskError
from fluster.progress_file import DIRECTORY_VARIABLE, checked_progress, write_progress
from fluster_bus.access.address import BusAddress
from fluster_bus.core.names import JobId, Namespace, WorkerId

JOB_ID, TASK_INDEX, NUM_TASKS = "FLUSTER_JOB_ID", "FLUSTER_TASK_INDEX", "FLUSTER_NUM_TASKS"
ARRAY_ID = "FLUSTER_ARRAY_ID"  # the number of a task of an array
ATTEMPT, ATTEMPT_ID = "FLUSTER_ATTEMPT", "FLUSTER_ATTEMPT_ID"
KILL_GRACE = "FLUSTER_KILL_GRACE_S"  # seconds between SIGTERM and SIGKILL
WORKER_ID, NAMESPACE = "FLUSTER_WORKER_ID", "FLUSTER_NAMESPACE"
# The seeds' name for the same URL; programs written for them go on to work.
CONTROLLER_ADDRESS = "FLUSTER_CONTROLLER_ADDRESS"
GANG_ADDRESS = "FLUSTER_GANG_ADDRESS"  # host:port of the first task of a gang, for a rendezvous


@dataclass(frozen=True)
class TaskIdentity:
    """The task and attempt that this process runs."""

    job_id: JobId
    """The job that the task is of."""
    task: int
    """The number of the task in its job, from 0."""
    num_tasks: int
    """How many tasks the job has."""
    attempt: int
    """Which try at the task this is, from 1."""
    worker_id: WorkerId
    """The worker that runs it."""
    namespace: Namespace
    """The namespace of the job."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """What the worker wrote into the environment; None in a process that is not a task."""
        if JOB_ID not in environment:
            return None
        return cls(
            job_id=JobId(environment[JOB_ID]),
            task=int(environment.get(TASK_INDEX, "0")),
            num_tasks=int(environment.get(NUM_TASKS, "1")),
            attempt=int(environment.get(ATTEMPT, "1")),
            worker_id=WorkerId(environment.get(WORKER_ID, "")),
            namespace=Namespace(environment.get(NAMESPACE, "default")),
        )

    @classmethod
    def at(cls, address: BusAddress) -> Self | None:
        """The task, if its job runs on the cluster at that address: a job may speak to another cluster as well."""
        own = os.environ.get(CONTROLLER_ADDRESS)
        is_own = own is not None and BusAddress.parse(own).servers == address.servers
        return cls.from_environment() if is_own else None

    def to_environment(self) -> dict[str, str]:
        """The variables that tell a task who it is."""
        return {
            JOB_ID: self.job_id,
            TASK_INDEX: str(self.task),
            NUM_TASKS: str(self.num_tasks),
            ATTEMPT: str(self.attempt),
            ATTEMPT_ID: f"{self.namespace}.{self.job_id}.{self.task}.{self.attempt}",
            WORKER_ID: self.worker_id,
            NAMESPACE: self.namespace,
        }


@dataclass(frozen=True)
class TaskContext(TaskIdentity):
    """The task that this process runs: of which job, which one of how many, at which attempt."""

    def progress(self, fraction: float, message: str = "") -> None:
        """Tell how much is done, from 0 to 1, and what is being done; `JobInfo.progress` and `fluster status` show it.

        May be called as often as one likes: the newest word counts, and is passed on a few times a second. A message
        is cut at 500 characters. Raises ValueError for any other fraction, and TypeError.
        """
        told = checked_progress(fraction, message)
        directory = os.environ.get(DIRECTORY_VARIABLE)
        if directory is not None:
            write_progress(Path(directory), told)


def current_task() -> TaskContext:
    """The task that this process runs. Raises NoTaskError in a process that is none."""
    task = TaskContext.from_environment()
    if task is None:
        raise NoTaskError("this process is not a task of a job: launch its function with cluster.launch(JobRequest(…))")
    return task
