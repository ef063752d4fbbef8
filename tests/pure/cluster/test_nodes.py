"""Machines, from what their workers tell."""

from fluster.cluster.workers import nodes_of
from fluster_bus.messages import Capacity, WorkerId, WorkerInfo, WorkerStatus
from fluster_bus.messages.nodes import NodeGpu, NodeInfo

H100 = NodeGpu(index=0, uuid="GPU-1", model="NVIDIA H100 80GB HBM3")


def status(
    name: str, host: str, node: NodeInfo | None, *, silent_for_s: float = 1.0, alive: bool = True, version: str = "0.1"
) -> WorkerStatus:
    info = WorkerInfo(
        worker_id=WorkerId(name),
        host=host,
        pid=1,
        total=Capacity(cpu=1),
        version=version,
        python="3.12.1",
        started_at=0,
        node=node,
    )
    return WorkerStatus(info=info, free=Capacity(), alive=alive, silent_for_s=silent_for_s, running=0)


def test_workers_of_one_machine_are_one_node() -> None:
    bare = NodeInfo(machine="m1", cpus=8)
    found = nodes_of(
        [
            status("w1", "b", bare, silent_for_s=7, alive=False),
            status("w2", "b", bare.model_copy(update={"gpus": (H100,)}), silent_for_s=3, version="0.2"),
            status("w3", "a", NodeInfo(machine="m2")),
            status("w4", "b", NodeInfo(machine="m3")),  # of the same name, and another machine
        ]
    )
    assert [(node.host, node.workers) for node in found] == [("a", ("w3",)), ("b", ("w1", "w2")), ("b", ("w4",))]
    together = found[1]
    assert together.info.gpus == (H100,)
    assert (together.alive, together.silent_for_s) == (True, 3)
    assert together.versions == ("0.1", "0.2")


def test_workers_that_do_not_tell_of_their_machine_are_grouped_by_host() -> None:
    (node,) = nodes_of([status("w1", "a", None), status("w2", "a", None)])
    assert node.workers == ("w1", "w2")
    assert node.info == NodeInfo()


def test_a_list_of_workers_is_without_machines_unless_asked_for() -> None:
    told = status("w1", "a", NodeInfo(machine="m1", gpus=(H100,)))
    assert told.without_node().info.node is None
    assert b"GPU-1" not in told.without_node().to_json()
    assert WorkerStatus.from_json(told.to_json()) == told
