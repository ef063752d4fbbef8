"""What every backend promises: VMs that boot, are ready when their worker has registered, die and are released."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from typing import cast

import psutil
import pytest

from fluster.cluster import AsyncCluster
from fluster_bus.core import subjects
from fluster_bus.core.errors import NoRespondersError
from fluster_bus.core.roles import Role
from fluster_bus.messages import Capacity, DrainReply, DrainRequest, JobStatus, WorkerId
from fluster_bus.storage.streams import workers_table
from fluster_services.vm import (
    DockerBackend,
    LocalBackend,
    UnknownVMError,
    VMError,
    VMFailedError,
    VMInfo,
    VMStatus,
    VMTimeoutError,
)
from fluster_services.vm.container import OWN_MEMORY, OWNER_LABEL, VM_LABEL, own_mark
from tests.docker_engine import Engine
from tests.system.daemons import DEFAULT, Daemons
from tests.system.job_requests import sleeper
from tests.system.processes import Family
from tests.system.vm_site import CPUS, MEMORY, VMSite, cluster_to_join, opened
from tests.waiting import wait_until_async

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    """A cluster that has no workers but those that tests add."""
    with Daemons(tmp_path_factory.mktemp("vms"), Family()) as started:
        started.start_controller()
        yield started


@pytest.fixture(params=["local", "docker"])
async def site(
    request: pytest.FixtureRequest, daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[VMSite]:
    engine = cast("Engine", request.getfixturevalue("engine")) if request.param == "docker" else None
    for name, value in daemons.family.variables.items():
        monkeypatch.setenv(name, value)
    async with opened(daemons, engine) as site:
        yield site
    await wait_until_async(lambda: site.left() == [], PATIENCE_S)


@pytest.fixture
async def docker_site(daemons: Daemons, engine: Engine) -> AsyncIterator[VMSite]:
    async with opened(daemons, engine) as site:
        yield site
    assert site.left() == []


async def ready_vm(site: VMSite, vm_id: str | None = None, resources: Capacity | None = None) -> VMInfo:
    info = await site.backend.allocate(resources, vm_id=None if vm_id is None else WorkerId(vm_id))
    return await site.backend.wait_ready(info.vm_id, PATIENCE_S)


# ---- from the beginning to the end ----------------------------------------------------------------------------


async def test_a_vm_boots_is_ready_when_its_worker_has_registered_and_is_released(site: VMSite) -> None:
    backend = site.backend
    info = await backend.allocate()
    assert info.status is VMStatus.BOOTING
    assert (info.resources.cpu, info.resources.memory) == (CPUS, MEMORY)
    ready = await backend.wait_ready(info.vm_id, PATIENCE_S)
    assert ready.status is VMStatus.READY
    assert await backend.get_status(info.vm_id) == ready
    assert await backend.list_vms() == [ready]
    row = await workers_table(site.bus).get(info.vm_id)
    assert row is not None
    of_worker = {"labels": info.resources.labels, "namespaces": info.resources.namespaces}  # what only a worker knows
    assert row.value.total.model_copy(update=of_worker) == info.resources

    waiting = asyncio.create_task(backend.wait_over(info.vm_id))
    await asyncio.sleep(0)
    await asyncio.gather(backend.release(info.vm_id), backend.release(info.vm_id))
    assert (await waiting).status is VMStatus.STOPPED
    assert site.left() == []
    assert await backend.list_vms() == []
    await backend.release(info.vm_id)
    with pytest.raises(UnknownVMError, match=f"VM {info.vm_id!r} was released"):
        await backend.get_status(info.vm_id)
    assert await workers_table(site.bus).get(info.vm_id) is None


async def test_an_id_may_be_given_is_taken_once_and_free_again_after_its_release(site: VMSite) -> None:
    backend = site.backend
    with pytest.raises(ValueError, match="invalid VM id 'a b'"):
        await backend.allocate(vm_id=WorkerId("a b"))
    await ready_vm(site, "machine-1")
    with pytest.raises(VMError, match="there is a VM 'machine-1' already"):
        await backend.allocate(vm_id=WorkerId("machine-1"))
    with pytest.raises(UnknownVMError, match="there is no VM 'machine-2'; did you mean 'machine-1'"):
        await backend.release(WorkerId("machine-2"))
    await backend.release(WorkerId("machine-1"))
    again = await backend.allocate(vm_id=WorkerId("machine-1"))
    assert again.status is VMStatus.BOOTING, "the registration of the first is not its own"
    assert (await backend.wait_ready(again.vm_id, PATIENCE_S)).status is VMStatus.READY


async def test_resources_are_as_asked_or_refused(site: VMSite) -> None:
    with pytest.raises(VMError, match="2 gpu devices was asked for"):
        await site.backend.allocate(Capacity(cpu=1, device="gpu", variant="H100", devices=2))
    info = await site.backend.allocate(Capacity(cpu=0.5))
    assert info.resources == Capacity(cpu=0.5, memory=MEMORY)


async def test_many_at_once(site: VMSite) -> None:
    infos = await asyncio.gather(*(ready_vm(site, f"machine-{number}") for number in range(3)))
    assert {each.vm_id for each in await site.backend.list_vms()} == {each.vm_id for each in infos}
    await asyncio.gather(*(site.backend.release(each.vm_id) for each in infos))
    assert site.left() == []


async def test_one_that_is_released_while_it_boots_leaves_nothing(site: VMSite) -> None:
    for rounds in range(4):  # each a little later in its boot
        info = await site.backend.allocate()
        with pytest.raises(VMTimeoutError, match="was not ready within"):
            await site.backend.wait_ready(info.vm_id, 0.05 * rounds)
        await site.backend.release(info.vm_id)
        assert site.left() == []


async def test_whoever_waits_for_one_that_is_released_is_told(site: VMSite) -> None:
    info = await site.backend.allocate()
    waiting = asyncio.create_task(site.backend.wait_ready(info.vm_id, PATIENCE_S))
    await asyncio.sleep(0)
    await site.backend.release(info.vm_id)
    with pytest.raises(VMFailedError, match="it was released"):
        await waiting


def log_of(site: VMSite, vm_id: WorkerId) -> str:
    """What the VM has said so far."""
    file = site.daemons.folder / "logs" / f"{vm_id}.log"
    return file.read_text() if file.exists() else ""


# ---- deaths ---------------------------------------------------------------------------------------------------


async def test_one_that_dies_by_itself_is_told_with_its_exit_code_and_last_words(site: VMSite) -> None:
    info = await ready_vm(site)
    await wait_until_async(lambda: f"{info.vm_id} is ready at" in log_of(site, info.vm_id), PATIENCE_S)
    (await site.machine(info.vm_id)).kill()
    end = await asyncio.wait_for(site.backend.wait_over(info.vm_id), PATIENCE_S)
    assert (end.status, end.exit_code) == (VMStatus.FAILED, 128 + signal.SIGKILL)
    assert "signal 9 killed it; its last words: " in end.message
    assert info.vm_id in end.message
    assert await site.backend.get_status(info.vm_id) == end
    with pytest.raises(VMFailedError, match="signal 9 killed it"):
        await site.backend.wait_ready(info.vm_id, PATIENCE_S)
    await site.backend.release(info.vm_id)


async def test_a_worker_that_is_killed_is_started_again_in_its_vm(site: VMSite) -> None:
    info = await ready_vm(site)
    told = f"{info.vm_id} is ready at"
    await wait_until_async(lambda: told in log_of(site, info.vm_id), PATIENCE_S)
    (await site.worker(info.vm_id)).kill()
    await wait_until_async(lambda: log_of(site, info.vm_id).count(told) == 2, PATIENCE_S)
    assert (await site.backend.get_status(info.vm_id)).status is VMStatus.READY


async def test_one_whose_worker_has_drained_is_over(site: VMSite) -> None:
    info = await ready_vm(site)
    drain = subjects.worker_verb(info.vm_id, "drain")

    async def ask() -> bool:
        try:
            answer = await site.bus.request(drain, DrainRequest(timeout_s=1).to_json())
        except NoRespondersError:  # it has registered, and does not listen yet
            return False
        return bool(DrainReply.from_json(answer.data))

    await wait_until_async(ask, PATIENCE_S)
    end = await asyncio.wait_for(site.backend.wait_over(info.vm_id), PATIENCE_S)
    assert (end.status, end.exit_code) == (VMStatus.STOPPED, 0)
    await site.backend.release(info.vm_id)


async def test_with_a_vm_its_tasks_are_gone_and_wait_for_another(site: VMSite) -> None:
    info = await ready_vm(site)
    async with AsyncCluster(site.bus, DEFAULT) as cluster:
        job_id = await cluster.launch(sleeper(env=site.daemons.family.variables))
        sleeping = await wait_until_async(lambda: site.daemons.family.named("sleep"), PATIENCE_S)
        await site.backend.release(info.vm_id)
        assert site.left() == []
        assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in sleeping)

        async def waits() -> bool:
            return (await cluster.poll(job_id)).status is JobStatus.PENDING

        await wait_until_async(waits, PATIENCE_S)
        await cluster.terminate(job_id)
        assert (await cluster.wait(job_id, timeout=PATIENCE_S)).status is JobStatus.KILLED


async def test_a_backend_that_is_not_open_does_nothing(site: VMSite) -> None:
    other = LocalBackend() if site.kind == "local" else DockerBackend()
    for attempt in (other.allocate(), other.list_vms(), other.release(WorkerId("x")), other.get_status(WorkerId("x"))):
        with pytest.raises(VMError, match=r"serves no cluster: call open\(\) first"):
            await attempt
    with pytest.raises(VMError, match="serves a cluster already"):
        await site.backend.open(cluster_to_join(site.daemons, site.bus))


# ---- containers -----------------------------------------------------------------------------------------------


async def test_a_container_has_its_resources_no_rights_no_open_port_and_shows_no_password(
    docker_site: VMSite,
) -> None:
    info = await ready_vm(docker_site, resources=Capacity(cpu=1.5, memory=512 << 20))
    container = docker_site.container(info.vm_id)
    config = container["HostConfig"]
    assert config["Memory"] == config["MemorySwap"] == (512 << 20) + OWN_MEMORY
    assert config["CpuQuota"] / config["CpuPeriod"] == 1.5
    assert (config["CapDrop"], config["Privileged"]) == (["ALL"], False)
    assert all(not each["RW"] for each in container["Mounts"])
    worker = await docker_site.worker(info.vm_id)
    assert worker.uids().effective != 0

    assert not config["PortBindings"]
    assert not container["NetworkSettings"]["Ports"]
    machine = await docker_site.machine(info.vm_id)
    everything = (machine, *machine.children(recursive=True))
    sockets = [each for process in everything for each in process.net_connections("inet")]
    bus = docker_site.daemons.server
    assert [(each.status, each.raddr.port) for each in sockets] == [(psutil.CONN_ESTABLISHED, bus.port)]

    shown = json.dumps(container) + repr([(each.cmdline(), each.environ()) for each in everything])
    for address in (bus.credentials(Role.SERVICE), bus.credentials(Role.JOB, DEFAULT)):
        assert address.password is not None
        assert address.password not in shown


async def test_what_a_program_that_died_has_left_is_removed_by_the_next(docker_site: VMSite) -> None:
    engine = docker_site.engine
    assert engine is not None

    def leave(owner: str) -> str:
        labels = {VM_LABEL: "left", OWNER_LABEL: owner}
        return str(engine.client.create_container(engine.image, "true", labels=labels)["Id"])

    place, pid, _started = own_mark().rsplit(".", 2)
    dead, alive, elsewhere = leave(f"{place}.{pid}.1"), leave(own_mark()), leave(f"other-boot.{pid}.1")
    other = DockerBackend(image=engine.image, docker_host=engine.host)
    await other.open(cluster_to_join(docker_site.daemons, docker_site.bus))
    await other.close()
    left = {each["Id"] for each in engine.containers(**{VM_LABEL: "left"})}
    for each in (alive, elsewhere):
        engine.client.remove_container(each)
    assert left == {alive, elsewhere}
    assert dead not in left
