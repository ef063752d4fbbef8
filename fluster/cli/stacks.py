"""Where the tasks of a job are in their Python code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fluster.cli.exit_codes import CommandError, ExitCode, one_line, say
from fluster.cli.jobs import Id
from fluster.cli.options import Options
from fluster.cli.output import write, write_json
from fluster.cli.shortened_ids import find_job

if TYPE_CHECKING:
    from fluster_bus.messages import JobInfo
    from fluster_bus.messages.stacks import TaskStack

_TASKS = 16  # that are shown at once


def stack(
    context: typer.Context,
    job: Id,
    *,
    task: Annotated[int | None, typer.Option(min=0, help="Only of this task.")] = None,
) -> None:
    """Show in which Python functions a job's tasks are: where they hang.

    Each task's worker reads it from the memory of the task's processes, with py-spy, which does not stop them. The
    innermost function of each thread comes first. Exit code 1 when the stacks of no process could be read.

    Try:
      fluster stack train-3f2a
      fluster stack train-3f2a --task 3
    """
    from fluster.cluster.worker_calls import ask_stack

    options = Options.of(context)
    with options.connect() as cluster:
        job_id = find_job(cluster, job)
        running = _running(cluster.poll(job_id), task)
        bus = cluster.asynchronous.bus
        found = [cluster.portal.run(ask_stack, bus, cluster.namespace, job_id, number) for number in running[:_TASKS]]
    if options.json:
        write_json([each.model_dump(mode="json") for each in found])
    else:
        for each in found:
            _show(each)
    if len(running) > _TASKS:
        say(f"{_TASKS} of the {len(running)} tasks that run are shown; --task shows another")
    if not any(process.threads for each in found for process in each.processes):
        raise CommandError(f"job {job_id}: no stack of its processes could be read", ExitCode.FAILED)


def _running(info: JobInfo, task: int | None) -> list[int]:
    from fluster_bus.messages import JobStatus

    if task is not None and task >= len(info.tasks):
        raise CommandError(f"--task {task}: job {info.job_id} has {len(info.tasks)}, from 0 on", ExitCode.USAGE)
    asked = info.tasks if task is None else info.tasks[task : task + 1]
    running = [each.task for each in asked if each.status is JobStatus.RUNNING]
    if not running:
        what = f"job {info.job_id}" if task is None else f"task {task} of job {info.job_id}"
        state = info.status if task is None else info.tasks[task].status
        hint = "" if state.finished() else f"; `fluster explain {info.job_id}` says why"
        raise CommandError(f"{what} does not run, so it has no stack: it is {state}{hint}", ExitCode.FAILED)
    return running


def _show(found: TaskStack) -> None:
    write(f"task {found.task}, attempt {found.attempt}, on {found.worker_id}")
    for process in found.processes:
        write(one_line(f"process {process.pid}: {process.command}"))
        if process.problem:
            write(f"  {one_line(process.problem)}")
        for thread in process.threads:
            state = "runs" if thread.is_active else "waits"
            gil = ", has the GIL" if thread.holds_gil else ""
            write(f"  thread {one_line(thread.name) or '-'} {state}{gil}")
            for frame in thread.frames:
                write(f"    {one_line(f'{frame.function} ({frame.file}:{frame.line})')}")
    if found.cut:
        write("there is more than is shown")
