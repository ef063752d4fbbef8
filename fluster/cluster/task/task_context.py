"""Where a task finds itself."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fluster.cluster.task.identity import TaskIdentity
from fluster.errors import NoTaskError
from fluster.progress_file import DIRECTORY_VARIABLE, checked_progress, write_progress


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
