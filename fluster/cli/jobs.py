"""Jobs: submitted, listed, looked at, followed and ended."""

from __future__ import annotations

import pickle
import re
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fluster.cli.exit_codes import CommandError, ExitCode, one_line, say
from fluster.cli.job_progress import wait_shown
from fluster.cli.options import Grep, Options, Since
from fluster.cli.output import age, duration, jsonable, write, write_json, write_table
from fluster.cli.shortened_ids import find_job

if TYPE_CHECKING:
    from fluster.cluster import Cluster
    from fluster_bus.messages import JobId, JobInfo, JobRequest, ResourceConfig

_MAX_NAME = 40

Id = Annotated[str, typer.Argument(metavar="ID", help="The job's id, or its beginning; or `last`, the newest.")]


def submit(
    context: typer.Context,
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="What each task runs.")],
    *,
    name: Annotated[str | None, typer.Option(help="Else the program's name.")] = None,
    cpu: Annotated[float, typer.Option(help="CPUs of each task.")] = 1,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of each task.")] = "1GiB",
    gpu: Annotated[
        str | None, typer.Option(metavar="MODEL:COUNT", help="GPUs of each task: h100:8, or h100, or just 8.")
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Only on workers with this label; may be given several times."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="For the task's environment; may be given several times."),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(metavar="IMAGE", help="The container image that it runs in, where workers have containers."),
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="How many tasks run the command.")] = 1,
    gang: Annotated[bool, typer.Option("--gang", help="Start all tasks together, or none.")] = False,
    retries: Annotated[int, typer.Option(min=0, help="How often a task that fails is tried again.")] = 0,
    priority: Annotated[
        int, typer.Option(min=-1_000, max=1_000, help="Its tasks go before those of a lower priority.")
    ] = 0,
    job_id: Annotated[str | None, typer.Option(help="The job's id, else made from the name.")] = None,
    on_conflict: Annotated[
        Literal["error", "keep", "replace"],
        typer.Option(
            help="When a job of that id exists: an error; that job is it, unless it failed; or it is stopped."
        ),
    ] = "error",
    after: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Start when that job has succeeded; may be given several times."),
    ] = None,
    after_failure: Annotated[
        Literal["fail", "run"], typer.Option(help="When such a job did not succeed: fail too, or run all the same.")
    ] = "fail",
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the job, and end with its outcome.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="The same, and show what it prints.")] = False,
) -> None:
    """Have the cluster run a command as a job, and print the job's id.

    Options stand before the command; all that follows it belongs to it.
    With --follow stdout is the job's, and its id goes to stderr.
    Ctrl-C ends the waiting, not the job.

    Try:
      fluster submit --cpu 2 --env MODE=full -- python train.py --epochs 3
      job=$(fluster submit -- sleep 60); fluster cancel $job
      fluster submit --after prepare-3f2a -- python train.py
    """
    options = Options.of(context)
    request = _request(
        command,
        name,
        _resources(cpu, memory, gpu, label or []),
        env or [],
        image,
        replicas=replicas,
        gang=gang,
        max_retries_failure=retries,
        priority=priority,
        job_id=job_id,
        on_conflict=on_conflict,
        after_failure=after_failure,
    )
    with options.connect() as cluster:
        dependencies = tuple(find_job(cluster, each) for each in after or ())
        launched = cluster.launch(request.model_copy(update={"after": dependencies}))
        if not wait and not follow:
            write_json({"job_id": launched}) if options.json else write(launched)
            return
        if follow:
            say(f"job {launched}")
        elif not options.json:
            write(launched)
        try:
            if follow:
                _print_logs(cluster, launched, options, follow=True, numbered=replicas > 1)
            info = cluster.wait(launched) if follow or options.json else wait_shown(cluster, launched)
        except KeyboardInterrupt:
            say(f"job {launched} goes on: `fluster logs -f {launched}` shows it, `fluster cancel {launched}` ends it")
            raise
    if options.json and not follow:
        write_json(_dumped(info))
    if not _succeeded(info):
        raise CommandError(_outcome(info), ExitCode.FAILED)


def _request(
    command: list[str],
    name: str | None,
    resources: ResourceConfig,
    env: list[str],
    image: str | None = None,
    **fields: Any,
) -> JobRequest:
    from fluster_bus.messages import Entrypoint, EnvironmentConfig, JobRequest

    for assignment in env:
        if not re.match(r"[^=]+=", assignment):
            raise CommandError(f"--env {assignment}: write NAME=VALUE", ExitCode.USAGE)
    return JobRequest(
        name=name or _name_of(command),
        entrypoint=Entrypoint(command=tuple(command)),
        resources=resources,
        environment=EnvironmentConfig(env_vars=dict(assignment.split("=", 1) for assignment in env), image=image),
        **fields,
    )


def _name_of(command: list[str]) -> str:
    """A name for the job: that of its program, with what names cannot have left out."""
    program = re.sub(r"[^A-Za-z0-9_-]+", "-", command[0].rpartition("/")[2]).strip("-")
    return program[:_MAX_NAME] or "job"


def _resources(cpu: float, memory: str, gpu: str | None, labels: Sequence[str] = ()) -> ResourceConfig:
    from fluster_bus.messages.labels import parse_labels

    try:
        wanted = parse_labels(",".join(labels))
    except ValueError as error:
        raise CommandError(f"--label: {error}", ExitCode.USAGE) from error
    return _sized(cpu, memory, gpu).model_copy(update={"labels": wanted})


def _sized(cpu: float, memory: str, gpu: str | None) -> ResourceConfig:
    from fluster_bus.messages import ResourceConfig, parse_size

    try:
        bytes_ = parse_size(memory)
    except ValueError as error:
        raise CommandError(f"--memory: {error}", ExitCode.USAGE) from error
    if gpu is None:
        return ResourceConfig.with_cpu(cpu, memory=bytes_)
    match = re.fullmatch(r"(?:(?P<count>\d+)|(?P<model>[A-Za-z0-9_-]+?)(?::(?P<of_model>\d+))?)", gpu)
    if match is None:
        raise CommandError(f"--gpu {gpu}: write a model, a count or both, such as h100:8", ExitCode.USAGE)
    count = int(match["count"] or match["of_model"] or 1)
    return ResourceConfig.with_gpu(match["model"] or "any", count, cpu=cpu, memory=bytes_)


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
        jobs = cluster.list_jobs(limit=limit, states=states)
    if options.json:
        write_json([_dumped(job) for job in jobs])
    else:
        write_table(["ID", "NAME", "STATE", "TASKS", "WORKER", "AGE", "DURATION", "ERROR"], [_row(job) for job in jobs])
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
        job.error_message,
    ]


def status(context: typer.Context, job: Id) -> None:
    """Show how a job and its tasks stand.

    Try:
      fluster status train-3f2a
    """
    options = Options.of(context)
    with options.connect() as cluster:
        info = cluster.poll(find_job(cluster, job))
    if options.json:
        write_json(_dumped(info))
        return
    facts = {
        "job": info.job_id,
        "name": info.name,
        "namespace": info.namespace,
        "state": info.status,
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
        write(f"{what:10} {one_line(value)}")
    write("")
    write_table(
        ["TASK", "STATE", "ATTEMPT", "WORKER", "EXIT", "DURATION", "PROGRESS", "FAILURES", "PREEMPTIONS", "ERROR"],
        [
            [
                str(task.task),
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
    task: Annotated[int | None, typer.Option(min=0, help="Only of this task.")] = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="Only of this attempt.")] = None,
    tail: Annotated[int | None, typer.Option(min=0, help="Only the last lines of those that are there.")] = None,
    since: Since = None,
    grep: Grep = None,
) -> None:
    """Print what a job's tasks wrote; what went to stderr goes to stderr.

    Lines of a job of several tasks begin with the task's number.
    With --output json each line is an object.

    Try:
      fluster logs -f train-3f2a
      fluster logs --tail 100 --grep 'loss=' train-3f2a
    """
    options = Options.of(context)
    with options.connect() as cluster:
        job_id = find_job(cluster, job)
        numbered = task is None and len(cluster.poll(job_id).tasks) > 1
        wanted = {
            "task": task,
            "attempt": attempt,
            "tail": tail,
            "grep": grep,
            "since": None if since is None else timedelta(seconds=since),
        }
        _print_logs(cluster, job_id, options, follow=follow, numbered=numbered, wanted=wanted)


def _print_logs(
    cluster: Cluster,
    job_id: JobId,
    options: Options,
    *,
    follow: bool,
    numbered: bool,
    wanted: Mapping[str, Any] | None = None,
) -> None:
    for line in cluster.logs(job_id, follow=follow, **(wanted or {})):
        if options.json:
            write(line.model_dump_json())
            continue
        stream = sys.stderr if line.stream == "stderr" else sys.stdout
        stream.write(f"{line.task}| {line.text}\n" if numbered else f"{line.text}\n")
        if follow:
            stream.flush()


def result(
    context: typer.Context,
    job: Id,
    *,
    task: Annotated[int | None, typer.Option(min=0, help="Only of this task.")] = None,
    pickled: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it there as it was pickled, and do not unpickle it.")
    ] = None,
) -> None:
    """Print what a job's callable returned, once the job has finished.

    It is shown as Python does it, with --output json as JSON where that is possible.
    Its modules must be importable here; --pickled does without.

    Try:
      fluster result train-3f2a
    """
    from fluster.cluster.job_results import pickled_result_of

    options = Options.of(context)
    with options.connect() as cluster:
        job_id = find_job(cluster, job)
        info = cluster.wait(job_id)
        _check_succeeded(info, task)
        if pickled is not None:
            data = cluster.portal.run(pickled_result_of, cluster.asynchronous.bus, info, task)
            pickled.write_bytes(pickle.dumps(None) if data is None else data)
            return
        value = cluster.result(job_id, task=task)
    if options.json:
        write_json({"job_id": job_id, "result": jsonable(value)})
    else:
        write(repr(value))


def _check_succeeded(info: JobInfo, task: int | None) -> None:
    from fluster_bus.messages import JobStatus

    if task is not None and task >= len(info.tasks):
        raise CommandError(f"--task {task}: job {info.job_id} has {len(info.tasks)}, from 0 on", ExitCode.USAGE)
    if not (_succeeded(info) if task is None else info.tasks[task].status is JobStatus.SUCCEEDED):
        raise CommandError(_outcome(info), ExitCode.FAILED)


def cancel(
    context: typer.Context,
    jobs: Annotated[
        list[str], typer.Argument(metavar="ID", help="The jobs' ids, or their beginnings; or `last`, the newest.")
    ],
) -> None:
    """Have jobs stopped, with what they launched; their ids are printed.

    The tasks are told by SIGTERM, and end soon after. A job that has finished stays as it is. An id that fits no job stops
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


def _dumped(info: JobInfo) -> dict[str, Any]:
    # The exception itself is for programs in Python; its type, text and traceback stay.
    return info.model_dump(mode="json", exclude={"error": {"pickled"}})


def _succeeded(info: JobInfo) -> bool:
    from fluster_bus.messages import JobStatus

    return info.status is JobStatus.SUCCEEDED


def _outcome(info: JobInfo) -> str:
    reason = f": {info.error_message}" if info.error_message else ""
    return f"job {info.job_id} ended as {info.status}{reason}; `fluster logs {info.job_id}` shows what it wrote"


def _moment(seconds: float | None) -> str:
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(seconds))
