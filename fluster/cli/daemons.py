"""Daemons of a cluster, started from the command line with their settings as options."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import random
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fluster.cli.common.exit_codes import CommandError, ExitCode, say
from fluster.cli.common.options import Options, refuse_empty, resources_option
from fluster.local_setup import OPTIONS_VARIABLE, default_state_dir, default_worker_id

if TYPE_CHECKING:
    from fluster_bus.trust.join_tokens import JoinedFolder

ADDRESS_VARIABLE, CREDENTIALS_VARIABLE = "FLUSTER_CLUSTER_ADDRESS", "FLUSTER_CREDENTIALS"
_JOB_CREDENTIALS = "job_credentials"
_JOIN_VARIABLE = "FLUSTER_JOIN"
_JOINED_FOLDER = "joined"  # in the state folder
_PAUSE_S = 2.0
_SAY_WAITING_S = 30.0


@dataclass(frozen=True)
class Setting:
    """A setting of a daemon: its variable in the environment, how its value is written, what it is for."""

    variable: str
    metavar: str
    help: str
    is_repeatable: bool = False  # what is given several times counts together, as does what stands between commas
    singular: bool = False  # it may be spelt so too, as other commands have it

    @property
    def name(self) -> str:
        return self.variable.removeprefix("FLUSTER_").lower()

    @property
    def options(self) -> tuple[str, ...]:
        """How it is spelt."""
        plural = "--" + self.name.removesuffix("_s").replace("_", "-")
        return (plural, plural.removesuffix("s")) if self.singular or self.is_repeatable else (plural,)


_FOR_BOTH = (
    Setting("FLUSTER_CREDENTIALS", "FILE", "User and password, for an address without."),
    Setting("FLUSTER_CA", "FILE", "Certificates (PEM) of who signed those of the servers, for an address without."),
    Setting(
        "FLUSTER_NAMESPACES",
        "NAME,…",
        "The cluster's namespaces; of a worker, those whose jobs it runs. Default: default.",
    ),
    Setting(
        "FLUSTER_ALIVE_FILE", "FILE", "Touched every 10 s while the daemon is ready and hears itself over the bus."
    ),
    Setting("FLUSTER_PING_INTERVAL_S", "SECONDS", "Between the pings of its connections. Default: 5."),
    Setting("FLUSTER_PINGS_UNANSWERED", "COUNT", "After so many a connection is made anew. Default: 2."),
)
_FENCES = (
    Setting("FLUSTER_HEARTBEAT_S", "SECONDS", "Between the heartbeats of workers. Default: 5."),
    Setting("FLUSTER_FENCE_AFTER_S", "SECONDS", "After so long without a controller, tasks are ended. Default: 90."),
    Setting("FLUSTER_KILL_GRACE_S", "SECONDS", "Between SIGTERM and SIGKILL of a task. Default: 10."),
    Setting(
        "FLUSTER_WORKER_TIMEOUT_S",
        "SECONDS",
        "After so long without a heartbeat a worker is lost; more than the three before it together. Default: 120.",
    ),
)
CONTROLLER_SETTINGS = (
    *_FOR_BOTH,
    Setting("FLUSTER_SIGNING_KEYS", "FILE", "Of `fluster token keys`: by them it admits workers that join by a token."),
    Setting("FLUSTER_CONTROLLER_ID", "NAME", "Started again under the same one, it leads at once if it did before."),
    Setting(
        "FLUSTER_OWNER_LEASE_S", "SECONDS", "What a program owns ends when it is silent for so long. Default: 600."
    ),
    Setting("FLUSTER_ENDPOINT_LEASE_S", "SECONDS", "Of endpoints of programs outside of jobs, 1 or more. Default: 10."),
    Setting("FLUSTER_SEAT_LEASE_S", "SECONDS", "Of singletons and durable actors, 1 to 3600. Default: 10."),
    *_FENCES,
    Setting("FLUSTER_UNSCHEDULABLE_AFTER_S", "SECONDS", "Until a job that fits no worker is given up. Default: 60."),
    Setting("FLUSTER_LEADER_LEASE_S", "SECONDS", "A leader that is silent for so long is followed. Default: 6."),
    Setting("FLUSTER_RESERVE_AFTER_S", "SECONDS", "Until an overtaken job has workers kept free for it. Default: 30."),
    Setting(
        "FLUSTER_UNFIT_RETRY_S", "SECONDS", "Until a worker that lacked what a job names is asked again. Default: 30."
    ),
    Setting("FLUSTER_RECORDS_KEPT_S", "SECONDS", "How long records of finished jobs are kept. Default: 604800."),
    Setting("FLUSTER_MAX_RECORDS", "COUNT", "How many of them a namespace keeps. Default: 25000."),
    Setting("FLUSTER_RECORDS_KEPT_AT_LEAST_S", "SECONDS", "How long, however many there are, at least. Default: 300."),
    Setting("FLUSTER_RECORDS_SURE_AFTER_S", "SECONDS", "It must run so long to remove one for its age. Default: 3600."),
    Setting(
        "FLUSTER_REPLICAS",
        "COUNT",
        "How many servers keep each stream, 1 or 3. Default: 3 where the group has as many; copies are never given up.",
    ),
    Setting(
        "FLUSTER_NAMESPACE_BUDGET",
        "SIZE",
        "Of all that a namespace has in the store. Default: the store less 1GiB, divided by the namespaces; at most "
        "12GiB.",
    ),
    Setting("FLUSTER_LOGS_BUDGET", "SIZE", "Of a namespace's logs. Default: a share of its budget."),
    Setting("FLUSTER_EVENTS_BUDGET", "SIZE", "Of a namespace's events. Default: a share of its budget."),
    Setting("FLUSTER_RESULTS_BUDGET", "SIZE", "Of a namespace's results. Default: a share of its budget."),
    Setting("FLUSTER_RESULTS_KEPT_S", "SECONDS", "Results are kept. Default: 604800, or as their stream does."),
    Setting("FLUSTER_CALLS_BUDGET", "SIZE", "Of durable actors' calls. Default: a share of its budget."),
    Setting("FLUSTER_CALLS_KEPT_S", "SECONDS", "They wait at most. Default: 604800, or as their stream has it."),
    Setting(
        "FLUSTER_MAX_CALLS_PER_ACTOR", "COUNT", "They are at most so many. Default: 100000, or as their stream has it."
    ),
    Setting("FLUSTER_MAX_CALL", "SIZE", "Of one, 4KiB to 8MiB. Default: 1MiB, or as their stream has it."),
    Setting("FLUSTER_WORKSPACES_KEPT_S", "SECONDS", "Stored workspaces are kept, 604800 at least. Default: 604800."),
    Setting(
        "FLUSTER_PAYLOADS_KEPT_S", "SECONDS", "Stored arguments and results are kept, 14400 at least. Default: 14400."
    ),
    Setting(
        "FLUSTER_REQUESTS_KEPT_S",
        "SECONDS",
        "Large requests of jobs that are not recorded yet are kept, 14400 at least. Default: 604800.",
    ),
    Setting("FLUSTER_SECRETS_KEPT_S", "SECONDS", "Secrets of a job are kept at most. Default: 2592000."),
    Setting(
        "FLUSTER_MAX_SECRETS", "COUNT", "Jobs of a namespace that have some; those of more are refused. Default: 20000."
    ),
    Setting("FLUSTER_SECRETS_SWEEP_S", "SECONDS", "Between two looks for secrets of no job. Default: 60."),
    Setting("FLUSTER_SECRETS_ORPHANED_S", "SECONDS", "How long these are left. Default: 600."),
    Setting("FLUSTER_HISTORY_KEPT_S", "SECONDS", "Logs and events are kept. Default: 604800, or as their streams do."),
)
WORKER_SETTINGS = (
    *_FOR_BOTH,
    Setting(
        "FLUSTER_JOIN",
        "TOKEN|FILE",
        "A join token, or a file with one: its credentials are kept in the state folder. On a command line others of "
        "the machine see it.",
    ),
    Setting(
        "FLUSTER_WORKER_ID", "NAME", "It adopts its tasks if it comes back under the same one. Default: the host's."
    ),
    Setting(
        "FLUSTER_JOB_CREDENTIALS_DIR",
        "FOLDER",
        "Files of jobs' credentials. Without --namespaces it serves the namespaces of all that lie there, and of "
        "those that come while it runs.",
    ),
    Setting("FLUSTER_STATE_DIR", "FOLDER", "What it must find again. Default: ~/.fluster/worker."),
    Setting("FLUSTER_CPUS", "CPUS", "CPUs that it offers. Default: those that it may use."),
    Setting("FLUSTER_MEMORY", "SIZE", "Memory that it offers, such as 32GB. Default: the machine's."),
    Setting("FLUSTER_DISK", "SIZE", "Disk that it offers. Default: what is free in the state folder."),
    Setting(
        "FLUSTER_GPUS", "MODEL:COUNT", "GPUs that it offers, 0 for none. Default: what nvidia-smi finds.", singular=True
    ),
    Setting("FLUSTER_GPU_MASK", "index|uuid", "How tasks find their GPUs in CUDA_VISIBLE_DEVICES. Default: index."),
    Setting("FLUSTER_GPU_LOCKS", "FOLDER", "With the locks of the machine's GPUs. Default: /run/lock, else /tmp."),
    Setting("FLUSTER_LABELS", "KEY=VALUE,…", "By what it differs from others.", is_repeatable=True),
    Setting("FLUSTER_RESOURCES", "NAME=COUNT,…", "What else it has, such as license=4.", is_repeatable=True),
    Setting("FLUSTER_MAX_CONCURRENT_JOBS", "COUNT", "Tasks that it has at once. Default: as many as have room."),
    Setting("FLUSTER_ENFORCE_LIMITS", "auto|always|never", "Hold tasks to their CPUs and memory. Default: auto."),
    Setting("FLUSTER_RUNTIME", "process|docker|auto", "How tasks run. Default: process."),
    Setting("FLUSTER_DOCKER_HOST", "URL", "Of the Docker engine."),
    Setting("FLUSTER_IMAGE", "IMAGE", "For tasks in containers that name none."),
    Setting("FLUSTER_CONTAINER_NETWORK", "NAME", "Of containers. Default: host."),
    Setting("FLUSTER_MOUNT_ROOTS", "FOLDER,…", "Below these, jobs may have folders mounted, read-only."),
    Setting("FLUSTER_CONTAINER_PROFILE", "default|gpu|trusted", "What tasks in containers may."),
    Setting("FLUSTER_CONTAINER_SHM_SIZE", "SIZE", "Of /dev/shm in containers."),
    Setting("FLUSTER_CONTAINER_ULIMITS", "NAME=SOFT:HARD,…", "Limits of containers, such as nofile=1024:65536."),
    Setting("FLUSTER_BUILD_NETWORK", "NAME", "For builds of images. Default: that of containers."),
    Setting("FLUSTER_BUILD_CA", "FILE", "Certificates that builds trust."),
    Setting(
        "FLUSTER_BUILD_TIMEOUT_S", "SECONDS", "For an environment of a job, made by uv or as an image. Default: 1800."
    ),
    Setting("FLUSTER_MAX_IMAGES", "COUNT", "Built images that are kept. Default: 50."),
    Setting("FLUSTER_DRAIN_TIMEOUT_S", "SECONDS", "For its tasks after SIGTERM. Default: 60."),
    *_FENCES,
    Setting("FLUSTER_HOLD_S", "SECONDS", "Without a controller, gangs' holds are released after. Default: 20."),
    Setting("FLUSTER_WORKSPACES_CACHE", "SIZE", "Disk for workspaces that are not in use. Default: 8GiB."),
    Setting("FLUSTER_ENVIRONMENTS_CACHE", "SIZE", "Disk for environments that are not in use. Default: 32GiB."),
    Setting("FLUSTER_MAX_LOG", "SIZE", "Kept of each stream of a task. Default: 64MiB."),
    Setting("FLUSTER_MAX_LOG_LINE", "SIZE", "Of a line, 1KiB to 128KiB; longer ones come in pieces. Default: 64KiB."),
    Setting("FLUSTER_MAX_PROCESSES", "COUNT", "Of a task, with threads, where limits are enforced. Default: 16384."),
    Setting(
        "FLUSTER_LEAST_FREE_DISK",
        "SIZE",
        "With less at its state folder it takes no work until there is twice as much. Default: 32MiB.",
    ),
    Setting("FLUSTER_ADVERTISED_HOST", "HOST", "Where tasks on other workers reach this machine."),
)


def start_controller(context: typer.Context, **values: str | Sequence[str] | None) -> None:
    """Run a controller until SIGTERM or Ctrl-C. Several may run: one leads, the others stand by.

    The options are the settings that its environment has; one that is given goes before the variable.

    Try:
      fluster --address credentials/service.json controller start --namespaces default,team-a
    """
    _become("fluster_services.controller", context, CONTROLLER_SETTINGS, values)


def start_worker(
    context: typer.Context, job_credentials: Sequence[str] = (), **values: str | Sequence[str] | None
) -> None:
    """Run a worker on this machine until it has drained, by request or after SIGTERM or Ctrl-C.

    The options are the settings that its environment has; one that is given goes before the variable. It hands the
    credentials of --job-credentials to the jobs of their namespace. With --join it gets its own, and those of its jobs,
    for a token, keeps them in its state folder, and uses them at its next start.

    Try:
      fluster --address credentials/worker.json worker start --cpus 8 --job-credentials default=credentials/job_default.json
      fluster worker start --join join.token
    """
    from fluster_bus.core.roles import Role, User

    files = {}
    for text in job_credentials or ():
        match = re.fullmatch(r"([A-Za-z0-9_-]+)=(.+)", text)
        if match is None:
            raise CommandError(f"--job-credentials {text}: write NAMESPACE=FILE", ExitCode.USAGE)
        files[User(Role.JOB, match[1]).credentials_variable] = match[2]
    resources_option(_as_text(values["resources"]) or "", "--resources")
    for setting in WORKER_SETTINGS:
        if setting.variable == _JOIN_VARIABLE and _is_option(context, setting):
            refuse_empty(setting.options[0], values[setting.name])
    joined = _joined_environment(
        _as_text(values.pop("join")),
        has_address=Options.of(context).address is not None or ADDRESS_VARIABLE in os.environ,
        worker_id=_as_text(values["worker_id"]),
        state_dir=_as_text(values["state_dir"]),
        namespaces=_as_text(values["namespaces"]),
    )
    os.environ.pop(_JOIN_VARIABLE, None)  # tasks may see a worker's environment, and the token may have uses left
    settings = [each for each in WORKER_SETTINGS if each.variable != _JOIN_VARIABLE]
    if joined is None:
        _become("fluster_services.worker", context, settings, values, files)
        return
    if Options.of(context).address is not None:
        raise CommandError("--join names the servers, as the token does: leave --address out", ExitCode.USAGE)
    os.environ.pop(CREDENTIALS_VARIABLE, None)
    _become("fluster_services.worker", context, settings, {**values, "credentials": None}, {**joined, **files})


def _become(
    module: str,
    context: typer.Context,
    settings: Sequence[Setting],
    values: Mapping[str, str | Sequence[str] | None],
    more: dict[str, str] | None = None,
) -> None:
    """Be the daemon, in a process that has nothing of the command line's but its id."""
    address = Options.of(context).address
    given = {setting.variable: _as_text(values[setting.name]) for setting in settings}
    options = {setting.variable: setting.options[0] for setting in settings if _is_option(context, setting)}
    for setting in settings:
        if setting.variable in options:
            refuse_empty(options[setting.variable], values[setting.name])
    given |= {ADDRESS_VARIABLE: address, OPTIONS_VARIABLE: json.dumps(options), **(more or {})}
    environment = {**os.environ, **{name: value for name, value in given.items() if value is not None}}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", module], environment)


def _is_option(context: typer.Context, setting: Setting) -> bool:
    source = context.get_parameter_source(setting.name)
    return source is not None and source.name == "COMMANDLINE"


def _as_text(value: str | Sequence[str] | None) -> str | None:
    return value if value is None or isinstance(value, str) else ",".join(value) or None


def with_options(command: Callable[..., None], settings: Sequence[Setting]) -> Callable[..., None]:
    """The command with an option for each setting."""
    own = [
        each
        for each in inspect.signature(command).parameters.values()
        if each.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    options = {
        setting.name: Annotated[
            list[str] | None if setting.is_repeatable else str | None,
            typer.Option(
                *setting.options,
                metavar=setting.metavar,
                help=setting.help,
                envvar=setting.variable,
            ),
        ]
        for setting in settings
    }
    annotations: dict[str, object] = {"context": typer.Context, **options}
    if any(each.name == _JOB_CREDENTIALS for each in own):
        annotations[_JOB_CREDENTIALS] = Annotated[
            list[str] | None,
            typer.Option("--job-credentials", metavar="NAMESPACE=FILE", help="Of a namespace's jobs; repeatable."),
        ]

    def run(*args: object, **kwargs: object) -> None:
        command(*args, **kwargs)

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(
            name, keyword, default=inspect.Parameter.empty if name == "context" else None, annotation=kind
        )
        for name, kind in annotations.items()
    ]
    run.__name__, run.__doc__, run.__annotations__ = command.__name__, command.__doc__, annotations
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    return run


# ---- joining by a token --------------------------------------------------------------------------------


def _joined_environment(
    token: str | None, *, has_address: bool, worker_id: str | None, state_dir: str | None, namespaces: str | None
) -> dict[str, str] | None:
    """{variable: value} by which a worker uses the credentials that it got for its token, now or before; None for one
    without.

    Waits until servers and a controller answer. Raises CommandError, BusError.
    """
    if token is None and has_address:
        return None
    folder = (Path(state_dir) if state_dir else default_state_dir()) / _JOINED_FOLDER
    if token is None and not (folder / "worker.creds").exists():
        return None
    from fluster_bus.access.address import ADDRESS_VARIABLE
    from fluster_bus.core.roles import Role, User
    from fluster_bus.trust.join_tokens import JoinedFolder

    joined = JoinedFolder(folder)
    if joined.worker_file.exists():
        if token is not None:
            say(f"uses the credentials in {folder}, for which it has joined before; without that folder it joins anew")
    else:
        names = [each.strip() for each in (namespaces or "").split(",") if each.strip()]
        _join(token or "", worker_id or default_worker_id(), joined, names)
    jobs = {User(Role.JOB, each).credentials_variable: str(file) for each, file in joined.job_files().items()}
    return {ADDRESS_VARIABLE: str(joined.worker_file), **jobs}


def _join(text: str, worker_id: str, folder: JoinedFolder, namespaces: list[str]) -> None:
    from fluster_bus.core.errors import (
        BusyError,
        ConnectError,
        CredentialsError,
        DisconnectedError,
        NoRespondersError,
        RequestTimeoutError,
        ServiceError,
    )
    from fluster_bus.trust.join_tokens import JoinToken, join

    token, say_at = JoinToken.parse(text), 0.0
    while True:
        try:
            asyncio.run(join(token, worker_id, folder, namespaces))
        except CredentialsError as error:
            raise CommandError(
                f"the join token {token.token_id} is not taken: it has expired or was revoked, or is of another "
                f"cluster ({error})",
                ExitCode.NO_CLUSTER,
            ) from error
        except (BusyError, ConnectError, DisconnectedError, NoRespondersError, RequestTimeoutError) as error:
            if time.monotonic() >= say_at:
                say(f"waits for the cluster, and tries again each few seconds: {error}")
                say_at = time.monotonic() + _SAY_WAITING_S
            time.sleep(_PAUSE_S * random.uniform(0.5, 1))
        except ServiceError as error:
            raise CommandError(str(error), ExitCode.NO_CLUSTER) from error
        else:
            say(f"{worker_id} has joined by the token {token.token_id}")
            return
