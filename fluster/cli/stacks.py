"""Where the tasks of a job are in their Python code."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from fluster.cli.common.exit_codes import CommandError, ExitCode, one_line, say
from fluster.cli.common.options import Options
from fluster.cli.common.output import write, write_json
from fluster.cli.common.shortened_ids import find_job
from fluster.cli.jobs import Id, TaskNumber, task_of

if TYPE_CHECKING:
    from fluster_bus.messages import JobInfo
    from fluster_bus.messages.stacks import StackFrame, TaskStack


_CALLS = "/fluster_services/worker/task/task_process.py"  # the module that calls a job's callable


def stack(
    context: typer.Context,
    job: Id,
    *,
    task: TaskNumber = None,
) -> None:
    """Show in which Python functions a job's tasks are: where they hang.

    Each task's worker reads it from the memory of the task's processes, with py-spy, which does not stop them. The
    innermost function of each thread comes first. Exit code 1 when the stacks of no process could be read.

    Try:
      fluster stack train-3f2a
      fluster stack train-3f2a --task 3
    """
    options = Options.of(context)
    with options.connect() as cluster:
        job_id = find_job(cluster, job)
        info = cluster.poll(job_id)
        found = cluster.stack(job_id, task=task_of(info, task))
    if options.json:
        write_json([each.model_dump(mode="json") for each in found.tasks])
    else:
        for each in found.tasks:
            _show(each, info)
    if found.running > len(found.tasks) and task is None:
        say(f"{len(found.tasks)} of the {found.running} tasks that run are shown; --task shows another")
    if not any(process.threads for each in found.tasks for process in each.processes):
        raise CommandError(f"job {job_id}: no stack of its processes could be read", ExitCode.FAILED)


def without_ours(frames: Sequence[StackFrame]) -> Sequence[StackFrame]:
    """Those within the function by which Fluster calls the user's; all of them where there is nothing else."""
    users = list(itertools.takewhile(lambda frame: not frame.file.endswith(_CALLS), frames))
    return users or frames


def _show(found: TaskStack, info: JobInfo) -> None:
    write(f"task {info.number_of(found.task)}, attempt {found.attempt}, on {found.worker_id}")
    if found.problem:
        write(f"  {one_line(found.problem)}")
    for process in found.processes:
        write(one_line(f"process {process.pid}: {process.command}"))
        if process.problem:
            write(f"  {one_line(process.problem)}")
        for thread in process.threads:
            state = "runs" if thread.is_active else "waits"
            gil = ", has the GIL" if thread.holds_gil else ""
            write(f"  thread {one_line(thread.name) or '-'} {state}{gil}")
            for frame in without_ours(thread.frames):
                write(f"    {one_line(f'{frame.function} ({frame.file}:{frame.line})')}")
    if found.cut:
        write("there is more than is shown")
