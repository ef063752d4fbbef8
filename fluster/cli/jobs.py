"""Jobs: listed, looked at, followed and ended; and where their tasks are in their Python code."""

from __future__ import annotations

import functools
import gc
import itertools
import pickle
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fluster.cli.common.exit_codes import CommandError, ExitCode, one_line, say
from fluster.cli.common.options import Grep, Options, Since, find_job
from fluster.cli.common.output import (
    age,
    duration,
    jsonable,
    print_chunks,
    shown_details,
    write,
    write_json,
    write_table,
)
from fluster_bus.core.json_types import JsonObject

if TYPE_CHECKING:
    from fluster.cluster import Cluster
    from fluster_bus.messages import JobId, JobInfo
    from fluster_bus.messages.parts.arrays import TaskArray
    from fluster_bus.messages.stacks import StackFrame, TaskStack

_LONG = 80  # characters of a line of output that is not shown twice
_MAX_COMMAND = 60  # characters of a command in a list on a terminal

Id = Annotated[str, typer.Argument(metavar="ID", help="The job's id, or its beginning; or `last`, the newest.")]

TaskNumber = Annotated[
    int | None, typer.Option(min=0, help="Only of this task, by its number in `fluster status`, of an array there.")
]
_CALLS = "/fluster_services/worker/task/task_process.py"  # the module that calls a job's callable


def ps(
    context: typer.Context,
    everything: Annotated[bool, typer.Option("--all", "-a", help="The finished ones too.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many, the newest first.")] = 100,
) -> None:
    """List the jobs that are not finished, the newest first.

    Try:
      fluster ps --all --limit 10
    """
    from fluster_bus.messages import JobStatus

    options = Options.of(context)
    states = [] if everything else [state for state in JobStatus if not state.finished()]
    with options.connect() as cluster:
        jobs = cluster.list_jobs(limit=limit, states=states, details=True)
    if options.json:
        write_json([dumped(job) for job in jobs])
    else:
        write_table(
            ["ID", "NAME", "STATE", "TASKS", "WORKER", "AGE", "DURATION", "RESOURCES", "COMMAND", "ERROR"],
            [_row(job) for job in jobs],
        )
    if not jobs and not everything:
        say("no job is unfinished; --all shows the finished ones")


def _row(job: JobInfo) -> list[str]:
    done = sum(task.status.finished() for task in job.tasks)
    workers = sorted({task.worker_id for task in job.tasks if task.worker_id})
    others = f" +{len(workers) - 1}" if len(workers) > 1 else ""
    return [
        job.job_id,
        job.name,
        job.status,
        f"{done}/{len(job.tasks)}",
        f"{workers[0]}{others}" if workers else "-",
        age(job.submitted_at),
        duration(job.started_at, job.finished_at),
        *_in_a_list(*shown_details(job)[:2]),
        job.error_message,
    ]


def _in_a_list(resources: str, command: str) -> tuple[str, str]:
    """A long command is cut for people, who see columns; a program reads all of it."""
    is_long = len(command) > _MAX_COMMAND and sys.stdout.isatty()
    return resources, f"{command[: _MAX_COMMAND - 1]}…" if is_long else command


def status(context: typer.Context, job: Id) -> None:
    """Show how a job and its tasks stand.

    Try:
      fluster status train-3f2a
    """
    options = Options.of(context)
    with options.connect() as cluster:
        info = cluster.poll(find_job(cluster, job), details=True)
    if options.json:
        write_json(dumped(info))
        return
    resources, command, variables, environment = shown_details(info)
    facts = {
        "job": info.job_id,
        "name": info.name,
        "namespace": info.namespace,
        "state": info.status,
        "resources": resources,
        "command": command,
        "environment": environment,
        "variables": variables,
        "parent": info.parent or "-",
        "priority": str(info.priority),
        "after": ", ".join(info.after) or "-",
        "submitted": _moment(info.submitted_at),
        "started": _moment(info.started_at),
        "finished": _moment(info.finished_at),
        "ran": duration(info.started_at, info.finished_at),
        "progress": _progress(info.progress, info.progress_message),
        "error": info.error_message or "-",
    }
    for what, value in facts.items():
        write(f"{what:11} {one_line(value)}")
    write("")
    write_table(
        ["TASK", "STATE", "ATTEMPT", "WORKER", "EXIT", "DURATION", "PROGRESS", "FAILURES", "PREEMPTIONS", "ERROR"],
        [
            [
                str(task.number),
                task.status,
                str(task.attempt),
                task.worker_id or "-",
                "-" if task.exit_code is None else str(task.exit_code),
                duration(task.started_at, task.finished_at),
                _progress(task.progress.fraction, task.progress.message) if task.progress is not None else "-",
                str(task.failures),
                str(task.preemptions),
                task.error_message,
            ]
            for task in info.tasks
        ],
    )


def _progress(fraction: float | None, message: str) -> str:
    return "-" if fraction is None else f"{fraction:.0%} {message}".rstrip()


def explain(context: typer.Context, job: Id) -> None:
    """Say in one sentence why a job is not running.

    Try:
      fluster explain train-3f2a
    """
    options = Options.of(context)
    with options.connect() as cluster:
        job_id = find_job(cluster, job)
        reason = cluster.explain(job_id)
    write_json({"job_id": job_id, "reason": reason}) if options.json else write(one_line(reason))


def logs(
    context: typer.Context,
    job: Id,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has finished.")] = False,
    task: TaskNumber = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="Only of this attempt.")] = None,
    tail: Annotated[int | None, typer.Option(min=0, help="Only the last lines of those that are there.")] = None,
    since: Since = None,
    grep: Grep = None,
) -> None:
    """Print what a job's tasks wrote; what went to stderr goes to stderr.

    Lines of a job of several tasks begin with the task's number, which --task takes: of an array its FLUSTER_ARRAY_ID.
    With --output json each line is an object.

    Try:
      fluster logs -f train-3f2a
      fluster logs --tail 100 --grep 'loss=' train-3f2a
    """
    options = Options.of(context)
    with options.connect() as cluster:
        job_id = find_job(cluster, job)
        info = cluster.poll(job_id)
        numbered = task is None and len(info.tasks) > 1
        wanted = {
            "task": task_of(info, task),
            "attempt": attempt,
            "tail": tail,
            "grep": grep,
            "since": None if since is None else timedelta(seconds=since),
        }
        print_logs(cluster, job_id, options, follow=follow, numbered=numbered, array=info.array, wanted=wanted)


def print_logs(
    cluster: Cluster,
    job_id: JobId,
    options: Options,
    *,
    follow: bool,
    numbered: bool,
    array: TaskArray | None,
    wanted: JsonObject | None = None,
) -> str:
    """Print what a job's tasks wrote, as `print_chunks` does, and return the last line."""
    from fluster.cluster.jobs.job_logs import LogQuery
    from fluster_bus.messages.parts.arrays import number_in

    gc.freeze()  # else the collector looks through all modules again while it prints many lines
    query = LogQuery(job_id, follow=follow, **(wanted or {}))
    array_id_of = None if array is None else functools.partial(number_in, array)
    return print_chunks(cluster.log_chunks(query), as_json=options.json, numbered=numbered, array_id_of=array_id_of)


def result(
    context: typer.Context,
    job: Id,
    *,
    task: TaskNumber = None,
    pickled: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it there as it was pickled, and do not unpickle it.")
    ] = None,
    unpickle: Annotated[
        bool,
        typer.Option(
            "--unpickle", help="Also what is not plain data. It runs code of the job's choice, with your rights."
        ),
    ] = False,
) -> None:
    """Print what a job's callable returned, once the job has finished.

    Numbers, texts, lists and dicts of them are shown as Python does it (tuples as lists), with --output json as JSON.
    What is something else, or has more than 1 MiB, has to be unpickled: --unpickle does, where its modules can be
    imported; --pickled writes it to a file.

    Try:
      fluster result train-3f2a
    """
    from fluster.cluster.jobs.job_results import pickled_result_of, plain_results_of

    options = Options.of(context)
    with options.connect() as cluster:
        job_id = find_job(cluster, job)
        info = cluster.wait(job_id)
        task = task_of(info, task)
        _check_succeeded(info, task)
        if pickled is not None:
            data = cluster.portal.run(pickled_result_of, cluster.asynchronous.bus, info, task)
            pickled.write_bytes(pickle.dumps(None) if data is None else data)
            return
        bus = cluster.asynchronous.bus
        value = cluster.result(job_id, task=task) if unpickle else cluster.portal.run(plain_results_of, bus, info, task)
    if options.json:
        write_json({"job_id": job_id, "result": jsonable(value)})
    else:
        write(repr(value))


def task_of(info: JobInfo, number: int | None) -> int | None:
    """The rank of the task that --task names, as it is shown. Raises CommandError when there is none."""
    try:
        task = None if number is None else info.task_of(number)
    except ValueError as error:
        raise CommandError(f"--task={number}: {error}", ExitCode.USAGE) from error
    if task is not None and info.tasks and task >= len(info.tasks):
        tasks = "1 task" if len(info.tasks) == 1 else f"{len(info.tasks):,} tasks"
        raise CommandError(f"--task={task}: job {info.job_id} has {tasks}, numbered from 0", ExitCode.USAGE)
    return task


def _check_succeeded(info: JobInfo, task: int | None) -> None:
    from fluster_bus.messages import JobStatus

    if not (succeeded(info) if task is None else info.tasks[task].status is JobStatus.SUCCEEDED):
        raise CommandError(outcome(info), ExitCode.FAILED)


def cancel(
    context: typer.Context,
    jobs: Annotated[
        list[str], typer.Argument(metavar="ID", help="The jobs' ids, or their beginnings; or `last`, the newest.")
    ],
) -> None:
    """Have jobs stopped, with what they launched; their ids are printed.

    The tasks get SIGTERM, and end soon after. A job that has finished stays as it is. An id that fits no job stops
    no other from being cancelled: it is reported, and the exit code is 4.

    Try:
      fluster cancel train-3f2a eval-77b0
      fluster cancel last
    """
    options = Options.of(context)
    with options.connect() as cluster:
        found, missing = _found(cluster, jobs)
        for job_id in found:
            before = cluster.poll(job_id)
            if before.status.finished():
                say(f"job {job_id} had ended before, as {before.status}")
            else:
                cluster.terminate(job_id, reason="cancelled by fluster cancel")
            if not options.json:
                write(job_id)
    if options.json:
        write_json([{"job_id": job_id} for job_id in found])
    if missing:
        raise CommandError("; ".join(missing), ExitCode.NOT_FOUND)


def _found(cluster: Cluster, texts: Sequence[str]) -> tuple[list[JobId], list[str]]:
    """The jobs that are meant, each once, and what is to be said of texts that name none."""
    from fluster.errors import JobNotFoundError

    found: dict[JobId, None] = {}
    missing: list[str] = []
    for text in dict.fromkeys(texts):
        try:
            found[find_job(cluster, text)] = None
        except (JobNotFoundError, CommandError) as error:
            missing.append(str(error))
    return list(found), missing


def dumped(info: JobInfo) -> dict[str, object]:
    # The exception itself is for programs in Python; its type, text and traceback stay.
    return info.model_dump(mode="json", exclude={"error": {"pickled"}})


def succeeded(info: JobInfo) -> bool:
    from fluster_bus.messages import JobStatus

    return info.status is JobStatus.SUCCEEDED


def outcome(info: JobInfo, *, seen: str | None = None) -> str:
    """How the job ended, why, and where its logs are, unless they were shown just before, up to the line `seen`."""
    reason = f": {info.error_message}" if info.error_message else ""
    if seen is not None and len(said := seen.removeprefix("fluster: ")) > _LONG:
        reason = reason.replace(said, "see above")
    if seen is not None or not any(task.has_output for task in info.tasks):
        return f"job {info.job_id} ended as {info.status}{reason}"
    return f"job {info.job_id} ended as {info.status}{reason}; `fluster logs {info.job_id}` shows what it wrote"


def _moment(seconds: float | None) -> str:
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(seconds))


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
