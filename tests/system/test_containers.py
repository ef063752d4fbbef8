"""What containers add to the contract of a runtime, by a real Docker Engine."""

import dataclasses
import json
import resource
import signal
from pathlib import Path

import psutil
import pytest

from fluster_bus.messages import JobStatus
from fluster_services.worker.contract.container import STATE_LABEL
from fluster_services.worker.contract.faults import LaunchError
from fluster_services.worker.contract.outcome import outcome
from fluster_services.worker.linux.limits import Limits
from fluster_services.worker.runtimes import docker_runtime
from fluster_services.worker.runtimes.process_task import ProcessTask
from tests.docker_engine import Engine, OwnEngine
from tests.system.runtime_site import PATIENCE_S, Site, end_of, make_runtime, read_all, texts, wait_for_line
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

MIB = 1 << 20


async def reason_of(task: ProcessTask) -> str:
    return outcome(await end_of(task)).reason


# What a task finds


LOOK = """
import json, os
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
def writes(path):
    try:
        open(path + "/probe", "w").close()
        return True
    except OSError:
        return False
print(json.dumps({
    "user": os.getuid(), "capabilities": int(status["CapEff"], 16) | int(status["CapBnd"], 16),
    "no new privileges": status["NoNewPrivs"], "seccomp": status["Seccomp"],
    "writes": [path for path in ("/", "/usr", "/etc", "/tmp", "/run", "/dev/shm", os.getcwd()) if writes(path)],
    "socket": any(os.path.exists(path + "/docker.sock") for path in ("/run", "/var/run")),
    "shm": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize,
    "main process": os.getppid(), "folder": os.getcwd(), "home": os.environ["HOME"],
    "core": __import__("resource").getrlimit(__import__("resource").RLIMIT_CORE)[1],
}))
"""


async def test_a_task_has_nothing_that_it_could_escape_with(docker_site: Site) -> None:
    limits = Limits(memory=128 * MIB, cpu=0.5, pids=50)
    task = await docker_site.command("python3", "-c", LOOK, limits=limits)
    assert (await end_of(task)).exit_code == 0
    assert json.loads(texts(task)[0]) == {
        "user": 65_534,
        "capabilities": 0,
        "no new privileges": "1",
        "seccomp": "2",
        "writes": ["/tmp", "/dev/shm", "/fluster/work"],
        "socket": False,
        "shm": 128 * MIB,
        "main process": 1,
        "folder": "/fluster/work",
        "home": "/tmp",
        "core": 0,
    }


async def test_limits_and_labels_are_the_engines(docker_site: Site, engine: Engine) -> None:
    task = await docker_site.command("sh", "-c", "echo up; sleep 100", limits=Limits(memory=64 * MIB, cpu=0.5, pids=50))
    await wait_for_line(task, "up")
    (found,) = engine.containers(**{STATE_LABEL: str(docker_site.state_dir)})
    labels = {"fluster.namespace": "ns", "fluster.job": "job", "fluster.task": "0", "fluster.attempt": "1"}
    assert found["Labels"] == {**labels, STATE_LABEL: str(docker_site.state_dir)}
    config = engine.client.inspect_container(found["Id"])["HostConfig"]
    asked = [config[name] for name in ("Memory", "MemorySwap", "CpuQuota", "CpuPeriod", "PidsLimit", "Privileged")]
    assert asked == [64 * MIB, 64 * MIB, 50_000, 100_000, 50, False]


async def test_the_trusted_profile_is_the_images_own(docker_site: Site) -> None:
    _use(docker_site, profile="trusted")
    task = await docker_site.command(
        "sh", "-c", "id -u; touch /probe && grep -c docker-default /proc/self/status; exit 0"
    )
    assert (await end_of(task)).exit_code == 0
    assert texts(task)[0] == "0"
    assert texts(task, "stderr") == []


def _use(site: Site, **fields: object) -> None:
    """Have the site's runtime run containers with other settings."""
    assert site.containers is not None
    settings = dataclasses.replace(site.containers, **fields)  # type: ignore[arg-type]
    site.runtime._settings = settings  # type: ignore[union-attr]  # noqa: SLF001 - containers with other settings, at a runtime that is open


async def test_the_gpu_profile_has_large_stacks_and_no_more_rights(docker_site: Site) -> None:
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]  # an engine in a container cannot give more
    _use(docker_site, profile="gpu", ulimits={"memlock": (memlock, memlock)})
    task = await docker_site.command("sh", "-c", "ulimit -s; id -u; touch /probe")
    assert (await end_of(task)).exit_code == 1
    assert texts(task) == [str(64 << 10), "65534"]
    assert "Read-only file system" in texts(task, "stderr")[0]


async def test_an_engine_that_has_no_gpus_to_give_is_told_with_the_remedy(docker_site: Site) -> None:
    task = await docker_site.command("true", devices=["0"])
    reason = await reason_of(task)
    assert reason.startswith("NoGpuRuntimeError: the Docker engine at ")
    assert reason.endswith(
        "install the NVIDIA container toolkit there, or have this worker offer no GPUs: FLUSTER_GPUS=0"
    )


async def test_shared_memory_ulimits_and_the_network_are_the_workers_settings(docker_site: Site) -> None:
    _use(docker_site, shm_bytes=32 * MIB, ulimits={"nofile": (100, 200)}, network="none")
    script = "df -k --output=size /dev/shm; ulimit -Sn; ulimit -Hn; ls /sys/class/net"
    task = await docker_site.command("sh", "-c", script, limits=Limits(memory=64 * MIB))
    assert (await end_of(task)).exit_code == 0
    assert [text.strip() for text in texts(task)[1:]] == [str(32 << 10), "100", "200", "lo"]
    _use(docker_site, network="no-such")
    assert "network no-such not found" in await reason_of(await docker_site.command("true", key="ns.job.0.2"))


async def test_no_mount_brings_a_socket_that_owns_the_machine(docker_site: Site) -> None:
    assert docker_site.containers is not None
    own = Path(docker_site.containers.engine.removeprefix("unix://"))
    _use(docker_site, mount_roots=("/",))
    for place in ("/", "/run", "/var/run", "/run/containerd", str(own), str(own.parent), str(docker_site.state_dir)):
        with pytest.raises(LaunchError, match=r"files that no task may see|which is not there"):
            await docker_site.command("true", mounts={"/data": place})


async def test_the_workspace_is_copied_and_the_tasks_own(docker_site: Site, tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    (workspace / "src").mkdir(parents=True)
    (workspace / "src" / "theirs.py").write_text("word = 'found'")
    command = ("sh", "-c", "python3 -c 'import theirs; print(theirs.word)'; touch src/new")
    task = await docker_site.command(*command, workspace=str(workspace))
    assert (await end_of(task)).exit_code == 0
    assert texts(task) == ["found"]
    assert [path.name for path in (workspace / "src").iterdir()] == ["theirs.py"]


async def test_folders_are_seen_below_the_roots_of_the_worker_and_not_written_to(
    docker_site: Site, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "word").write_text("seen\n")
    _use(docker_site, mount_roots=(str(data),))
    script = "cat /data/word; echo new > /data/new"
    task = await docker_site.command("sh", "-c", script, mounts={"/data": str(data)})
    assert (await end_of(task)).exit_code == 2
    assert texts(task) == ["seen"]
    assert "Read-only file system" in texts(task, "stderr")[0]
    with pytest.raises(LaunchError, match="this worker mounts"):
        await docker_site.command("true", mounts={"/data": "/etc"}, key="ns.job.0.2")


# How it ends


async def test_what_a_task_leaves_for_its_keeper_to_stumble_over_is_passed_by(docker_site: Site) -> None:
    script = (
        "cd ..; rm -f *; mkfifo error.json progress result.json; ln -s /etc/shadow result.pickle; echo done; exit 1"
    )
    task = await docker_site.command("sh", "-c", script)
    record = await end_of(task)
    assert (record.exit_code, record.error, record.result_bytes) == (1, None, None)
    with pytest.raises(OSError, match="symbolic links"):
        task.read_result(0, 100)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 3", "exit code 3"),
        ("exit 137", "exit code 137"),
        ("printf oops; exit 255", "exit code 255"),
        ("kill -KILL $$", "killed by SIGKILL"),
        ("kill -SEGV $$", "killed by SIGSEGV"),
        ("exec python3 -c 'bytearray(400 << 20)'", "killed: over its memory limit of 64 MiB"),
        (
            "python3 -c 'bytearray(400 << 20)'; exit 4",
            "exit code 4, after a process of it was killed: over its memory limit of 64 MiB",
        ),
    ],
)
async def test_an_exit_code_a_signal_and_want_of_memory_are_told_apart(
    docker_site: Site, script: str, reason: str
) -> None:
    task = await docker_site.command("sh", "-c", script, limits=Limits(memory=64 * MIB))
    assert await reason_of(task) == reason
    assert [record.text for record in read_all(task) if "tini" in record.text] == []


async def test_want_of_memory_in_one_is_not_told_of_another(docker_site: Site) -> None:
    other = await docker_site.command("sh", "-c", "echo up; until [ -e gate ]; do sleep 0.05; done; kill -KILL $$")
    await wait_for_line(other, "up")
    script = "exec python3 -c 'bytearray(400 << 20)'"
    greedy = await docker_site.command("sh", "-c", script, limits=Limits(memory=64 * MIB), key="ns.job.1.1")
    assert await reason_of(greedy) == "killed: over its memory limit of 64 MiB"
    (_work_folder(other) / "gate").touch()
    assert await reason_of(other) == "killed by SIGKILL"


async def test_one_that_forks_without_end_is_held(docker_site: Site) -> None:
    script = "import os, time\ntry:\n for _ in range(100):\n  if os.fork() == 0: time.sleep(100)\nexcept OSError: print('held')"
    task = await docker_site.command("python3", "-c", script, limits=Limits(pids=20))
    await end_of(task)
    assert texts(task) == ["held"]


async def test_commands_and_images_that_do_not_fit_say_so(docker_site: Site, engine: Engine) -> None:
    async def why(*command: str, key: str, image: str | None = None, limits: Limits | None = None) -> str:
        fields = {"image": image or engine.image, "limits": limits or Limits()}
        if command:
            return await reason_of(await docker_site.command(*command, key=key, **fields))
        return await reason_of(await docker_site.call(print, "never", key=key, **fields))

    reasons = [
        await why("no-such-command", key="ns.job.0.1"),
        await why("/etc/passwd", key="ns.job.0.2"),
        await why("true", image="no/such:image", key="ns.job.0.3"),
        await why(image=engine.bare_image, key="ns.job.0.4"),
        await why(image=engine.other_python_image, key="ns.job.0.5"),
        await why("true", limits=Limits(memory=1_000), key="ns.job.0.6"),
    ]
    expected = [
        "command 'no-such-command' cannot be run in image",
        "command '/etc/passwd' cannot be run in image",
        "image 'no/such:image' is not here",
        "has no python3 to run a callable with",
        f"PythonMismatchError: image '{engine.other_python_image}' has Python 3.11",
        "inimum memory limit",
    ]
    for part, reason in zip(expected, reasons, strict=True):
        assert part in reason
    assert (await end_of(await docker_site.command("true", key="ns.job.0.7"))).exit_code == 0


# The worker goes


def _work_folder(task: ProcessTask) -> Path:
    return task.directory / "task" / "work"


async def test_a_restarted_worker_adopts_its_container(docker_site: Site) -> None:
    script = "seq 1000; echo oops >&2; until [ -e gate ]; do sleep 0.05; done; seq 1001 2000; exit 3"
    worker = await docker_site.start_worker(script)
    await worker.kill()
    task = await docker_site.adopt()
    assert task.spec.container is not None
    await wait_for_line(task, "oops")
    (_work_folder(task) / "gate").touch()
    record = await end_of(task)
    assert (record.exit_code, record.reason) == (3, "exited")
    assert texts(task) == [str(number) for number in range(1, 2001)]
    times = [each.time for each in read_all(task)]
    assert times == sorted(times)
    assert times[-1] > times[0]


async def test_a_container_that_nobody_attends_is_removed(docker_site: Site, engine: Engine) -> None:
    """As when the machine has no memory left, and all processes of the worker are killed at once."""
    worker = await docker_site.start_worker("echo up; sleep 1000")
    attendant = psutil.Process(worker.task_pid)
    await wait_until_async(lambda: _running(engine, docker_site), PATIENCE_S)
    keeper = attendant.parent()
    assert keeper is not None
    for process in (attendant, keeper):  # stopped first, or the one would act on the other's death
        process.suspend()
    for process in (attendant, keeper):
        process.kill()
    await worker.kill()
    assert _running(engine, docker_site)
    task = await docker_site.adopt()
    assert (await end_of(task)).reason == "keeper_died"
    assert _running(engine, docker_site) == []


async def test_one_whose_record_is_lost_is_removed(docker_site: Site, engine: Engine) -> None:
    labels = {STATE_LABEL: str(docker_site.state_dir)}
    made = engine.client.create_container(
        engine.image, ["sleep", "1000"], labels=labels, host_config={"NetworkMode": "none"}
    )
    engine.client.start(made["Id"])
    await docker_site.runtime.close()
    docker_site.runtime = make_runtime(docker_site.state_dir, docker_site.template, docker_site.containers)
    assert await docker_site.runtime.adopt() == []
    assert _running(engine, docker_site) == []


def _running(engine: Engine, site: Site) -> list[str]:
    found = engine.containers(**{STATE_LABEL: str(site.state_dir)})
    return [each["Id"] for each in found if each["State"] == "running"]


# The engine goes


async def test_an_engine_that_does_not_answer_is_named(
    docker_site: Site, own_engine: OwnEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_runtime, "_SWEEP_S", 0.05)
    await docker_site.runtime.adopt()
    _use(docker_site, timeout_s=0.5)
    labels = {STATE_LABEL: str(docker_site.state_dir)}
    with own_engine.silent():
        task = await docker_site.command("true")
        record = await end_of(task)
    ended = outcome(record)
    assert ended.reason == f"could not be started: the Docker engine at {own_engine.host} did not answer in time"
    assert (ended.state, ended.is_workers_fault) == (JobStatus.WORKER_FAILED, True)
    await wait_until_async(lambda: own_engine.containers(**labels), PATIENCE_S)  # it does so when it goes on
    await task.forget()
    await wait_until_async(lambda: not own_engine.containers(**labels), PATIENCE_S)
    _use(docker_site)
    assert (await end_of(await docker_site.command("true", key="ns.job.0.2"))).exit_code == 0


async def test_a_task_is_killed_though_the_engine_does_not_answer(docker_site: Site, own_engine: OwnEngine) -> None:
    task = await docker_site.command("sh", "-c", "echo up; sleep 1000")
    await wait_for_line(task, "up")
    (container,) = _running(own_engine, docker_site)
    main = psutil.Process(own_engine.client.inspect_container(container)["State"]["Pid"])
    with own_engine.silent():
        task.kill(0, "enough")
        await wait_until_async(lambda: not main.is_running() or main.status() == psutil.STATUS_ZOMBIE, PATIENCE_S)
    record = await end_of(task)
    assert (record.signal, record.reason) == (signal.SIGKILL, "killed")


async def test_a_restart_of_the_engine_loses_neither_the_task_nor_a_line(
    docker_site: Site, own_engine: OwnEngine
) -> None:
    script = "n=0; until [ -e gate ]; do n=$((n+1)); echo $n; echo $n >&2; sleep 0.02; done; printf end"
    task = await docker_site.command("sh", "-c", script)
    await wait_for_line(task, "5")
    own_engine.stop()
    own_engine.start()  # by this thread: the engine ends with the one that has started it
    before = len(texts(task))
    await wait_until_async(lambda: len(texts(task)) > before + 10, PATIENCE_S)
    (_work_folder(task) / "gate").touch()
    record = await end_of(task)
    assert (record.exit_code, record.reason) == (0, "exited")
    lines = texts(task)
    assert lines == [*map(str, range(1, len(lines))), "end"]
    assert texts(task, "stderr") == lines[:-1]
