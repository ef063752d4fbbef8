"""Clusters of this machine."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Literal, TypeVar

import typer

from fluster.cli.common.exit_codes import CommandError, ExitCode, say
from fluster.cli.common.options import Options, refuse_empty, resources_option, wrong_option
from fluster.cli.common.output import age, size, write, write_json, write_table
from fluster.local_setup import ADDRESS_FILE
from fluster_bus.running.blocked_waits import wait_for_item

_OPTIONS = {"labels": "label", "resources": "resource"}  # where they are not called as the arguments of LocalCluster
_GROUPS = {"timing": "--timing", "limits": "--limit"}  # the same of what has names and values
Value = TypeVar("Value")

_BACKENDS = "fluster_services.vm"  # by name: the services build on this package


def demo(
    find: Annotated[str, typer.Option(metavar="NAME", help="Tell where this identifier is used.")] = "open",
    workers: Annotated[int | None, typer.Option(min=1, max=64, help="Processes that parse; one for each core.")] = None,
    limit_files: Annotated[int | None, typer.Option(min=1, help="Only so many files, for a quick look.")] = None,
) -> None:
    """Index the source of Python's standard library on a cluster of this machine, and check the result.

    Starts a cluster, a job on it, actors that keep the index and workers that parse; then counts again in a single
    process. Exit code 1 when the counts differ. It is the program in examples/stdlib_index.py.

    Try:
      fluster demo --find open
    """
    from fluster import demo as stdlib_index

    if not stdlib_index.run(find, workers, limit_files):
        raise typer.Exit(ExitCode.FAILED)


def up(
    context: typer.Context,
    *,
    workers: Annotated[int, typer.Option(min=1, max=256, help="How many workers share its CPUs and memory.")] = 1,
    cpu: Annotated[float | None, typer.Option(help="CPUs that it offers; at least 16, 4 for each core.")] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory that it offers, such as 8GB.")] = None,
    disk: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Disk that it offers; what is free, unless given. Example: --disk 1TB"),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus",
            "--gpu",
            metavar="MODEL:COUNT",
            help="GPUs that it offers: a model, a count or both, or 0; those that nvidia-smi lists, unless given. "
            "Example: --gpus h100:8",
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A label of its workers; repeatable. Example: --label zone=a"),
    ] = None,
    resource: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=COUNT",
            help="Of something else, what all workers have together; repeatable. Example: --resource license=4",
        ),
    ] = None,
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A namespace that it has, instead of 'default'; repeatable. Example: --namespace team-a",
        ),
    ] = None,
    store_dir: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep records and logs here, and go on with what is there.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Of the nats-server; 0 takes a free one.")] = 0,
    enforce_limits: Annotated[
        bool, typer.Option("--enforce-limits", help="Hold tasks to their CPUs and memory; needs cgroups.")
    ] = False,
    runtime: Annotated[
        Literal["process", "docker", "auto"],
        typer.Option(help="Tasks run as processes, in containers, or in containers where a Docker engine answers."),
    ] = "process",
    docker_host: Annotated[
        str | None, typer.Option(metavar="URL", help="Of the Docker engine; else DOCKER_HOST, or the machine's.")
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(metavar="IMAGE", help="For tasks in containers that name none, or for --backend docker."),
    ] = None,
    timing: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SECONDS",
            help="A time of the cluster, by the name of its setting FLUSTER_…; repeatable. Example: --timing "
            "seat_lease_s=3",
        ),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A limit of its records, histories, caches or logs, the same; repeatable. Example: --limit "
            "max_log=1MB",
        ),
    ] = None,
    start_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="For the start, 45 unless given, with --backend 900. Example: --start-timeout 300 for a large store",
        ),
    ] = None,
    backend: Annotated[
        Literal["docker"] | None,
        typer.Option(help="Have each worker in a container of its own, held to its share of CPUs and memory."),
    ] = None,
    folder: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER",
            help="With --backend: share this folder of the machine with all containers; may be given several times.",
        ),
    ] = None,
    show_url: Annotated[
        bool, typer.Option("--show-url", help="Print the URL with its password, as the nats tool wants it.")
    ] = False,
) -> None:
    """Run a cluster on this machine until Ctrl-C, and print the line that clients have to run.

    The line names a file with the credentials that only you can read. CPUs and memory are logical: they say how much
    runs at the same time, and nothing is enforced unless asked for.

    Try:
      fluster up --workers 2 --store-dir ~/cluster
    """
    from fluster.cluster import LocalCluster
    from fluster.cluster.up_clusters import noted
    from fluster_bus.access.address import ADDRESS_VARIABLE

    if backend is not None and (runtime != "process" or enforce_limits):
        raise CommandError("--backend has no use for --runtime and --enforce-limits: leave these out", ExitCode.USAGE)
    if backend is None and runtime == "process" and (image or docker_host):
        option = "--image" if image else "--docker-host"
        raise CommandError(
            f"{option} is for tasks in containers: add --runtime docker, --runtime auto or --backend docker",
            ExitCode.USAGE,
        )
    if folder and backend is None:
        raise CommandError("--folder is for --backend docker: other workers see the machine's folders", ExitCode.USAGE)
    for option, given in {
        "--disk": disk,
        "--gpus": gpus,
        "--label": label,
        "--resource": resource,
        "--namespace": namespace,
        "--timing": timing,
        "--limit": limit,
    }.items():
        refuse_empty(option, given)
    for each in namespace or ():
        _check_namespace(each)
    namespaces = _namespaces(context, namespace)
    first = namespaces[0] if namespaces else None
    with (
        ExitStack() as note,  # it is there until all has ended
        _usage(),
        stop_signals() as signals,
        LocalCluster(
            first,
            workers,
            cpu=cpu,
            memory=_size(memory),
            disk=disk,
            gpus=gpus,
            labels=_labels(label),
            resources=resources_option(resource) if resource else None,
            store_dir=store_dir,
            port=port,
            namespaces=namespaces[1:],
            pass_secrets=False,  # users who may submit jobs here did not open this shell
            enforce_limits=enforce_limits,
            runtime=runtime,
            timing=_named("--timing", timing, _seconds),
            limits=_named("--limit", limit, str),
            start_timeout=start_timeout,
            docker_host=docker_host if backend is None else None,
            image=image if backend is None else None,
            backend=_docker_backend(image, docker_host, folder or []) if backend is not None else None,
            on_progress=say,
        ) as cluster,
    ):
        signals.is_up = True
        file = cluster.store_dir / ADDRESS_FILE
        cluster.asynchronous.bus.address.save(file)
        try:
            note.enter_context(noted(file, cluster.store_dir))
            write(f"export {ADDRESS_VARIABLE}={shlex.quote(cluster.address if show_url else str(file))}")
            say(f"the cluster is up, Ctrl-C ends it; its logs are in {cluster.store_dir / 'logs'}")
            if backend is None and not enforce_limits:
                _note_capacity(cpu, _size(memory))
            if signals.wait() == signal.SIGCHLD:
                raise CommandError("the cluster's supervisor ended: see above, and its logs", ExitCode.NO_CLUSTER)
            say("the cluster ends")
        finally:
            file.unlink(missing_ok=True)


def local(
    context: typer.Context,
    *,
    stop: Annotated[
        list[int] | None, typer.Option(metavar="PID", help="End the one of this process; may be given several times.")
    ] = None,
    stop_all: Annotated[bool, typer.Option("--stop-all", help="End all of them.")] = False,
) -> None:
    """List the clusters that you run on this machine with `fluster up`, or end them.

    They end as with Ctrl-C, and are gone when this returns. The ids of their processes are printed.

    Try:
      fluster local
      fluster local --stop-all
    """
    from fluster.cluster.up_clusters import running, wait_ended

    options = Options.of(context)
    found = running()
    unknown = set(stop or ()) - {cluster.pid for cluster in found}
    if unknown:
        pids = ", ".join(str(pid) for pid in sorted(unknown))
        raise CommandError(
            f"no `fluster up` of yours has the process id {pids}: `fluster local` lists them", ExitCode.NOT_FOUND
        )
    ended = [cluster for cluster in found if stop_all or cluster.pid in (stop or ())]
    for cluster in ended:
        os.kill(cluster.pid, signal.SIGTERM)
    for cluster in ended:
        wait_ended(cluster)
    if options.json:
        write_json([asdict(cluster) for cluster in (ended if stop or stop_all else found)])
    elif stop or stop_all:
        for cluster in ended:
            write(str(cluster.pid))
    else:
        rows = [[str(each.pid), age(each.started_at), each.address_file, each.store_dir] for each in found]
        write_table(["PID", "AGE", "ADDRESS", "STORE"], rows)


def _note_capacity(cpu: float | None, memory: int | None) -> None:
    """Say so when more was asked for than the machine has."""
    cores, bytes_ = os.cpu_count() or 1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    too_much = []
    if cpu is not None and cpu > cores:
        too_much.append(f"{cpu:g} CPUs, and this machine has {cores}")
    if memory is not None and memory > bytes_:
        too_much.append(f"{size(memory)} of memory, and this machine has {size(bytes_)}")
    for each in too_much:
        say(f"note: it offers {each}: tasks share what there is, and none is held to its part without --enforce-limits")


@contextmanager
def _usage() -> Iterator[None]:
    """What LocalCluster refuses is an option of the command."""
    from fluster.errors import ClusterStartError

    try:
        yield
    except (ValueError, ClusterStartError) as error:
        group, colon, rest = str(error).partition(": ")
        if colon and group in _GROUPS:
            raise CommandError(f"{_GROUPS[group]}: {rest}", ExitCode.USAGE) from error
        if isinstance(error, ClusterStartError):
            raise
        name, equals, rest = str(error).partition("=")  # the names of its arguments
        option = f"--{_OPTIONS.get(name, name).replace('_', '-')}" if equals and name.isidentifier() else ""
        raise CommandError(f"{option}={rest}" if option else str(error), ExitCode.USAGE) from error


class StopSignals:
    """Why the cluster is to end: signals to this process, or the end of its only child, the supervisor."""

    def __init__(self) -> None:
        self._numbers: SimpleQueue[int] = SimpleQueue()  # a signal's handler may put into it at any moment
        self.is_up = False

    def on_signal(self, number: int, _frame: object) -> None:
        if not self.is_up and number != signal.SIGCHLD:
            raise KeyboardInterrupt  # what starts is not waited for: it may take minutes
        self._numbers.put(number)

    def wait(self) -> int:
        """The number of the next signal."""
        return wait_for_item(self._numbers)


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    signals = StopSignals()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    previous = {number: signal.signal(number, signals.on_signal) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _check_namespace(name: str) -> None:
    from fluster_bus.core.errors import InvalidNameError
    from fluster_bus.core.names import check_namespace

    try:
        check_namespace(name)
    except InvalidNameError as error:
        raise wrong_option("--namespace", name, str(error)) from error


def _namespaces(context: typer.Context, given: list[str] | None) -> list[str]:
    return list(dict.fromkeys([*filter(None, [Options.of(context).namespace]), *(given or [])]))


def _docker_backend(image: str | None, docker_host: str | None, folders: Sequence[Path]) -> object:
    backends = import_module(_BACKENDS)
    try:
        made: object = backends.DockerBackend(
            image=image, docker_host=docker_host, folders=[folder.absolute() for folder in folders]
        )
    except ValueError as error:
        raise CommandError(f"--folder: {error}", ExitCode.USAGE) from error
    return made


def _named(option: str, given: Sequence[str] | None, read: Callable[[str], Value]) -> dict[str, Value]:
    """{name: value} of what was given as NAME=VALUE. Raises CommandError."""
    found = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        try:
            if not (name and equals and value):
                raise ValueError(f"{text!r} has no name or no value: write NAME=VALUE")
            found[name] = read(value)
        except ValueError as error:
            raise wrong_option(option, text, str(error)) from error
    return found


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a time: give seconds, such as 60") from None


def _labels(given: Sequence[str] | None) -> dict[str, str] | None:
    from fluster_bus.messages.parts.resources import parse_labels

    try:
        return parse_labels(",".join(given)) if given else None
    except ValueError as error:
        raise wrong_option("--label", ",".join(given or ()), str(error)) from error


def _size(text: str | None) -> int | None:
    from fluster_bus.messages import parse_size

    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise wrong_option("--memory", text, str(error)) from error
