"""`fluster submit`: has the cluster run a command as a job."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fluster.cli.common.exit_codes import CommandError, ExitCode, one_line, say
from fluster.cli.common.job_options import (
    array_option,
    check_secrets,
    folder_option,
    make_request,
    make_resources,
    only_on,
    python_option,
    text_option,
    variables_option,
)
from fluster.cli.common.options import MAX_SECONDS, Options, at_worker, find_job, refuse_empty, unknown_worker
from fluster.cli.common.output import write, write_json
from fluster.cli.jobs import dumped, outcome, print_logs, succeeded

if TYPE_CHECKING:
    from fluster.cluster import Cluster
    from fluster_bus.messages import JobId, JobInfo


def submit(
    context: typer.Context,
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="What each task runs.")],
    *,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Default: the program's name. Example: --name train")
    ] = None,
    cpu: Annotated[float, typer.Option(metavar="CPUS", help="CPUs of each task. Example: --cpu 0.5")] = 1,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of each task. Example: --memory 8GB")] = "1GiB",
    disk: Annotated[str | None, typer.Option(metavar="SIZE", help="Disk of each task. Example: --disk 100GB")] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            "--gpus",
            metavar="MODEL:COUNT",
            help="GPUs of each task: a model, a count or both. Example: --gpu h100:8",
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Only on workers with this label; repeatable. Example: --label zone=a"),
    ] = None,
    resource: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=COUNT",
            help="Of something else that workers offer; repeatable. Example: --resource license=1",
        ),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(metavar="WORKER", help="Only on this worker, its name in full. Example: --on worker-1"),
    ] = None,
    now: Annotated[
        bool,
        typer.Option(
            "--now",
            help="With --on, for operators: the worker runs it at once, before all that waits, or refuses. Example: "
            "--now --on worker-1",
        ),
    ] = False,
    workspace: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Run in a copy of this folder. Example: --workspace ."),
    ] = None,
    cwd: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Run in this folder, on workers that have it; with --workspace one in the copy. Example: --cwd "
            "/data/run",
        ),
    ] = None,
    pip: Annotated[
        list[str] | None,
        typer.Option(metavar="PACKAGE", help="A package that it needs; repeatable. Example: --pip 'numpy>=2'"),
    ] = None,
    requirements: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Packages that it needs. Example: --requirements requirements.txt"),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(
            metavar="PYTHON",
            help="A version, or the path of an interpreter or environment. Example: --python 3.12, --python .venv",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="For the task's environment; repeatable. Example: --env MODE=full"),
    ] = None,
    env_file: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="Lines of NAME=VALUE for the environment; repeatable. Example: --env-file .env"
        ),
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A variable of this shell, kept out of records and logs; repeatable. Example: --secret HF_TOKEN",
        ),
    ] = None,
    ports: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="A free port, told in FLUSTER_PORT_<NAME>; repeatable. Example: --ports http"
        ),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(
            metavar="IMAGE", help="The container image, where workers have containers. Example: --image python:3.12"
        ),
    ] = None,
    replicas: Annotated[
        int, typer.Option(metavar="COUNT", min=1, help="How many tasks run the command. Example: --replicas 4")
    ] = 1,
    array: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST-LAST[:STEP][%MAX]",
            help="Independent tasks, each with its number in FLUSTER_ARRAY_ID, at most MAX at once. Example: --array "
            "0-99%8",
        ),
    ] = None,
    gang: Annotated[
        bool, typer.Option("--gang", help="Start all tasks together, or none. Example: --gang --replicas 4")
    ] = False,
    retries: Annotated[
        int,
        typer.Option(metavar="COUNT", min=0, help="How often a task that fails is tried again. Example: --retries 2"),
    ] = 0,
    max_task_failures: Annotated[
        int,
        typer.Option(
            metavar="COUNT",
            min=0,
            help="Tasks that may fail before the rest is stopped. Example: --max-task-failures 3",
        ),
    ] = 0,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", max=MAX_SECONDS, help="Stop an attempt that runs for longer. Example: --timeout 3600"
        ),
    ] = None,
    scheduling_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            max=MAX_SECONDS,
            help="Give up when no worker has room for so long. Example: --scheduling-timeout 600",
        ),
    ] = None,
    priority: Annotated[
        int,
        typer.Option(
            min=-1_000, max=1_000, help="Its tasks go before those of a lower priority. Example: --priority 10"
        ),
    ] = 0,
    on_disconnect: Annotated[
        Literal["stop", "continue"],
        typer.Option(
            help="Tasks of a worker that is not heard: stop them before they are retried, or let them run on beside "
            "their retry. Example: --on-disconnect continue"
        ),
    ] = "stop",
    detached: Annotated[
        bool,
        typer.Option("--detached", help="Within a job: live on when that ends. Example: --detached -- python serve.py"),
    ] = False,
    job_id: Annotated[
        str | None, typer.Option(metavar="ID", help="Default: made from the name. Example: --job-id nightly-07")
    ] = None,
    on_conflict: Annotated[
        Literal["error", "keep", "replace"],
        typer.Option(
            help="If a job of that id exists: fail; use it unless it failed; stop it and take its place. Example: "
            "--on-conflict keep"
        ),
    ] = "error",
    after: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Start when that job has succeeded; repeatable. Example: --after prepare-3f2a"),
    ] = None,
    after_failure: Annotated[
        Literal["fail", "run"],
        typer.Option(help="What to do if such a job did not succeed. Example: --after-failure run"),
    ] = "fail",
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the job, and end with its outcome. Example: --wait -- make")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="The same, and show what it prints. Example: --follow -- make")
    ] = False,
) -> None:
    """Have the cluster run a command as a job, and print the job's id.

    Options stand before the command; all that follows it belongs to it. The command runs in a copy of --workspace; else
    in --cwd; else in this folder, where the worker shares it; else in an empty one. With --follow stdout is the job's,
    and its id goes to stderr. Ctrl-C ends the waiting, not the job.

    Try:
      fluster submit --cpu 2 --env MODE=full -- python train.py --epochs 3
      fluster submit --workspace . --pip 'numpy>=2' --gpu h100:8 --follow -- python train.py
      fluster submit --array 0-99%8 -- sh -c 'python part.py $FLUSTER_ARRAY_ID'
      job=$(fluster submit -- sleep 60); fluster cancel $job
      fluster submit --after prepare-3f2a -- python train.py
      fluster submit --on worker-1 --now --follow -- df -h
    """
    options = Options.of(context)
    for option, given in {
        "--name": name,
        "--label": label,
        "--resource": resource,
        "--on": on,
        "--cwd": cwd,
        "--pip": pip,
        "--python": python,
        "--secret": secret,
        "--ports": ports,
        "--image": image,
        "--job-id": job_id,
        "--after": after,
    }.items():
        refuse_empty(option, given)
    if now and on is None:
        raise CommandError("--now: name the worker too, such as --on worker-1", ExitCode.USAGE)
    request = make_request(
        command,
        name=name,
        resources=make_resources(cpu, memory, gpu, [*(label or []), *only_on(on)], disk=disk, resources=resource or []),
        environment={
            "workspace": folder_option(workspace),
            "cwd": str(Path(cwd).absolute()) if cwd is not None and workspace is None else cwd,
            "pip_packages": tuple(pip or ()),
            "requirements": text_option("--requirements", requirements),
            "python": python_option(python),
            "env_vars": variables_option(env_file or [], env or []),
            "secrets": tuple(secret or ()),
            "image": image,
        },
        ports=tuple(ports or ()),
        replicas=replicas,
        array=array_option(array),
        gang=gang,
        max_retries_failure=retries,
        max_task_failures=max_task_failures,
        timeout_s=timeout,
        scheduling_timeout_s=scheduling_timeout,
        priority=priority,
        on_disconnect=on_disconnect,
        detached=detached,
        job_id=job_id,
        on_conflict=on_conflict,
        after_failure=after_failure,
    )
    check_secrets(request)
    with options.connect() as cluster:
        dependencies = tuple(find_job(cluster, each) for each in after or ())
        request = request.model_copy(update={"after": dependencies})
        if now and on is not None:
            launched = at_worker(cluster, on, lambda worker: cluster.run_on_worker(worker, request), in_full=True)
        else:
            launched = cluster.launch(request)
            if on is not None and (unknown := unknown_worker(cluster, on)) is not None:
                say(f"{unknown} (job {launched} waits until one of that name comes)")
        if not wait and not follow:
            write_json({"job_id": launched}) if options.json else write(launched)
            return
        if follow:
            say(f"job {launched}")
        elif not options.json:
            write(launched)
        seen = None
        try:
            if follow:
                seen = print_logs(
                    cluster, launched, options, follow=True, numbered=request.replicas > 1, array=request.array
                )
            info = cluster.wait(launched) if follow or options.json else _wait_shown(cluster, launched)
        except KeyboardInterrupt:
            say(f"job {launched} goes on: `fluster logs -f {launched}` shows it, `fluster cancel {launched}` ends it")
            raise
    if options.json and not follow:
        write_json(dumped(info))
    if not succeeded(info):
        raise CommandError(outcome(info, seen=seen), ExitCode.FAILED)


def _wait_shown(cluster: Cluster, job_id: JobId) -> JobInfo:
    """The job once it has finished. Meanwhile stderr shows how far it is, if that is a terminal and the job reports
    it.
    """
    if not sys.stderr.isatty():
        return cluster.wait(job_id)
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.text import Text

    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with (
        Progress(*columns, console=Console(stderr=True), transient=True) as shown,
        closing(cluster.watch(job_id)) as infos,  # type: ignore[type-var]  # it is a generator
    ):
        bar = shown.add_task("", total=None, visible=False)
        for info in infos:
            if info.progress is not None:
                text = Text(one_line(info.progress_message)).plain
                shown.update(bar, total=1.0, completed=info.progress, description=text, visible=True)
            if info.status.finished():
                return info
    return cluster.wait(job_id)
