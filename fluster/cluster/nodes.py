"""The machines of a cluster, from what their workers tell."""

from __future__ import annotations

from collections.abc import Iterable

from fluster_bus.messages import WorkerStatus
from fluster_bus.messages.nodes import NodeInfo, NodeStatus

WORKERS_AT_ONCE = 200  # of a request: each tells some kilobytes about its machine


def nodes_of(workers: Iterable[WorkerStatus]) -> list[NodeStatus]:
    """The machines that these workers are on, by host. Workers of a version that does not tell are grouped by host alone."""
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
