"""A LocalCluster whose workers are containers: what dies, what is left, what cannot be."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import cloudpickle
import psutil
import pytest

from fluster import (
    ClusterStartError,
    JobStatus,
    LocalCluster,
    ResourceConfig,
)
from fluster_bus.messages import Capacity, WorkerId
from fluster_services.vm import DockerBackend, LocalBackend, VMError, VMInfo
from fluster_services.vm.container import OWN_MEMORY, VM_LABEL
from tests.docker_engine import Engine, OwnEngine
from tests.insides import supervisor_pid
from tests.system.job_requests import call, command, wait_ready
from tests.system.processes import Family
from tests.system.vm_site import docker_backend, vms
from tests.waiting import wait_until

PATIENCE_S = 60

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _pickled_by_value() -> Iterator[None]:
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture(scope="module")
def contained(engine: Engine) -> Iterator[LocalCluster]:
    """Two containers, which tests may harm."""
    with LocalCluster(workers=2, backend=docker_backend(engine)) as started:
        yield started
    assert vms(engine) == []


def ids(engine: Engine) -> set[str]:
    """Of the containers that are VMs, and run."""
    return {each["Id"] for each in vms(engine, running=True)}


def works(cluster: LocalCluster) -> bool:
    return bool(cluster.result(cluster.launch(call(abs, -1)), timeout=PATIENCE_S) == 1)


# ---- deaths ---------------------------------------------------------------------------------------------------

SECOND_TIME_LUCKY = "echo up; [ $FLUSTER_ATTEMPT = 2 ] || exec sleep 600"


def test_a_container_that_dies_is_replaced_and_its_tasks_are_tried_again(
    contained: LocalCluster, engine: Engine
) -> None:
    job_id = contained.launch(command("sh", "-c", SECOND_TIME_LUCKY))
    wait_ready(contained, job_id)
    (held,) = [each for each in vms(engine) if each["Labels"][VM_LABEL] == contained.poll(job_id).tasks[0].worker_id]
    engine.client.kill(held["Id"])
    assert contained.wait(job_id, timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
    wait_until(lambda: len(ids(engine)) == 2, PATIENCE_S)


def test_when_what_keeps_the_containers_is_killed_there_are_new_ones(contained: LocalCluster, engine: Engine) -> None:
    before = ids(engine)
    children = psutil.Process(supervisor_pid(contained)).children()
    next(each for each in children if each.name() == "fluster-vms").kill()
    wait_until(lambda: len(ids(engine) - before) == 2 == len(vms(engine)), PATIENCE_S)
    assert works(contained)


OWNER = """
import sys
from fluster import LocalCluster
from fluster_services.vm import DockerBackend
from tests.insides import supervisor_pid
from tests.system.job_requests import sleeper, wait_ready
cluster = LocalCluster(backend=DockerBackend(image={image!r}, docker_host={host!r}))
wait_ready(cluster, cluster.launch(sleeper()))
print(supervisor_pid(cluster), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("victim", ["owner", "supervisor"])
def test_whichever_of_its_programs_is_killed_a_cluster_leaves_no_container_and_others_theirs(
    contained: LocalCluster, engine: Engine, family: Family, victim: str
) -> None:
    others = ids(engine)
    with subprocess.Popen(
        [sys.executable, "-c", OWNER.format(image=engine.image, host=engine.host)],
        env=family.environment(PYTHONPATH=os.pathsep.join(sys.path)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as owner:
        assert owner.stdout is not None
        supervisor = int(owner.stdout.readline())
        assert len(ids(engine) - others) == 1
        os.kill(supervisor if victim == "supervisor" else owner.pid, signal.SIGKILL)
        wait_until(lambda: {each["Id"] for each in vms(engine)} == others, PATIENCE_S)
        owner.kill()
    family.wait_gone()
    assert works(contained)


def test_more_memory_than_a_container_has_costs_the_task_alone(engine: Engine) -> None:
    others = ids(engine)
    with LocalCluster(backend=docker_backend(engine, memory="64MB")) as cluster:
        before = ids(engine)
        needs = ResourceConfig(memory=64_000_000)
        greedy = cluster.launch(call(lambda: len(b"x" * (1 << 30)), resources=needs))
        assert cluster.wait(greedy, timeout=PATIENCE_S).status is JobStatus.FAILED
        assert cluster.result(cluster.launch(call(abs, -1, resources=needs)), timeout=PATIENCE_S) == 1
        assert ids(engine) == before
    assert ids(engine) == others


def test_a_restart_of_the_engine_costs_its_containers_and_no_job(
    contained: LocalCluster, own_engine: OwnEngine
) -> None:
    before = ids(own_engine)
    job_id = contained.launch(command("sh", "-c", SECOND_TIME_LUCKY))
    wait_ready(contained, job_id)
    own_engine.stop()
    own_engine.start()
    assert contained.wait(job_id, timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
    wait_until(lambda: len(ids(own_engine) - before) == 2 == len(vms(own_engine)), PATIENCE_S)


# ---- what cannot be -------------------------------------------------------------------------------------------


def test_what_does_not_come_up_says_why_and_leaves_nothing(engine: Engine, tmp_path: Path) -> None:
    others = ids(engine)
    reasons = {
        "there is no image 'no.such.registry.invalid/image:1' here, and it cannot be pulled": {
            "image": "no.such.registry.invalid/image:1"
        },
        "has no python3": {"image": engine.bare_image},
        "a worker needs the same minor version": {"image": engine.other_python_image},
        "install the NVIDIA container toolkit there, or have VMs without GPUs": {"gpus": "h100:1"},
        f"the Docker engine at unix://{tmp_path}/none cannot be reached": {"docker_host": f"unix://{tmp_path}/none"},
    }
    for reason, fields in reasons.items():
        with pytest.raises(
            ClusterStartError, match=f"^what makes the workers' VMs could not be started: .*{re.escape(reason)}"
        ):
            LocalCluster(workers=2, backend=docker_backend(engine, **fields))
    assert ids(engine) == others


class Rationed(LocalBackend):
    """Gives no VM while a file is there."""

    def __init__(self, refusal: Path) -> None:
        super().__init__()
        self._refusal = refusal

    async def allocate(self, resources: Capacity | None = None, *, vm_id: WorkerId | None = None) -> VMInfo:
        if self._refusal.exists():
            raise VMError("no machine is left")
        return await super().allocate(resources, vm_id=vm_id)


def test_a_job_that_waits_for_a_vm_that_cannot_be_replaced_is_told_why(family: Family, tmp_path: Path) -> None:
    refusal = tmp_path / "refusal"
    with LocalCluster(backend=Rationed(refusal)) as cluster:
        job_id = cluster.launch(command("sh", "-c", SECOND_TIME_LUCKY))
        wait_ready(cluster, job_id)
        refusal.touch()
        worker = next(each for each in family.named("fluster-worker"))
        parent = worker.parent()
        assert parent is not None
        parent.kill()
        why = "worker worker-0 takes no work: its VM is gone and could not be replaced: no machine is left"
        wait_until(lambda: why in cluster.explain(job_id), PATIENCE_S, lambda: cluster.explain(job_id))
        refusal.unlink()
        assert cluster.wait(job_id, timeout=PATIENCE_S).status is JobStatus.SUCCEEDED


def test_a_cluster_may_have_vms_that_are_processes(family: Family) -> None:
    backend = LocalBackend(namespaces=["default"])
    with LocalCluster(workers=2, namespaces=["team-a"], backend=backend) as cluster:
        assert works(cluster)
        # Of those that it serves: what they have no credentials for is not offered to them.
        assert {each.info.total.namespaces for each in cluster.list_workers()} == {("default",)}
        assert len(family.named("fluster-vm")) == 2 + 1, "and what keeps them"
    assert family.members() == []


def test_what_is_not_for_a_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="give docker_host and image to the backend"):
        LocalCluster(backend=DockerBackend(), runtime="docker")
    with pytest.raises(ValueError, match="cannot be handed to the cluster's own process"):
        LocalCluster(backend=lambda: None)


# ---- from the command line ------------------------------------------------------------------------------------


@contextmanager
def up(engine: Engine, family: Family, *more: str) -> Iterator[tuple[subprocess.Popen[str], IO[str], IO[str]]]:
    """`fluster up` with containers, and what it says."""
    others = ids(engine)
    words = f"up --backend docker --image {engine.image} --docker-host {engine.host} --workers 2 --cpu 4 --memory 2GB"
    with subprocess.Popen(
        [sys.executable, "-c", "from fluster.cli import main; main()", *words.split(), *more],
        env=family.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        yield process, process.stdout, process.stderr
    family.wait_gone()
    wait_until(lambda: ids(engine) == others, PATIENCE_S)


def test_up_shares_its_resources_among_containers_and_tells_how_far_it_is(
    engine: Engine, family: Family, tmp_path: Path
) -> None:
    others = ids(engine)
    with up(engine, family, "--folder", os.path.relpath(tmp_path)) as (process, stdout, stderr):
        told = [stderr.readline().strip() for _ in range(3)]
        assert [line.removeprefix("fluster: ") for line in told] == [f"{n} of 2 VMs are ready" for n in range(3)]
        assert stdout.readline().startswith("export FLUSTER_CLUSTER_ADDRESS=")
        for each in ids(engine) - others:
            found = engine.client.inspect_container(each)
            limits = found["HostConfig"]
            assert (limits["CpuQuota"] / limits["CpuPeriod"], limits["Memory"]) == (2, 10**9 + OWN_MEMORY)
            writable = [(mount["Source"], mount["Destination"]) for mount in found["Mounts"] if mount["RW"]]
            assert writable == [(str(tmp_path), str(tmp_path))]
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
        assert ids(engine) == others


def test_up_that_is_interrupted_while_containers_boot_leaves_nothing(engine: Engine, family: Family) -> None:
    with up(engine, family) as (process, _stdout, stderr):
        assert "0 of 2 VMs are ready" in stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
        assert "Traceback" not in stderr.read()
