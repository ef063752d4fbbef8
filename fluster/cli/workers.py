"""Workers and the machines that they are on: listed, looked at, and sent away."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from fluster.cli.common.exit_codes import ExitCode, one_line, say
from fluster.cli.common.options import MAX_SECONDS, Grep, Options, Since, at_worker, find_job
from fluster.cli.common.output import age, duration, print_chunks, size, write, write_json, write_table

if TYPE_CHECKING:
    from fluster.cluster import Cluster
    from fluster_bus.messages import AttemptStatus, Capacity, Message, WorkerId, WorkerStatus
    from fluster_bus.messages.nodes import NodeInfo, NodeStatus

    Reply = TypeVar("Reply", bound=Message)

Job = Annotated[str, typer.Argument(metavar="ID", help="The job's id, or its beginning.")]
Task = Annotated[
    int | None,
    typer.Option(
        min=0, help="Which of its tasks: of an array by its FLUSTER_ARRAY_ID, else counted from 0. Default: the first."
    ),
]
Attempt = Annotated[int | None, typer.Option(min=1, help="Else the newest at this worker.")]
Name = Annotated[
    str, typer.Argument(metavar="NAME", help="The worker's name, as `fluster workers` shows it, or its beginning.")
]


def workers(context: typer.Context) -> None:
    """List the cluster's workers: what they have, and what of it is free."""
    from fluster_bus.messages.parts.resources import given_labels

    options = Options.of(context)
    with options.connect() as cluster:
        found = cluster.list_workers()
    if options.json:
        write_json([worker.model_dump(mode="json") for worker in found])
        return
    columns = [
        "WORKER",
        "STATE",
        "HEARD",
        "CPU FREE",
        "MEMORY FREE",
        "DEVICES FREE",
        "OTHERS FREE",
        "TASKS",
        "AGE",
        "LABELS",
        "NAMESPACES",
        "HOST",
    ]
    write_table(
        columns,
        [
            [
                worker.info.worker_id,
                _state(worker),
                f"{worker.silent_for_s:.0f}s ago",
                f"{worker.free.cpu:g}/{worker.info.total.cpu:g}",
                f"{size(worker.free.memory)} of {size(worker.info.total.memory)}",
                _devices(worker.free, worker.info.total),
                _others(worker.free, worker.info.total) or "-",
                _tasks(worker.running, worker.info.total.tasks),
                age(worker.info.started_at),
                ",".join(given_labels(worker.info.total.labels)) or "-",
                ",".join(worker.info.total.namespaces) or "-",
                worker.info.host,
            ]
            for worker in found
        ],
    )


def _devices(free: Capacity, total: Capacity) -> str:
    left = dict(free.other_devices)
    counts = [(total.variant, free.devices, total.devices)]
    counts += [(model, left.get(model, 0), count) for model, count in total.other_devices]
    return ", ".join(f"{has}/{count} {model}" for model, has, count in counts if count) or "-"


def _others(free: Capacity, total: Capacity) -> str:
    """What is counted by names of the users' own: `license 2/4`."""
    from fluster_bus.messages.parts.counted import number_text

    left = dict(free.resources)
    return ", ".join(f"{name} {number_text(left.get(name, 0))}/{number_text(count)}" for name, count in total.resources)


def _tasks(running: int, most: int | None) -> str:
    return str(running) if most is None else f"{running} of {most} at once"


def _state(worker: WorkerStatus) -> str:
    if not worker.alive:
        return "lost"
    return "draining" if worker.info.draining else "unwell" if worker.info.trouble else "alive"


def nodes(context: typer.Context) -> None:
    """List the machines that workers are on: what each has, which versions are there, and when it was last heard.

    What a machine has is more than its workers offer: `fluster workers` shows that. JSON has each GPU, with UUID,
    memory and, where it is of no use, why.

    Try:
      fluster nodes
      fluster --output json nodes
    """
    options = Options.of(context)
    with options.connect() as cluster:
        found = cluster.list_nodes()
    if options.json:
        write_json([node.model_dump(mode="json") for node in found])
        return
    columns = ["HOST", "STATE", "LAST SIGN", "CPUS", "MEMORY", "DISK", "GPUS", "DRIVER", "FLUSTER", "PYTHON", "WORKERS"]
    write_table(columns, [_node_row(node) for node in found])


def _node_row(node: NodeStatus) -> list[str]:
    info = node.info
    return [
        node.host,
        "alive" if node.alive else "lost",
        f"{node.silent_for_s:.0f}s ago",
        str(info.cpus or "-"),
        size(info.memory) if info.memory else "-",
        size(info.disk) if info.disk else "-",
        _gpus_of(info),
        f"{info.gpu_driver} (CUDA {info.cuda})" if info.gpu_driver else "-",
        ", ".join(node.versions),
        ", ".join(node.pythons),
        ", ".join(node.workers),
    ]


def _gpus_of(info: NodeInfo) -> str:
    """`2 x NVIDIA H100 80GB HBM3, 1 unwell, 1 withheld` (one of the two); a divided GPU is shown by its instances."""
    counts = Counter(gpu.model or "of an unknown model" for gpu in info.gpus if not gpu.divided and not gpu.fault)
    unwell = sum(bool(gpu.fault) for gpu in info.gpus)
    told = [f"{count} x {model}" for model, count in sorted(counts.items())]
    told += [f"{unwell} unwell"] if unwell else []
    withheld = sum(bool(gpu.withheld) and not gpu.fault for gpu in info.gpus)
    told += [f"{withheld} withheld"] if withheld else []
    return ", ".join(told) or ("cannot be read" if info.gpu_trouble else "-")


def drain(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The worker's name, in full: w1 is not to mean w10.")],
    *,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0, max=MAX_SECONDS, help="Hand back what still runs then: it is tried elsewhere."
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the worker has left.")] = False,
) -> None:
    """Have a worker take nothing new, wait for what runs, and leave.

    It ends with status 0, and is not started again. What is handed back after the timeout costs its task nothing of
    the budget for failures.

    Try:
      fluster worker drain worker-1 --timeout 600 --wait
    """
    options = Options.of(context)
    with options.connect() as cluster:
        reply = at_worker(
            cluster, name, lambda worker_id: cluster.drain_worker(worker_id, timeout=timeout, wait=wait), in_full=True
        )
    if options.json:
        write_json(reply.model_dump(mode="json"))
    elif wait:
        write(reply.worker_id)
    else:
        say(f"{reply.worker_id} waits for {reply.running} attempts, then it leaves")
        write(reply.worker_id)


def health(context: typer.Context, name: Name) -> None:
    """Show how a worker is, by its own word. Exit code 1 when it has a problem.

    Try:
      fluster worker health worker-0
    """
    options = Options.of(context)
    with options.connect() as cluster:
        found = at_worker(cluster, name, cluster.worker_health)
    if options.json:
        write_json(found.model_dump(mode="json"))
    else:
        facts = {
            "worker": found.worker_id,
            "problems": "; ".join(found.problems) or "none",
            "state": "draining" if found.draining else "takes work" if found.takes_work else "takes no work",
            "attempts": _tasks(found.running, found.total.tasks),
            "cpu free": f"{found.free.cpu:g}/{found.total.cpu:g}",
            "memory free": f"{size(found.free.memory)} of {size(found.total.memory)}",
            "disk free": size(found.disk_free),
            **({"others free": others} if (others := _others(found.free, found.total)) else {}),
            "limits": found.limits,
            "up for": duration(time.time() - found.uptime_s, None),
        }
        for what, value in facts.items():
            write(f"{what:12} {one_line(value)}")
    if found.problems:
        raise typer.Exit(ExitCode.FAILED)


def attempts(context: typer.Context, name: Name) -> None:
    """List what a worker has: the attempts that it prepares and runs.

    Try:
      fluster worker list worker-0
    """
    from fluster_bus.messages import AttemptList, Done

    options = Options.of(context)
    with options.connect() as cluster:
        found = _ask(cluster, name, "list", Done(), AttemptList)
    _show(options, found.attempts, found.model_dump(mode="json"))


def status(context: typer.Context, name: Name, job: Job, *, task: Task = None, attempt: Attempt = None) -> None:
    """Show one attempt as its worker sees it.

    Try:
      fluster worker status worker-0 train-3f2a --task 1
    """
    from fluster_bus.messages import AttemptQuery, AttemptStatus

    options = Options.of(context)
    with options.connect() as cluster:
        query = AttemptQuery.model_validate(_place(cluster, job, task, attempt))
        found = _ask(cluster, name, "status", query, AttemptStatus)
    _show(options, (found,), found.model_dump(mode="json"))


def _show(options: Options, found: tuple[AttemptStatus, ...], dumped: object) -> None:
    if options.json:
        write_json(dumped)
        return
    write_table(
        ["NAMESPACE", "JOB", "TASK", "ATTEMPT", "PHASE", "CPU", "MEMORY", "DEVICES", "PID", "DURATION"],
        [
            [
                each.namespace,
                each.job_id,
                str(each.number),
                str(each.attempt),
                each.phase,
                f"{each.resources.cpu:g}",
                size(each.resources.memory),
                ",".join(each.devices) or "-",
                "-" if each.pid is None else str(each.pid),
                duration(each.started_at, None),
            ]
            for each in found
        ],
    )


def logs(
    context: typer.Context,
    name: Name,
    job: Job,
    *,
    task: Task = None,
    attempt: Attempt = None,
    tail: Annotated[int, typer.Option(min=0, max=10_000, help="So many of the last lines.")] = 100,
    since: Since = None,
    grep: Grep = None,
) -> None:
    """Print the last lines of what an attempt that runs has written, from its worker's own disk.

    `fluster logs` reads what is stored in the cluster; this also works while that is behind.

    Try:
      fluster worker logs worker-0 train-3f2a --tail 20
    """
    from fluster.cluster.jobs.log_chunks import chunks_of
    from fluster_bus.messages import AttemptLogsReply, AttemptLogsRequest

    options = Options.of(context)
    with options.connect() as cluster:
        wanted = {"tail": tail, "grep": grep, "since": None if since is None else time.time() - since}
        request = AttemptLogsRequest.model_validate({**_place(cluster, job, task, attempt), **wanted})
        reply = _ask(cluster, name, "logs", request, AttemptLogsReply)
    array_id = reply.array_id  # all lines are of that one task
    array_id_of = None if array_id is None else lambda _task: array_id
    print_chunks([chunks_of(reply.lines)], as_json=options.json, numbered=False, array_id_of=array_id_of)
    if not reply.searched_all and len(reply.lines) < tail:
        say("only the end of its output was looked through; `fluster logs` has all of it")


def kill(
    context: typer.Context,
    name: Name,
    job: Job,
    *,
    task: Task = None,
    attempt: Attempt = None,
    force: Annotated[bool, typer.Option("--force", help="SIGKILL at once, without its grace.")] = False,
) -> None:
    """Have one task stopped, at the worker that has it. `fluster cancel` stops a whole job.

    It gets SIGTERM, and SIGKILL after its grace. With --force it gets SIGKILL at once, also when it is in its grace.

    Try:
      fluster worker kill worker-0 train-3f2a --task 1
      fluster worker kill worker-0 train-3f2a --force
    """
    from fluster_bus.messages import AttemptStatus, KillAttemptRequest

    options = Options.of(context)
    with options.connect() as cluster:
        place = _place(cluster, job, task, attempt)
        request = KillAttemptRequest.model_validate(
            {**place, "reason": "killed by fluster worker kill", "force": force}
        )
        found = _ask(cluster, name, "kill", request, AttemptStatus)
    if options.json:
        write_json(found.model_dump(mode="json"))
    else:
        write(f"{found.job_id}.{found.number}.{found.attempt}")


def _place(cluster: Cluster, job: str, task: int | None, attempt: int | None) -> dict[str, object]:
    from fluster.cluster.jobs.job_states import UNANSWERED

    with contextlib.suppress(*UNANSWERED):  # without a controller: the worker itself knows the job by its whole id
        job = find_job(cluster, job)
    return {"namespace": cluster.namespace, "job_id": job, "task": task or 0, "number": task, "attempt": attempt}


def _ask(cluster: Cluster, name: str, verb: str, request: Message, reply: type[Reply]) -> Reply:
    from fluster.cluster.workers import ask_worker

    def ask(worker_id: WorkerId) -> Reply:
        answer: Reply = cluster.portal.run(ask_worker, cluster.asynchronous.bus, worker_id, verb, request, reply)
        return answer

    return at_worker(cluster, name, ask)
