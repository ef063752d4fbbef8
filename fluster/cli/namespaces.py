"""The namespaces of a running cluster: added, changed, dropped and listed by its operators."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from fluster.cli.exit_codes import CommandError, ExitCode, say
from fluster.cli.options import Options, wrong_option
from fluster.cli.output import size, write_json, write_table

if TYPE_CHECKING:
    from fluster.cluster.namespace_admin import NamespaceAdmin
    from fluster_bus.messages import NamespaceQuota
    from fluster_bus.messages.namespaces import NamespaceStatus, QuotaName

_Answer = TypeVar("_Answer")

Name = Annotated[str, typer.Argument(metavar="NAME", help="Of the namespace: letters, digits, `_` and `-`.")]
Cpus = Annotated[
    str | None,
    typer.Option("--cpus", metavar="N", help="CPUs that its tasks may have at once; `none`: as many as there are."),
]
Gpus = Annotated[
    str | None,
    typer.Option("--gpus", metavar="N", help="GPUs that its tasks may have at once; `none`: as many as there are."),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        help="Memory that its tasks may have at once, such as 64GiB; `none`: as much as there is.",
    ),
]
WaitingJobs = Annotated[
    str | None,
    typer.Option(
        "--waiting-jobs", metavar="N", help="Jobs that may wait; `none`: as many as its share of the store holds."
    ),
]
MaxPriority = Annotated[
    int | None,
    typer.Option(
        "--max-priority",
        metavar="N",
        min=-1_000,
        max=1_000,
        help="A higher priority of its jobs counts as this one beside jobs of other namespaces; 0 unless set.",
    ),
]
Weight = Annotated[
    float | None, typer.Option("--weight", metavar="N", help="Its share where several namespaces wait; 1 unless set.")
]
_NONE = "none"


def add(
    context: typer.Context,
    name: Name,
    *,
    cpus: Cpus = None,
    gpus: Gpus = None,
    memory: Memory = None,
    waiting_jobs: WaitingJobs = None,
    max_priority: MaxPriority = None,
    weight: Weight = None,
) -> None:
    """Add a namespace to the running cluster. It is there when this returns; its users need credentials.

    Try:
      fluster namespace add team-a --cpus 64 --memory 256GiB
      fluster credentials add client alice --namespace team-a
    """
    from fluster_bus.messages import NamespaceQuota
    from fluster_bus.names import check_namespace

    check_namespace(name)
    _check_weight(weight)
    quota = NamespaceQuota(**_quota(cpus, gpus, memory, waiting_jobs, max_priority))  # type: ignore[arg-type]
    _done(context, lambda admin: admin.add(name, quota, weight=1.0 if weight is None else weight))
    say(f"namespace {name} is there")


def set_(
    context: typer.Context,
    name: Name,
    *,
    cpus: Cpus = None,
    gpus: Gpus = None,
    memory: Memory = None,
    waiting_jobs: WaitingJobs = None,
    max_priority: MaxPriority = None,
    weight: Weight = None,
) -> None:
    """Change the quota or the weight of a namespace. What is not named stays as it is.

    Try:
      fluster namespace set team-a --cpus 128 --gpus none
    """
    _check_weight(weight)
    quota = _quota(cpus, gpus, memory, waiting_jobs, max_priority)
    if not quota and weight is None:
        raise CommandError(
            "nothing is to be changed: give --cpus, --gpus, --memory, --waiting-jobs, --max-priority or --weight",
            ExitCode.USAGE,
        )
    record = _done(context, lambda admin: admin.set(name, quota, weight=weight))
    say(f"namespace {name} may have {_told(record.quota)}; its weight is {record.weight:g}")


def drop(
    context: typer.Context,
    name: Name,
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Also while it has unfinished jobs, which are stopped first.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for its name again.")] = False,
) -> None:
    """Drop a namespace, with its records, logs, results and files. It is gone when this returns; nothing brings it back.

    The credentials of its users stay good, for a namespace that gets the name later too: revoke them.

    Try:
      fluster namespace drop team-a
      fluster namespace drop team-a --force --yes
    """
    if not yes:
        _confirm(name)
    told: list[int] = []

    def on_waiting(unfinished: int) -> None:
        if unfinished and [unfinished] != told[-1:]:
            told.append(unfinished)
            say(f"{unfinished} jobs of namespace {name} are being stopped")

    _done(context, lambda admin: admin.drop(name, force=force, on_waiting=on_waiting))
    say(f"namespace {name} is gone; `fluster credentials ls` shows whose credentials were for it")


def ls(context: typer.Context) -> None:
    """List the namespaces: what each may have, what waits and runs, and how much of its share of the store it uses.

    Try:
      fluster namespace ls
    """
    found = _done(context, lambda admin: admin.list())
    if Options.of(context).json:
        write_json([_as_json(each) for each in found])
        return
    rows = [
        [
            each.record.name,
            str(each.record.state),
            _told(each.record.quota),
            f"{each.record.weight:g}",
            str(each.waiting_jobs),
            str(each.running_jobs),
            f"{size(each.store_used)} of {size(each.store_share)}",
        ]
        for each in found
    ]
    write_table(["NAME", "STATE", "QUOTA", "WEIGHT", "WAITING", "RUNNING", "STORE"], rows)


def _as_json(status: NamespaceStatus) -> dict[str, Any]:
    record = status.record
    return {
        "name": record.name,
        "state": str(record.state),
        "quota": {
            name: getattr(record.quota, name) for name in ("cpus", "gpus", "memory", "waiting_jobs", "max_priority")
        },
        "weight": record.weight,
        "waiting_jobs": status.waiting_jobs,
        "running_jobs": status.running_jobs,
        "store_used": status.store_used,
        "store_share": status.store_share,
    }


def _told(quota: NamespaceQuota) -> str:
    parts = [
        f"{quota.cpus:g} CPUs" if quota.cpus is not None else "",
        f"{quota.gpus} GPUs" if quota.gpus is not None else "",
        size(quota.memory) if quota.memory is not None else "",
        f"{quota.waiting_jobs} waiting jobs" if quota.waiting_jobs is not None else "",
    ]
    told = ", ".join(part for part in parts if part) or "all there is"
    return told + (f", priorities up to {quota.max_priority}" if quota.max_priority else "")


def _quota(
    cpus: str | None, gpus: str | None, memory: str | None, waiting_jobs: str | None, max_priority: int | None
) -> dict[QuotaName, int | float | None]:
    """What was given, None for `none`. Raises CommandError."""
    from fluster_bus.messages import parse_size

    quota: dict[QuotaName, int | float | None] = {}
    if cpus is not None:
        quota["cpus"] = _value("--cpus", cpus, float)
    if gpus is not None:
        quota["gpus"] = _value("--gpus", gpus, int)
    if memory is not None:
        quota["memory"] = _value("--memory", memory, parse_size)
    if waiting_jobs is not None:
        quota["waiting_jobs"] = _value("--waiting-jobs", waiting_jobs, int)
    if max_priority is not None:
        quota["max_priority"] = max_priority
    return quota


def _value(option: str, text: str, read: Callable[[str], int | float]) -> int | float | None:
    if text.strip().lower() == _NONE:
        return None
    try:
        value = read(text)
    except ValueError as error:
        wanted = "a size such as 64GiB" if option == "--memory" else "a number"
        raise wrong_option(option, text, f"give {wanted}, or `{_NONE}`") from error
    if not 0 <= value <= 1 << 60:
        raise wrong_option(option, text, "give a number from 0, or `none`")
    return value


def _check_weight(weight: float | None) -> None:
    from fluster_bus.messages.namespaces import MAX_WEIGHT

    if weight is not None and not 0 < weight <= MAX_WEIGHT:
        raise wrong_option("--weight", weight, f"give a number above 0, up to {MAX_WEIGHT:,.0f}")


def _confirm(name: str) -> None:
    if not sys.stdin.isatty():
        raise CommandError(
            f"all records, logs, results and files of namespace {name} would be deleted: give --yes where you cannot be asked",
            ExitCode.USAGE,
        )
    say(f"all records, logs, results and files of namespace {name} are deleted. Its name again, to go on:")
    if input().strip() != name:
        raise CommandError(f"that is not {name!r}: nothing was dropped", ExitCode.USAGE)


def _done(context: typer.Context, ask: Callable[[NamespaceAdmin], Awaitable[_Answer]]) -> _Answer:
    """What the controller answers an operator."""
    options = Options.of(context)

    async def run() -> _Answer:
        from fluster.cluster.namespace_admin import NamespaceAdmin
        from fluster.cluster.up_clusters import find_address
        from fluster_bus.address import BusAddress
        from fluster_bus.bus import Bus

        address = BusAddress.parse(options.address) if options.address is not None else find_address()
        bus = await Bus.connect(address, name="namespaces")
        try:
            return await ask(NamespaceAdmin(bus))
        finally:
            await bus.close()

    return asyncio.run(run())
