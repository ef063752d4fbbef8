"""What an engine is asked for, decided without one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fluster.local_setup import ProfileName
from fluster_services.settings import SettingError
from fluster_services.worker.__main__ import _containers
from fluster_services.worker.contract.config import ContainerSettings, parse_ulimits
from fluster_services.worker.contract.container import (
    ContainerSpec,
    Libraries,
    create_body,
    given_libraries,
    own_libraries,
)
from fluster_services.worker.linux.limits import Limits

NONE = Libraries({}, ())
OWN = Libraries({"/venv/site-packages": "/opt/fluster/packages/0"}, ("/opt/fluster/packages/0",))
GIVEN = Libraries({"/home/me/project": "/opt/fluster/given/0"}, ("/opt/fluster/given/0",))


def body(
    command: list[str] | None = None,
    *,
    given: Libraries = NONE,
    settings: Mapping[str, Any] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    spec = ContainerSpec(
        key="ns.job.0.1",
        image="image",
        command=command,
        **{"env": {}, "limits": Limits(), **fields},
    )
    return create_body(
        spec,
        ContainerSettings(**settings or {}),
        state=Path("/state"),
        task_folder=Path("/state/attempt/task"),
        user=(65_534, 65_534),
        own=OWN,
        given=given,
    )


def environment(body: dict[str, Any]) -> dict[str, str]:
    return dict(each.split("=", 1) for each in body["Env"])


def sources(body: dict[str, Any]) -> dict[str, bool]:
    """{what of the machine is in the container: whether it can be written to}."""
    return {each["Source"]: not each["ReadOnly"] for each in body["HostConfig"]["Mounts"]}


def test_a_command_has_its_folder_and_nothing_of_the_workers_python() -> None:
    made = body(["true"], given=GIVEN)
    assert sources(made) == {"/state/attempt/task": True}
    assert "PYTHONPATH" not in environment(made)


def test_a_command_finds_the_modules_of_its_workspace() -> None:
    assert environment(body(["true"], has_workspace=True))["PYTHONPATH"].endswith("/work/src")


def test_a_callable_has_fluster_too_behind_what_the_image_has() -> None:
    made = body(None, given=GIVEN)
    assert sources(made) == {"/state/attempt/task": True, "/venv/site-packages": False, "/home/me/project": False}
    assert made["Entrypoint"][0] == "python3"
    assert made["Entrypoint"][-1] == "/opt/fluster/packages/0"
    assert "PYTHONPATH" not in environment(made)


def test_the_jobs_own_variables_go_first() -> None:
    found = environment(body(["true"], env={"HOME": "/mine", "OTHER": "a=b"}))
    assert (found["HOME"], found["OTHER"], found["PYTHONUNBUFFERED"]) == ("/mine", "a=b", "1")


def test_a_breakpoint_is_refused_unless_the_job_names_a_debugger() -> None:
    assert environment(body(["true"]))["PYTHONBREAKPOINT"] == "fluster.breakpoints.a_task_has_no_terminal"
    assert environment(body(["true"], env={"PYTHONBREAKPOINT": "0"}))["PYTHONBREAKPOINT"] == "0"


def test_the_default_profile_takes_all_that_can_be_taken() -> None:
    made = body(["true"])
    host = made["HostConfig"]
    assert made["User"] == "65534:65534"
    assert (host["ReadonlyRootfs"], host["CapDrop"], host["SecurityOpt"]) == (True, ["ALL"], ["no-new-privileges"])
    assert host["Init"] is True
    assert "Privileged" not in host
    assert "DeviceRequests" not in host


def test_the_trusted_profile_leaves_what_the_image_has_and_still_holds_to_limits() -> None:
    made = body(["true"], settings={"profile": "trusted"}, limits=Limits(memory=1 << 30))
    assert "User" not in made
    assert not {"ReadonlyRootfs", "CapDrop", "SecurityOpt", "Privileged"} & set(made["HostConfig"])
    assert made["HostConfig"]["Memory"] == 1 << 30


def test_gpus_are_the_tasks_own() -> None:
    made = body(["true"], devices=["1", "3"])
    assert made["HostConfig"]["DeviceRequests"] == [
        {"Driver": "nvidia", "DeviceIDs": ["1", "3"], "Capabilities": [["gpu"]]}
    ]
    assert environment(made)["NVIDIA_VISIBLE_DEVICES"] == "1,3"
    assert environment(body(["true"]))["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_the_gpu_profile_is_as_hard_as_the_default_and_has_room_to_lock_memory() -> None:
    default, gpu = body(["true"]), body(["true"], settings={"profile": "gpu"})
    limits = {each["Name"]: (each["Soft"], each["Hard"]) for each in gpu["HostConfig"].pop("Ulimits")}
    assert limits == {"memlock": (-1, -1), "stack": (64 << 20, 64 << 20), "core": (0, 0)}
    default["HostConfig"].pop("Ulimits")
    assert gpu == default
    own = body(["true"], settings={"profile": "gpu", "ulimits": {"memlock": (1, 2)}})["HostConfig"]["Ulimits"]
    assert {"Name": "memlock", "Soft": 1, "Hard": 2} in own


@pytest.mark.parametrize("profile", ["default", "gpu", "trusted"])
def test_devices_are_asked_for_in_every_profile_by_those_alone_that_have_some(profile: ProfileName) -> None:
    asked = body(["true"], settings={"profile": profile}, devices=["0"])["HostConfig"]
    assert asked["DeviceRequests"][0]["DeviceIDs"] == ["0"]
    assert "DeviceRequests" not in body(["true"], settings={"profile": profile})["HostConfig"]


@pytest.mark.parametrize(
    ("asked", "held", "setting", "shm"),
    [
        (256 << 20, 256 << 20, None, 256 << 20),
        (64 << 30, 64 << 30, None, 64 << 30),
        (256 << 20, None, None, 1 << 30),
        (64 << 30, None, None, 64 << 30),
        (None, None, None, 1 << 30),
        (64 << 30, 64 << 30, 2 << 30, 2 << 30),
    ],
)
def test_shared_memory_is_as_much_as_the_memory_that_was_asked_for(
    asked: int | None, held: int | None, setting: int | None, shm: int
) -> None:
    made = body(["true"], memory=asked, limits=Limits(memory=held), settings={"shm_bytes": setting})
    assert made["HostConfig"]["ShmSize"] == shm


def test_the_network_is_a_setting() -> None:
    assert body(["true"])["HostConfig"]["NetworkMode"] == "host"
    assert body(["true"], settings={"network": "jobs"})["HostConfig"]["NetworkMode"] == "jobs"


def test_cpus_may_be_more_than_the_machine_has_and_next_to_none() -> None:
    assert body(["true"], limits=Limits(cpu=256))["HostConfig"]["CpuQuota"] == 25_600_000
    assert body(["true"], limits=Limits(cpu=1e-6))["HostConfig"]["CpuQuota"] == 1_000


@pytest.mark.parametrize("limits", [Limits(), Limits(memory=0, cpu=0.0)])
def test_no_limit_is_none_but_of_processes(limits: Limits) -> None:
    host = body(["true"], limits=limits)["HostConfig"]
    assert not {"Memory", "MemorySwap", "CpuQuota"} & set(host)
    assert host["PidsLimit"] > 0


def test_a_request_is_json() -> None:
    assert json.loads(json.dumps(body(None, given=GIVEN, devices=["0"]))) == body(None, given=GIVEN, devices=["0"])


def test_of_what_the_worker_imports_only_packages_are_shown() -> None:
    found = own_libraries(["/somewhere", "/usr/lib/python3.12", "/venv/lib/python3.12/site-packages"])
    assert found.mounts["/venv/lib/python3.12/site-packages"] == "/opt/fluster/packages/0"
    assert not {"/somewhere", "/usr/lib/python3.12"} & set(found.mounts)
    assert {Path(source).name for source in found.mounts} == {
        "site-packages",
        *("fluster", "fluster_bus", "fluster_services"),  # of this checkout
    }


def test_folders_that_hold_what_tasks_must_not_reach_are_not_theirs(tmp_path: Path) -> None:
    modules, home = tmp_path / "home" / "modules", tmp_path / "home"
    for folder in (modules, home / "state"):
        folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to(home)
    paths = ["/", str(home), str(tmp_path / "link"), str(modules), str(tmp_path / "none")]
    assert list(given_libraries(paths, secret=[home / "state"]).mounts) == [str(modules)]
    assert list(given_libraries(paths, secret=[Path("/run/docker.sock")]).mounts) == [*paths[1:4]]


def test_what_the_worker_is_told_of_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DOCKER_HOST", "FLUSTER_DOCKER_HOST", "FLUSTER_IMAGE", "FLUSTER_MOUNT_ROOTS"):
        monkeypatch.delenv(name, raising=False)
    told = {"PROFILE": "gpu", "NETWORK": "jobs", "ULIMITS": "nofile=10:20", "SHM_SIZE": "2GiB"}
    for name, text in told.items():
        monkeypatch.setenv(f"FLUSTER_CONTAINER_{name}", text)
    assert _containers() == ContainerSettings(
        profile="gpu", network="jobs", ulimits={"nofile": (10, 20)}, shm_bytes=2 << 30
    )


@pytest.mark.parametrize(("name", "text"), [("PROFILE", "root"), ("SHM_SIZE", "much"), ("ULIMITS", "nofile")])
def test_what_it_is_told_wrong_ends_it_with_the_name(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"FLUSTER_CONTAINER_{name}", text)
    with pytest.raises(SettingError, match=rf"^FLUSTER_CONTAINER_{name}.*'{text}'"):
        _containers()


def test_ulimits_are_read_as_they_are_written_for_docker() -> None:
    assert parse_ulimits("nofile=1024:65536, core=0,memlock=-1") == {
        "nofile": (1_024, 65_536),
        "core": (0, 0),
        "memlock": (-1, -1),
    }


@pytest.mark.parametrize("text", ["nofile", "nofile=", "nofile=many", "=1", "nofile=1:2:3"])
def test_a_ulimit_that_is_none_is_quoted(text: str) -> None:
    with pytest.raises(ValueError, match=f"invalid limit '{text}'"):
        parse_ulimits(text)
