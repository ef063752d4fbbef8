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
from fluster_services.vm import DockerBackend
from fluster_services.vm.container import OWN_MEMORY, VM_LABEL
from tests.docker_engine import Engine, OwnEngine
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


@pytest.fixture
def contained(engine: Engine) -> Iterator[LocalCluster]:
    """Two containers that a test may harm."""
    with LocalCluster(workers=2, backend=docker_backend(engine)) as started:
        yield started
    assert vms(engine) == []


# ---- with containers: what dies -------------------------------------------------------------------------------


def test_a_container_that_dies_is_replaced_and_its_tasks_are_tried_again(
    contained: LocalCluster, engine: Engine
) -> None:
    job_id = contained.launch(command("sh", "-c", "echo up; sleep 2"))
    wait_ready(contained, job_id)
    (held,) = [each for each in vms(engine) if each["Labels"][VM_LABEL] == contained.poll(job_id).tasks[0].worker_id]
    engine.client.kill(held["Id"])
    info = contained.wait(job_id, timeout=PATIENCE_S)
    assert info.status is JobStatus.SUCCEEDED
    assert info.tasks[0].attempt == 2
    wait_until(lambda: len(vms(engine, running=True)) == 2, PATIENCE_S)


def test_more_memory_than_a_container_has_costs_the_task_alone(engine: Engine) -> None:
    with LocalCluster(backend=docker_backend(engine, memory="64MB")) as cluster:
        (before,) = vms(engine)
        needs = ResourceConfig(memory=64_000_000)
        greedy = cluster.launch(call(lambda: len(b"x" * (1 << 30)), resources=needs))
        assert cluster.wait(greedy, timeout=PATIENCE_S).status is JobStatus.FAILED
        assert cluster.result(cluster.launch(call(abs, -1, resources=needs)), timeout=PATIENCE_S) == 1
        assert [each["Id"] for each in vms(engine)] == [before["Id"]]


OWNER = """
import sys
from fluster import LocalCluster
from fluster_services.vm import DockerBackend
from tests.system.job_requests import sleeper, wait_ready
cluster = LocalCluster(workers=2, backend=DockerBackend(image={image!r}, docker_host={host!r}))
wait_ready(cluster, cluster.launch(sleeper()))
print(cluster._supervisor._process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("victim", ["owner", "supervisor"])
def test_whoever_of_its_programs_is_killed_a_cluster_leaves_no_container(
    engine: Engine, family: Family, victim: str
) -> None:
    with LocalCluster(backend=docker_backend(engine)) as other:
        (others,) = vms(engine)
        with subprocess.Popen(
            [sys.executable, "-c", OWNER.format(image=engine.image, host=engine.host)],
            env=family.environment(PYTHONPATH=os.pathsep.join(sys.path)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as owner:
            assert owner.stdout is not None
            supervisor = int(owner.stdout.readline())
            assert len(vms(engine)) == 3
            os.kill(supervisor if victim == "supervisor" else owner.pid, signal.SIGKILL)
            wait_until(lambda: [each["Id"] for each in vms(engine)] == [others["Id"]], PATIENCE_S)
            owner.kill()
        assert other.result(other.launch(call(abs, -1)), timeout=PATIENCE_S) == 1, "another cluster's are left alone"
    family.wait_gone()
    assert vms(engine) == []


def test_when_what_keeps_the_containers_is_killed_there_are_new_ones(engine: Engine) -> None:
    with LocalCluster(workers=2, backend=docker_backend(engine)) as cluster:
        before = {each["Id"] for each in vms(engine)}
        children = psutil.Process(cluster._supervisor._process.pid).children()
        next(each for each in children if each.name() == "fluster-vms").kill()
        wait_until(
            lambda: len(vms(engine, running=True)) == 2 and not before & {each["Id"] for each in vms(engine)},
            PATIENCE_S,
        )
        assert cluster.result(cluster.launch(call(abs, -1)), timeout=PATIENCE_S) == 1
    assert vms(engine) == []


def test_a_restart_of_the_engine_costs_its_containers_and_no_job(own_engine: OwnEngine) -> None:
    with LocalCluster(backend=docker_backend(own_engine)) as cluster:
        (before,) = vms(own_engine)
        job_id = cluster.launch(command("sh", "-c", "echo up; sleep 1"))
        wait_ready(cluster, job_id)
        own_engine.stop()
        own_engine.start()
        assert cluster.wait(job_id, timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
        assert [each["Id"] for each in vms(own_engine)] != [before["Id"]]
    assert vms(own_engine) == []


# ---- what cannot be -------------------------------------------------------------------------------------------


def test_what_does_not_come_up_says_why_and_leaves_nothing(engine: Engine, tmp_path: Path) -> None:
    reasons = {
        "there is no image 'no.such.registry.invalid/image:1' here, and it cannot be pulled": {
            "image": "no.such.registry.invalid/image:1"
        },
        "has no python3": {"image": engine.bare_image},
        "a worker needs the same minor version": {"image": engine.other_python_image},
        f"the Docker engine at unix://{tmp_path}/none cannot be reached": {"docker_host": f"unix://{tmp_path}/none"},
    }
    for reason, fields in reasons.items():
        with pytest.raises(ClusterStartError, match=re.escape(reason)):
            LocalCluster(workers=2, backend=docker_backend(engine, **fields))
    assert vms(engine) == []


def test_what_is_not_for_a_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="give docker_host and image to the backend"):
        LocalCluster(backend=DockerBackend(), runtime="docker")
    with pytest.raises(ValueError, match="cannot be handed to the cluster's own process"):
        LocalCluster(backend=lambda: None)


# ---- from the command line ------------------------------------------------------------------------------------


@contextmanager
def up(engine: Engine, family: Family) -> Iterator[tuple[subprocess.Popen[str], IO[str], IO[str]]]:
    """`fluster up` with containers, and what it says."""
    words = f"up --backend docker --image {engine.image} --docker-host {engine.host} --workers 2 --cpu 4 --memory 2GB"
    with subprocess.Popen(
        [sys.executable, "-c", "from fluster.cli import main; main()", *words.split()],
        env=family.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        yield process, process.stdout, process.stderr
    family.wait_gone()
    wait_until(lambda: vms(engine) == [], PATIENCE_S)


def test_up_shares_its_resources_among_containers_and_tells_how_far_it_is(engine: Engine, family: Family) -> None:
    with up(engine, family) as (process, stdout, stderr):
        told = [stderr.readline().strip() for _ in range(3)]
        assert [line.removeprefix("fluster: ") for line in told] == [f"{n} of 2 VMs are ready" for n in range(3)]
        assert stdout.readline().startswith("export FLUSTER_CLUSTER_ADDRESS=")
        for each in vms(engine):
            limits = engine.client.inspect_container(each["Id"])["HostConfig"]
            assert (limits["CpuQuota"] / limits["CpuPeriod"], limits["Memory"]) == (2, 10**9 + OWN_MEMORY)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
        assert vms(engine) == []


def test_up_that_is_interrupted_while_containers_boot_leaves_nothing(engine: Engine, family: Family) -> None:
    with up(engine, family) as (process, _stdout, stderr):
        assert "0 of 2 VMs are ready" in stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
        assert "Traceback" not in stderr.read()
