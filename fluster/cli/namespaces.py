"""The namespaces of a running cluster: added, changed, dropped and listed by its operators."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from fluster.cli.common.exit_codes import CommandError, ExitCode, say
from fluster.cli.common.options import Options, wrong_option
from fluster.cli.common.output import size, write_json, write_table

if TYPE_CHECKING:
    from fluster.cluster.namespaces import NamespaceAdmin
    from fluster_bus.messages import NamespaceQuota
    from fluster_bus.messages.namespaces import NamespaceStatus, QuotaName

_Answer = TypeVar("_Answer")

_Name = Annotated[str, typer.Argument(metavar="NAME", help="Of the namespace: letters, digits, `_` and `-`.")]


def _option(name: str, kind: Any, metavar: str, text: str, **bounds: Any) -> Any:
    return Annotated[kind, typer.Option(name, metavar=metavar, help=text, **bounds)]


# {parameter: option} of what a namespace may have
_QUOTA = {
    "cpus": _option("--cpus", str | None, "N", "CPUs that its tasks may have at once; `none`: as many as there are."),
    "gpus": _option("--gpus", str | None, "N", "GPUs that its tasks may have at once; `none`: as many as there are."),
    "memory": _option(
        "--memory",
        str | None,
        "SIZE",
        "Memory that its tasks may have at once, such as 64GiB; `none`: as much as there is.",
    ),
    "waiting_jobs": _option(
        "--waiting-jobs", str | None, "N", "Jobs that may wait; `none`: as many as its share of the store holds."
    ),
    "max_priority": _option(
        "--max-priority",
        int | None,
        "N",
        "A higher priority of its jobs counts as this one beside jobs of other namespaces; 0 unless set.",
        min=-1_000,
        max=1_000,
    ),
    "weight": _option("--weight", float | None, "N", "Its share where several namespaces wait; 1 unless set."),
}
_NONE = "none"


@dataclass(frozen=True)
class _QuotaOptions:
    """The options as they were typed; None for those that were not."""

    cpus: str | None
    gpus: str | None
    memory: str | None
    waiting_jobs: str | None
    max_priority: int | None
    weight: float | None


def _with_quota(command: Callable[[typer.Context, str, _QuotaOptions], None]) -> Callable[..., None]:
    """The command with the options of a quota."""

    def run(context: typer.Context, name: str, **given: Any) -> None:
        command(context, name, _QuotaOptions(**given))

    kinds = {"context": typer.Context, "name": _Name, **_QUOTA}
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if name in _QUOTA else inspect.Parameter.empty,
            annotation=kind,
        )
        for name, kind in kinds.items()
    ]
    run.__name__, run.__doc__, run.__annotations__ = command.__name__, command.__doc__, kinds
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    return run


@_with_quota
def add(context: typer.Context, name: str, given: _QuotaOptions) -> None:
    """Add a namespace to the running cluster. It is there when this returns; its users need credentials.

    Try:
      fluster namespace add team-a --cpus 64 --memory 256GiB
      fluster credentials add client alice --namespace team-a
    """
    from fluster_bus.core.names import check_namespace
    from fluster_bus.messages import NamespaceQuota

    check_namespace(name)
    weight = _weight(given)
    quota = NamespaceQuota(**_quota(given))  # type: ignore[arg-type]
    _done(context, lambda admin: admin.add(name, quota, weight=1.0 if weight is None else weight))
    say(f"namespace {name} is there")


@_with_quota
def set_(context: typer.Context, name: str, given: _QuotaOptions) -> None:
    """Change the quota or the weight of a namespace. What is not named stays as it is.

    Try:
      fluster namespace set team-a --cpus 128 --gpus none
    """
    weight, quota = _weight(given), _quota(given)
    if not quota and weight is None:
        raise CommandError(
            "nothing is to be changed: give --cpus, --gpus, --memory, --waiting-jobs, --max-priority or --weight",
            ExitCode.USAGE,
        )
    record = _done(context, lambda admin: admin.set(name, quota, weight=weight))
    say(f"namespace {name} may have {_told(record.quota)}; its weight is {record.weight:g}")


def drop(
    context: typer.Context,
    name: _Name,
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Also while it has unfinished jobs, which are stopped first.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for its name again.")] = False,
) -> None:
    """Drop a namespace, with its records, logs, results and files. It is gone when this returns; nothing brings it
    back.

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


def _as_json(status: NamespaceStatus) -> dict[str, object]:
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


def _quota(given: _QuotaOptions) -> dict[QuotaName, int | float | None]:
    """What was given, None for `none`. Raises CommandError."""
    from fluster_bus.messages import parse_size

    read: dict[QuotaName, Callable[[str], int | float]] = {
        "cpus": float,
        "gpus": int,
        "memory": parse_size,
        "waiting_jobs": int,
    }
    quota: dict[QuotaName, int | float | None] = {
        name: _value(f"--{name.replace('_', '-')}", text, reader)
        for name, reader in read.items()
        if (text := getattr(given, name)) is not None
    }
    if given.max_priority is not None:
        quota["max_priority"] = given.max_priority
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


def _weight(given: _QuotaOptions) -> float | None:
    from fluster_bus.messages.namespaces import MAX_WEIGHT

    if given.weight is not None and not 0 < given.weight <= MAX_WEIGHT:
        raise wrong_option("--weight", given.weight, f"give a number above 0, up to {MAX_WEIGHT:,.0f}")
    return given.weight


def _confirm(name: str) -> None:
    if not sys.stdin.isatty():
        raise CommandError(
            f"all records, logs, results and files of namespace {name} would be deleted: give --yes where you cannot "
            "be asked",
            ExitCode.USAGE,
        )
    say(f"all records, logs, results and files of namespace {name} are deleted. Its name again, to go on:")
    if input().strip() != name:
        raise CommandError(f"that is not {name!r}: nothing was dropped", ExitCode.USAGE)


def _done(context: typer.Context, ask: Callable[[NamespaceAdmin], Awaitable[_Answer]]) -> _Answer:
    """What the controller answers an operator."""
    options = Options.of(context)

    async def run() -> _Answer:
        from fluster.cluster.namespaces import NamespaceAdmin
        from fluster.cluster.up_clusters import find_address
        from fluster_bus.access.address import BusAddress
        from fluster_bus.connection.bus import Bus

        address = BusAddress.parse(options.address) if options.address is not None else find_address()
        bus = await Bus.connect(address, name="namespaces")
        try:
            return await ask(NamespaceAdmin(bus))
        finally:
            await bus.close()

    return asyncio.run(run())
