"""Where tasks are in their Python code: asked of the controller for a job's task, and of the worker that runs it."""

from __future__ import annotations

from pydantic import Field

from fluster_bus.core.names import JobId, WorkerId
from fluster_bus.messages.parts.model import Message


class TaskStackRequest(Message):
    """Asks the controller for the stacks of a task that runs."""

    job_id: JobId
    task: int = Field(default=0, ge=0)


class StackFrame(Message):
    """A function that was called and has not returned."""

    function: str
    file: str
    line: int


class ThreadStack(Message):
    """The functions in which a thread is, the innermost first."""

    name: str = ""
    is_active: bool = False
    """It runs code, where the others wait for something."""
    holds_gil: bool = False
    frames: tuple[StackFrame, ...] = ()


class ProcessStack(Message):
    """The threads of a process that run Python, or why they are not known."""

    pid: int
    """On the worker's machine."""
    command: str = ""
    threads: tuple[ThreadStack, ...] = ()
    problem: str = ""


class TaskStack(Message):
    """The stacks of an attempt's processes; `cut` says that there were more processes, threads or frames than are listed."""

    worker_id: WorkerId | None
    task: int
    attempt: int
    processes: tuple[ProcessStack, ...] = ()
    cut: bool = False
    problem: str = ""
    """Why there is nothing to tell; empty when there is."""


class JobStack(Message):
    """The stacks of a job's tasks that run, of 16 at most; `running` is how many do."""

    job_id: JobId
    running: int
    tasks: tuple[TaskStack, ...] = ()
