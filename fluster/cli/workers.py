"""Workers: listed, looked at, and sent away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fluster.cli.exit_codes import say
from fluster.cli.options import Options
from fluster.cli.output import age, size, write, write_json, write_table

if TYPE_CHECKING:
    from fluster_bus.messages import WorkerStatus

Name = Annotated[str, typer.Argument(metavar="NAME", help="The worker's name, as `fluster workers` shows it.")]


def workers(context: typer.Context) -> None:
    """List the cluster's workers: what they have, and what of it is free."""
    options = Options.of(context)
    with options.connect() as cluster:
        found = cluster.list_workers()
    if options.json:
        write_json([worker.model_dump(mode="json") for worker in found])
        return
    columns = ["WORKER", "STATE", "HEARD", "CPU FREE", "MEMORY FREE", "DEVICES FREE", "TASKS", "AGE", "LABELS", "HOST"]
    write_table(
        columns,
        [
            [
                worker.info.worker_id,
                _state(worker),
                f"{worker.silent_for_s:.0f}s ago",
                f"{worker.free.cpu:g}/{worker.info.total.cpu:g}",
                f"{size(worker.free.memory)} of {size(worker.info.total.memory)}",
                _devices(worker.free.devices, worker.info.total.devices, worker.info.total.variant),
                str(worker.running),
                age(worker.info.started_at),
                ",".join(worker.info.total.labels) or "-",
                worker.info.host,
            ]
            for worker in found
        ],
    )


def _devices(free: int, total: int, variant: str) -> str:
    return f"{free}/{total} {variant}" if total else "-"


def _state(worker: WorkerStatus) -> str:
    if not worker.alive:
        return "lost"
    return "draining" if worker.info.draining else "alive"


def drain(
    context: typer.Context,
    name: Name,
    *,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, help="Hand back what still runs then: it is tried elsewhere."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the worker has left.")] = False,
) -> None:
    """Have a worker take nothing new, wait for what runs, and leave.

    It ends with status 0, and nobody starts it again. What is handed back after the timeout costs its task nothing of
    the budget for failures.

    Try:
      fluster worker drain worker-1 --timeout 600 --wait
    """
    from fluster_bus.messages import WorkerId

    options = Options.of(context)
    with options.connect() as cluster:
        reply = cluster.drain_worker(WorkerId(name), timeout=timeout, wait=wait)
    if options.json:
        write_json(reply.model_dump(mode="json"))
    elif wait:
        write(reply.worker_id)
    else:
        say(f"{name} waits for {reply.running} attempts, then it leaves")
        write(reply.worker_id)
