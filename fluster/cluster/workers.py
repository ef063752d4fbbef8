"""Workers and the machines that they are on: lists of them, and what operators ask of one worker."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing
from typing import TypeVar

from fluster.errors import JobNotFoundError, JobRefusedError, WorkerNotFoundError
from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.errors import NoRespondersError, ServiceError
from fluster_bus.messages import (
    Done,
    DrainReply,
    DrainRequest,
    JobRequest,
    Message,
    Namespace,
    RunReply,
    RunRequest,
    WorkerId,
    WorkerList,
    WorkerStatus,
)
from fluster_bus.messages.nodes import NodeInfo, NodeStatus, WorkerQuery
from fluster_bus.storage.feeds import CaughtUp
from fluster_bus.storage.streams import workers_table
from fluster_bus.storage.tables import Deleted

Reply = TypeVar("Reply", bound=Message)

_ASK_TIMEOUT_S = 5.0
_RUN_TIMEOUT_S = 20.0  # the worker waits up to 10 s for the stream of submitted jobs, and 4 s for a controller
_WORKERS_AT_ONCE = 200  # of a request: each tells some kilobytes about its machine
_ATTEMPT_NOT_FOUND = "AttemptNotFoundError"  # the worker's word


async def list_workers(bus: Bus, namespace: Namespace) -> list[WorkerStatus]:
    """The workers that have registered. Raises what `Bus.ask` raises."""
    return list((await bus.ask(subjects.workers_list(namespace), Done(), WorkerList)).workers)


async def list_nodes(bus: Bus, namespace: Namespace) -> list[NodeStatus]:
    """The machines that they are on, by host. Raises what `Bus.ask` raises."""
    found: list[WorkerStatus] = []
    more = True
    while more:
        after = found[-1].info.worker_id if found else None
        query = WorkerQuery(nodes=True, after=after, limit=_WORKERS_AT_ONCE)
        answer = await bus.ask(subjects.workers_list(namespace), query, WorkerList)
        found += answer.workers
        more = answer.more and bool(answer.workers)
    return nodes_of(found)


async def ask_worker(
    bus: Bus,
    worker_id: WorkerId,
    verb: str,
    request: Message,
    reply: type[Reply],
    *,
    timeout_s: float = _ASK_TIMEOUT_S,
) -> Reply:
    """The worker's answer.

    Raises WorkerNotFoundError when none of that name listens, JobNotFoundError when it does not have what is asked
    about, and what `Bus.request` raises.
    """
    try:
        answer = await bus.request(subjects.worker_verb(worker_id, verb), request.to_json(), timeout_s=timeout_s)
    except NoRespondersError as error:
        raise WorkerNotFoundError(f"no worker {worker_id!r} answers: `fluster workers` lists them") from error
    except ServiceError as error:
        if error.code == _ATTEMPT_NOT_FOUND:
            raise JobNotFoundError(str(error)) from error
        raise
    return reply.from_json(answer.data)


async def run_on_worker(bus: Bus, worker_id: WorkerId, namespace: Namespace, job: JobRequest) -> RunReply:
    """The worker's word that it has room for the job and has submitted it. Raises JobRefusedError, and as `ask_worker`
    does.
    """
    request = RunRequest(namespace=namespace, job=job)
    try:
        return await ask_worker(bus, worker_id, "run", request, RunReply, timeout_s=_RUN_TIMEOUT_S)
    except ServiceError as error:
        if error.code == JobRefusedError.__name__:
            raise JobRefusedError(str(error)) from error
        raise


async def drain_worker(bus: Bus, worker_id: WorkerId, *, timeout_s: float | None, wait: bool) -> DrainReply:
    """Ask the worker to leave; with `wait`, return when it has left."""
    reply = await ask_worker(bus, worker_id, "drain", DrainRequest(timeout_s=timeout_s), DrainReply)
    if wait:
        await _wait_left(bus, worker_id)
    return reply


async def _wait_left(bus: Bus, worker_id: WorkerId) -> None:
    is_there = False
    async with aclosing(workers_table(bus).watch(worker_id)) as changes:
        async for change in changes:
            is_there = not isinstance(change, Deleted) and (is_there or not isinstance(change, CaughtUp))
            if not is_there:
                return


def nodes_of(workers: Iterable[WorkerStatus]) -> list[NodeStatus]:
    """The machines that these workers are on, by host. Workers of a version that does not tell are grouped by host
    alone.
    """
    groups: dict[tuple[str, str], list[WorkerStatus]] = {}
    for worker in workers:
        machine = worker.info.node.machine if worker.info.node is not None else ""
        groups.setdefault((worker.info.host, machine), []).append(worker)
    return [_node(host, together) for (host, _), together in sorted(groups.items())]


def _node(host: str, workers: list[WorkerStatus]) -> NodeStatus:
    infos = [worker.info.node for worker in workers if worker.info.node is not None]
    # One that is still looking for GPUs, or was refused them, tells less than another on the same machine.
    info = max(infos, key=lambda each: (len(each.gpus), not each.gpu_trouble), default=NodeInfo())
    return NodeStatus(
        host=host,
        info=info,
        workers=tuple(worker.info.worker_id for worker in workers),
        alive=any(worker.alive for worker in workers),
        silent_for_s=min(worker.silent_for_s for worker in workers),
        versions=tuple(sorted({worker.info.version for worker in workers})),
        pythons=tuple(sorted({worker.info.python for worker in workers})),
    )
