"""What VMs are made of: the request for a container, sizes, last words, who made them."""

import asyncio
import base64
import io
import json
import os
import pickle
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from fluster_bus.access.address import BusAddress
from fluster_bus.core.devices import Devices
from fluster_bus.core.errors import InvalidNameError
from fluster_bus.messages import Capacity, Namespace, WorkerId
from fluster_services.vm import ClusterToJoin, DockerBackend, LocalBackend, VMError, fleet
from fluster_services.vm.container import (
    OWN_MEMORY,
    SharedFolder,
    User,
    checked_folders,
    create_body,
    folders_tar,
    is_gone,
    own_mark,
    user_of_vms,
    vm_container,
)
from fluster_services.vm.fleet import GpuStock, Output, sized, usual_size
from fluster_services.worker.contract.container import NOBODY, Libraries

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus

USUAL = Capacity(cpu=4, memory=1 << 30)


def body_of(network: str = "host", device_ids: tuple[str, ...] = ()) -> dict[str, object]:
    container = vm_container(
        WorkerId("vm-1"),
        Capacity(cpu=1.5, memory=1 << 30),
        image="python:3.12-slim",
        network=network,
        owner="boot-1.2.3",
        user=User(1000, 1001, (20, 30)),
        folders=[SharedFolder(Path("/srv/data"), Path("/big/data"))],
        device_ids=device_ids,
        libraries=[
            Libraries({"/src": "/opt/fluster/given/0"}, ("/opt/fluster/given/0",)),
            Libraries({"/own": "/o"}, ("/o",)),
        ],
    )
    return create_body(container)


def test_a_container_has_the_gpus_that_were_set_aside_for_it() -> None:
    body = body_of(device_ids=("4", "5"))
    host, env = body["HostConfig"], body["Env"]
    assert isinstance(host, dict)
    assert isinstance(env, list)
    assert [each["DeviceIDs"] for each in host["DeviceRequests"]] == [["4", "5"]]
    assert "NVIDIA_VISIBLE_DEVICES=4,5" in env
    assert "DeviceRequests" not in str(body_of())


def test_a_container_has_its_resources_and_no_more() -> None:
    host = body_of()["HostConfig"]
    assert isinstance(host, dict)
    assert (host["CpuQuota"], host["CpuPeriod"]) == (150_000, 100_000)
    assert host["Memory"] == host["MemorySwap"] == (1 << 30) + OWN_MEMORY
    assert host["ShmSize"] == 1 << 30
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert not {"Privileged", "PortBindings", "PublishAllPorts", "PidMode", "IpcMode", "UsernsMode"} & set(host)
    assert [(each["Source"], each["Target"], each["ReadOnly"]) for each in host["Mounts"]] == [
        ("/src", "/opt/fluster/given/0", True),
        ("/own", "/o", True),
        ("/big/data", "/srv/data", False),
    ]
    assert host["GroupAdd"] == ["20", "30"]


def test_who_is_in_a_vm_is_who_runs_the_program_and_can_do_everything_nowhere() -> None:
    me, root = User(1000, 1001, (20,)), User(0, 0, (0, 4))
    assert user_of_vms(me, shares_folders=False) == User(1000, 1001)
    assert user_of_vms(me, shares_folders=True) == me
    assert user_of_vms(root, shares_folders=False) == User(NOBODY, NOBODY)
    assert user_of_vms(root, shares_folders=True) == root, "whose files could not be used by anybody else"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with a file and some links."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "file").touch()
    for name, target in {"etc": "/etc", "run": "/run", "shm": "/dev/shm"}.items():
        (data / name).symlink_to(target)
    return data


def test_folders_are_shared_under_their_own_path_with_what_it_leads_to_now(data: Path) -> None:
    link = data.with_name("link")
    link.symlink_to(data)
    found = checked_folders([data, f"{data}/", f"/{data}", link], engine="unix:///x/docker.sock")
    assert [(each.path, each.source) for each in found] == [(data, data), (link, data)]
    assert checked_folders([], engine="unix:///x/docker.sock") == ()
    (data / "below").mkdir()
    for inner, outer in ((data / "below", data), (link / "below", data), (data / "below", link)):
        with pytest.raises(ValueError, match=f"folders has '{inner}', which lies in '{outer}': give that alone"):
            checked_folders([outer, inner], engine="unix:///x/docker.sock")


@pytest.mark.parametrize(
    ("folder", "why"),
    [
        ("data", "give the whole path"),
        ("", "give the whole path"),
        ("{data}/none", "which is not there"),
        ("{data}/file", "which is not a folder"),
        *((path, "a container engine's") for path in ("/", "/run", "/var", "{data}", "{data}/../data", "{data}/run")),
        *((path, "a system has its own files") for path in ("/etc", "/usr/share", "/proc", "/dev/shm", "/opt")),
        *((path, "a system has its own files") for path in ("{data}/etc", "{data}/shm", "{data}/etc/../etc")),
    ],
)
def test_folders_that_no_vm_is_to_see_or_to_cover_are_refused(folder: str, why: str, data: Path) -> None:
    named = folder.format(data=data)
    engine = f"unix://{data}/docker.sock" if "engine" in why else "unix:///x/docker.sock"
    with pytest.raises(ValueError, match=f"folders has {re.escape(repr(named))}.*{why}"):
        DockerBackend(docker_host=engine, folders=[named])


def test_one_folder_is_not_several_and_nothing_is_none() -> None:
    with pytest.raises(ValueError, match=r"folders='/srv' is one folder: give a list"):
        DockerBackend(folders="/srv")
    with pytest.raises(ValueError, match=r"folders has None: give a path, such as '/srv/data'"):
        DockerBackend(folders=[None])  # type: ignore[list-item]


@pytest.mark.anyio
@pytest.mark.parametrize("place", [".", "records", "records/below"])
async def test_what_the_cluster_keeps_is_shared_with_no_vm(place: str, data: Path) -> None:
    (data / "records" / "below").mkdir(parents=True)
    backend = DockerBackend(docker_host="unix:///x/docker.sock", folders=[data / place])
    cluster = cast("ClusterToJoin", SimpleNamespace(state_dir=data / "records"))
    with pytest.raises(VMError, match="the cluster keeps files that no task may see"):
        await backend.open(cluster)


def test_a_container_publishes_nothing_and_is_tied_to_whoever_attaches() -> None:
    body = body_of("bridge")
    assert "ExposedPorts" not in body
    assert (body["OpenStdin"], body["StdinOnce"], body["User"]) == (True, True, "1000:1001")
    assert body["Labels"] == {"fluster.vm": "vm-1", "fluster.vm.owner": "boot-1.2.3"}
    assert json.dumps(body)


def test_the_worker_owns_its_folders() -> None:
    with tarfile.open(fileobj=io.BytesIO(folders_tar(User(1000, 1001)))) as tar:
        found = {each.name: (each.isdir(), each.mode, each.uid, each.gid) for each in tar}
    assert found == dict.fromkeys(
        ["fluster", "fluster/state", "fluster/work", "fluster/home"], (True, 0o700, 1000, 1001)
    )


def test_what_is_not_asked_for_is_as_usual() -> None:
    assert sized(Capacity(), USUAL) == USUAL
    assert sized(Capacity(cpu=9), USUAL) == Capacity(cpu=9, memory=1 << 30)
    assert sized(Capacity(memory=5, labels=("zone=a",)), USUAL) == Capacity(cpu=4, memory=5, labels=("zone=a",))
    with pytest.raises(VMError, match="8 tpu devices"):
        sized(Capacity(device="tpu", devices=8), USUAL)
    assert sized(Capacity(disk=5), USUAL) == USUAL.model_copy(update={"disk": 5})
    gpus = Capacity(device="gpu", variant="h100", devices=2)
    assert sized(gpus, USUAL, ("4", "5")) == gpus.model_copy(update={"cpu": 4, "memory": 1 << 30})
    with pytest.raises(VMError, match="2 gpu devices was asked for: 1 of this machine's"):
        sized(gpus, USUAL, ("4",))


def test_each_vm_has_gpus_of_its_own_until_it_is_released() -> None:
    stock = GpuStock("2", None)
    stock.know(Devices("gpu", "h100", ("0", "3", "4", "5")))
    assert (stock.usual.variant, len(stock.usual.ids)) == ("h100", 2)
    assert [stock.take(WorkerId(name)) for name in "ab"] == [("0", "3"), ("4", "5")]
    with pytest.raises(VMError, match="VM 'c' is to have 2 GPUs, and 0 of this machine's 4 are left: have fewer VMs"):
        stock.take(WorkerId("c"))
    stock.give_back(WorkerId("a"))
    assert stock.take(WorkerId("c")) == ("0", "3")


def test_gpus_that_nothing_here_lists_are_those_that_are_visible_or_the_first_ones() -> None:
    unlisted = GpuStock("a100:2", None)
    unlisted.know(Devices())
    assert [unlisted.take(WorkerId(name)) for name in "ab"] == [("0", "1"), ("2", "3")]
    visible = GpuStock("a100", "GPU-7,GPU-9")
    visible.know(Devices())
    assert visible.take(WorkerId("a")) == ("GPU-7",)
    with pytest.raises(VMError, match="gpus='a100:1': this machine's GPUs are h100: give gpus='h100:1'"):
        GpuStock("a100", None).know(Devices("gpu", "h100", ("0",)))
    with pytest.raises(ValueError, match="gpus='-1': '-1' names no GPUs"):
        DockerBackend(gpus="-1")


def test_what_each_vm_offers_beside_cpus_and_memory_may_be_said() -> None:
    usual = usual_size(4, "1GB", disk="10GB", labels={"zone": "a"})
    assert (usual.disk, usual.labels) == (10 * 10**9, ("zone=a",))
    assert sized(Capacity(), usual) == usual
    assert sized(Capacity(disk=5, labels=("zone=b",)), usual).labels == ("zone=b",)
    with pytest.raises(ValueError, match="disk='much'"):
        usual_size(4, "1GB", disk="much")
    with pytest.raises(ValueError, match="labels="):
        usual_size(4, "1GB", labels={"a b": "c"})


@pytest.mark.parametrize("cpus", [0, -1, float("nan"), float("inf"), True, "2"])
def test_cpus_that_are_none(cpus: float) -> None:
    with pytest.raises(ValueError, match=f"cpus={cpus!r}"):
        usual_size(cpus, "1GB")


@pytest.mark.parametrize("made", [LocalBackend, DockerBackend])
def test_backends_say_what_they_cannot_be(made: type[LocalBackend | DockerBackend]) -> None:
    with pytest.raises(ValueError, match="cpus=0"):
        made(cpus=0)
    with pytest.raises(ValueError, match="memory=0"):
        made(memory=0)


def test_a_network_of_its_own_needs_an_address_of_the_bus() -> None:
    with pytest.raises(ValueError, match="network='bridge' needs cluster_url"):
        DockerBackend(network="bridge")
    with pytest.raises(ValueError, match=r"'172\.17\.0\.1' begins with none of"):
        DockerBackend(network="bridge", cluster_url="172.17.0.1")
    DockerBackend(network="bridge", cluster_url="nats://172.17.0.1:4222")


def test_last_words_are_the_last_lines() -> None:
    words = Output(None)
    assert words.last_words() == ""
    words.write(b"one\ntwo\n\nthr")
    words.write("ee\nfür\n".encode())
    assert words.last_words() == "two | three | für"
    words.write(b"x" * 10_000 + b"\xff\n")
    assert len(words.last_words()) <= 600


def test_output_is_kept_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_FILE_BYTES", 100)
    kept = Output(tmp_path / "vm-1.log")
    for number in range(50):
        kept.write(b"%09d\n" % number)
    kept.close()
    kept.write(b"too late\n")
    sizes = {each.name: each.stat().st_size for each in tmp_path.iterdir()}
    assert sizes == {"vm-1.log.1": 100}
    assert kept.last_words().endswith("too late")


def test_an_owner_is_gone_when_its_process_is_and_only_here() -> None:
    assert not is_gone(own_mark())
    place, pid, started = own_mark().rsplit(".", 2)
    assert is_gone(f"{place}.{pid}.{int(started) - 1}"), "another process had the number"
    assert not is_gone(f"elsewhere.{pid}.1")
    assert not is_gone("")
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.DEVNULL) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_gone(f"{place}.{process.pid}.1")
        mark = f"{place}.{process.pid}.{started}"
        assert is_gone(mark), "dead, though nobody has taken it in"


def _cluster(tmp_path: Path) -> ClusterToJoin:
    credentials = {
        Namespace(name): BusAddress("nats://127.0.0.1:4222", user=name, password="x") for name in ("a", "b", "c")
    }
    address = BusAddress("nats://127.0.0.1:4222")
    return ClusterToJoin(bus=cast("Bus", None), address=address, job_credentials=credentials, state_dir=tmp_path)


@pytest.mark.parametrize("named", [None, ["b"], ["c", "a", "c"]])
def test_vms_have_credentials_for_jobs_of_their_namespaces_alone(named: list[str] | None, tmp_path: Path) -> None:
    backend, cluster = LocalBackend(namespaces=named), _cluster(tmp_path)
    asyncio.run(backend.open(cluster))
    machine = backend._machine(backend._opened(), WorkerId("w1"), Capacity(cpu=1), ())  # noqa: SLF001 - a machine is described here and made elsewhere
    config = pickle.loads(base64.b64decode(machine._setup))  # type: ignore[attr-defined]  # noqa: SLF001 - what it would be started with
    assert set(config.job_credentials) == set(named or ("a", "b", "c"))


def test_namespaces_of_vms_are_those_of_the_cluster(tmp_path: Path) -> None:
    with pytest.raises(VMError, match=r"namespaces=\['a', 'd'\], and the cluster has no d: it has a, b, c"):
        asyncio.run(LocalBackend(namespaces=["a", "d"]).open(_cluster(tmp_path)))
    with pytest.raises(ValueError, match="namespaces='a': give a list"):
        LocalBackend(namespaces="a")
    with pytest.raises(ValueError, match=r"namespaces=\[\]: give a list"):
        DockerBackend(namespaces=[])
    with pytest.raises(InvalidNameError):
        DockerBackend(namespaces=["a.b"])
