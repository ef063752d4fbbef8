"""Jobs, actors and a cluster's deaths, with tasks in containers."""

import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
from docker.errors import NotFound

from fluster import ActorPool, ClusterStartError, deploy
from fluster.cluster import LocalCluster
from fluster_bus.messages import (
    Capacity,
    Entrypoint,
    EnvironmentConfig,
    JobRequest,
    JobStatus,
    ResourceConfig,
    WorkerId,
)
from fluster_services.config import DiskLimits, WorkerLimits
from fluster_services.worker.contract.config import ContainerSettings
from fluster_services.worker.contract.container import OWN_MINOR, STATE_LABEL
from tests import optional
from tests.docker_engine import Engine, OwnEngine, small_engine
from tests.system.built_images import left_of_builds, no_built_images
from tests.system.daemons import PATIENT, QUICK, Daemons
from tests.system.histories import events
from tests.system.image_registry import running_registry
from tests.system.job_requests import call, command, texts
from tests.system.package_index import PackageIndex
from tests.system.processes import Family
from tests.system.wheels import make_wheel
from tests.waiting import wait_until

PATIENCE_S = 60


@pytest.fixture(scope="module", autouse=True)
def _pickled_by_value() -> Iterator[None]:
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture(scope="module")
def contained(engine: Engine) -> Iterator[LocalCluster]:
    """A cluster whose tasks run in containers."""
    with (
        no_built_images(engine),
        LocalCluster(runtime="docker", docker_host=engine.host, image=engine.image) as cluster,
    ):
        yield cluster
        left = _all(engine, cluster.store_dir)
    assert left == []


def _all(engine: Engine, folder: Path) -> list[str]:
    """The containers of workers whose state lies in a folder."""
    return [each["Id"] for each in engine.containers() if each["Labels"].get(STATE_LABEL, "").startswith(f"{folder}/")]


def test_what_a_callable_returns_and_tells_comes_back(contained: LocalCluster) -> None:
    def work(number: int) -> dict[str, Any]:
        from fluster import current_task

        current_task().progress(0.5, "half")
        print("working")
        return {"twice": 2 * number, "where": os.getcwd(), "in container": os.path.exists("/.dockerenv")}  # noqa: PTH109, PTH110

    job_id = contained.launch(call(work, 21))
    assert contained.result(job_id, timeout=PATIENCE_S) == {"twice": 42, "where": "/fluster/work", "in container": True}
    task = contained.poll(job_id).tasks[0]
    assert task.progress is not None
    assert (task.progress.fraction, task.progress.message) == (0.5, "half")
    assert [line.text for line in contained.logs(job_id)] == ["working"]


class Summer:
    def __init__(self) -> None:
        self.sum = 0

    def add(self, data: bytes) -> int:
        self.sum += len(data)
        return self.sum


def test_a_job_in_one_container_calls_an_actor_in_another(contained: LocalCluster) -> None:
    def use(pool: ActorPool[Summer]) -> list[int]:
        return [pool.call().add(b"x" * size) for size in (1, 100_000, 20_000_000)]

    pool = deploy(contained, Summer, name="summer")
    try:
        assert pool.call().add(b"x") == 1
        job_id = contained.launch(call(use, pool))
        assert contained.result(job_id, timeout=PATIENCE_S) == [2, 100_002, 20_100_002]
    finally:
        pool.shutdown()


def test_what_cannot_run_here_fails_and_says_why(contained: LocalCluster, engine: Engine) -> None:
    environments = {
        "there is no image 'no.such.registry.invalid/image:1' here, and it cannot be pulled": EnvironmentConfig(
            image="no.such.registry.invalid/image:1"
        ),
        "has no python3 to run a callable with": EnvironmentConfig(image=engine.bare_image),
        "a callable needs the worker's own minor version": EnvironmentConfig(image=engine.other_python_image),
        "No matching distribution found for no-such": EnvironmentConfig(requirements="--no-index\nno-such"),
        "has no python3 to install packages for": EnvironmentConfig(image=engine.bare_image, pip_packages=("rich",)),
        f"{engine.other_python_image}' is Python": EnvironmentConfig(
            image=engine.other_python_image, pip_packages=("rich",)
        ),
        f"image '{engine.image}' has no Python '3.99'": EnvironmentConfig(python="3.99"),
    }
    jobs = {
        reason: contained.launch(call(print, "never", environment=environment))
        for reason, environment in environments.items()
    }
    for reason, job_id in jobs.items():
        info = contained.wait(job_id, timeout=PATIENCE_S)
        assert info.status is JobStatus.FAILED
        assert reason in info.error_message
        assert "never" not in [line.text for line in contained.logs(job_id)]
        assert ("No matching" in info.error_message) == any(
            "No matching" in line.text for line in contained.logs(job_id)
        )
    assert contained.wait(contained.launch(command("true")), timeout=PATIENCE_S).status is JobStatus.SUCCEEDED


@pytest.mark.parametrize("environment", [EnvironmentConfig(image="debian:12"), EnvironmentConfig(mounts={"/d": "/d"})])
def test_a_worker_without_containers_refuses_what_needs_them(
    cluster: LocalCluster, environment: EnvironmentConfig
) -> None:
    info = cluster.wait(cluster.launch(call(print, "never", environment=environment)), timeout=PATIENCE_S)
    assert info.status is JobStatus.FAILED
    assert "needs a worker that runs jobs in containers" in info.error_message


def _reasons(cluster: LocalCluster, job_id: str) -> list[str]:
    return [each.transition.reason for found in events(cluster).values() for each in found if each.job_id == job_id]


def test_attempts_and_tasks_of_a_job_run_in_one_image_whatever_its_tag_means_by_then(
    contained: LocalCluster, engine: Engine
) -> None:
    first = "$FLUSTER_TASK_INDEX.$FLUSTER_ATTEMPT = 0.1"
    script = f"read -r word < /word; echo $word; ! test {first} || exec /bin/busybox sleep 100"
    with running_registry(b"first\n") as (address, registry):
        name, digest = f"{address}/tiny:1", registry.digest
        job = command("/bin/busybox", "sh", "-c", script, max_retries_failure=1, replicas=2)
        one_at_a_time = {"environment": EnvironmentConfig(image=name), "resources": ResourceConfig(cpu=9)}
        job_id = contained.launch(job.model_copy(update=one_at_a_time))
        wait_until(lambda: texts(contained, job_id) == ["first"])
        registry.push(b"second\n")
        engine.client.pull(f"{address}/tiny", "1")
        try:
            (found,) = engine.containers(**{"fluster.job": job_id})
            engine.client.kill(found["Id"])
            info = contained.wait(job_id, timeout=PATIENCE_S)
            assert (info.status, [task.attempt for task in info.tasks]) == (JobStatus.SUCCEEDED, [2, 1])
            assert texts(contained, job_id) == ["first"] * 3
            images = [task.image for task in info.tasks]
            assert [(each.name, each.digest) for each in images if each is not None] == [(name, digest)] * 2
            started = f"started, in image {name}@{digest}"
            wait_until(lambda: _reasons(contained, job_id).count(started) == 3)
        finally:
            for each in (name, f"{address}/tiny@{digest}"):
                engine.client.remove_image(each)


def test_packages_are_installed_once_for_all_tasks(contained: LocalCluster, tmp_path: Path) -> None:
    def work() -> str:
        import beside  # type: ignore[import-not-found]
        import cloudpickle  # Fluster's own

        return f"{beside.where()} {bool(cloudpickle.dumps)}"

    make_wheel(tmp_path / "wheels", "beside")
    environment = EnvironmentConfig(
        workspace=tmp_path, pip_packages=("./wheels/beside-1.0-py3-none-any.whl",), requirements="--no-index"
    )
    job_id = contained.launch(call(work, environment=environment, replicas=2))
    info = contained.wait(job_id, timeout=PATIENCE_S)
    assert info.status is JobStatus.SUCCEEDED, info.error_message
    assert sum("Successfully installed beside-1.0" in line.text for line in contained.logs(job_id)) == 1
    found = contained.result(contained.launch(call(work, environment=environment)), timeout=PATIENCE_S)
    assert found == f"/opt/fluster-environment/lib/python{OWN_MINOR}/site-packages/beside.py True"


def test_a_job_whose_image_is_built_is_building_tells_how_and_can_be_stopped(
    contained: LocalCluster, engine: Engine, index: PackageIndex
) -> None:
    environment = EnvironmentConfig(requirements=f"--index-url {index.url}\nindexed")
    job_id = contained.launch(call(print, "never", environment=environment))
    wait_until(lambda: any("pip install" in line.text for line in contained.logs(job_id)), PATIENCE_S)
    wait_until(index.asked.is_set, PATIENCE_S)
    assert contained.poll(job_id).status is JobStatus.BUILDING
    contained.terminate(job_id, reason="changed my mind")
    info = contained.wait(job_id, timeout=PATIENCE_S)
    assert (info.status, info.error_message) == (JobStatus.KILLED, "changed my mind")
    wait_until(lambda: not left_of_builds(engine), PATIENCE_S, lambda: left_of_builds(engine))


def test_a_worker_that_is_killed_while_it_builds_leaves_nothing_and_the_next_one_builds_for_longer_than_a_fence(
    family: Family, engine: Engine, tmp_path: Path, index: PackageIndex
) -> None:
    environment = EnvironmentConfig(requirements=f"--index-url {index.url}\nindexed")
    settings = ContainerSettings(engine=engine.host, image=engine.image)
    with Daemons(tmp_path, family, timing=QUICK) as daemons:
        daemons.start_controller()
        daemons.start_worker(containers=settings)
        with daemons.connect() as cluster:
            job_id = cluster.launch(call(print, "built", environment=environment))
            wait_until(index.asked.is_set, PATIENCE_S)
            daemons.kill("w1")
            index.asked.clear()
            daemons.start_worker(containers=settings)
            wait_until(index.asked.is_set, PATIENCE_S)
            index.may_answer.set()
            info = cluster.wait(job_id, timeout=PATIENCE_S)
            assert info.status is JobStatus.SUCCEEDED, info.error_message
            assert (info.tasks[0].failures, info.tasks[0].preemptions) == (0, 1)
        wait_until(lambda: not left_of_builds(engine), PATIENCE_S, lambda: left_of_builds(engine))


def test_a_job_that_is_cancelled_leaves_nothing(contained: LocalCluster, engine: Engine) -> None:
    script = "trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.05; done"
    job_id = contained.launch(command("sh", "-c", script))
    wait_until(lambda: texts(contained, job_id) == ["up"], PATIENCE_S)
    contained.terminate(job_id)
    assert contained.wait(job_id, timeout=PATIENCE_S).status is JobStatus.KILLED
    assert texts(contained, job_id) == ["up", "saved"]
    assert _all(engine, contained.store_dir) == []


def test_ten_deaths_of_the_worker_lose_nothing_and_leave_nothing(
    family: Family, engine: Engine, tmp_path: Path
) -> None:
    script = "n=0; while [ $n -lt 200 ]; do n=$((n+1)); echo $n; sleep 0.05; done"
    with Daemons(tmp_path, family, timing=PATIENT) as daemons:
        daemons.start_controller()
        settings = ContainerSettings(engine=engine.host, image=engine.image)
        daemons.start_worker(containers=settings)
        with daemons.connect() as cluster:
            jobs = [cluster.launch(command("sh", "-c", script)) for _ in range(2)]
            wait_until(lambda: len(_all(engine, tmp_path)) == 2, PATIENCE_S)
            for _ in range(10):
                daemons.kill("w1")
                daemons.start_worker(containers=settings)
            for job_id in jobs:
                assert cluster.wait(job_id, timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
                assert texts(cluster, job_id) == [str(number) for number in range(1, 201)]
            cancelled = cluster.launch(command("sleep", "1000"))
            wait_until(lambda: _all(engine, tmp_path), PATIENCE_S)
            daemons.kill("w1")
            cluster.terminate(cancelled)
            daemons.start_worker(containers=settings)
            assert cluster.wait(cancelled, timeout=PATIENCE_S).status is JobStatus.KILLED
        assert _all(engine, tmp_path) == []
        held = [line for line in daemons.log("w1").splitlines() if "limits of tasks" in line]
        assert len(held) == 12  # starts of the worker
        assert all("limits of tasks are enforced: pids by the Docker engine" in line for line in held)


@pytest.mark.slow
def test_a_container_whose_attempt_was_superseded_is_removed(family: Family, engine: Engine, tmp_path: Path) -> None:
    settings = ContainerSettings(engine=engine.host, image=engine.image)

    def running(worker: str) -> list[str]:
        return [each for each in _all(engine, tmp_path / worker) if _is_running(engine, each)]

    with Daemons(tmp_path, family, timing=QUICK) as daemons:
        daemons.start_controller()
        daemons.start_worker("w1", containers=settings)
        with daemons.connect() as cluster:
            job_id = cluster.launch(command("sleep", "1000"))
            wait_until(lambda: running("w1"), PATIENCE_S)
            keepers = psutil.Process(daemons.running["w1"].pid).children(recursive=True)
            for process in keepers:  # first stopped, or one would act on another's death
                process.suspend()
            for process in keepers:
                process.kill()
            daemons.kill("w1")
            assert running("w1"), "nobody attends it"
            daemons.start_worker("w2", containers=settings)
            wait_until(lambda: running("w2"), PATIENCE_S)
            daemons.start_worker("w1", containers=settings)
            wait_until(lambda: not running("w1"), PATIENCE_S)
            assert running("w2")
            assert cluster.poll(job_id).tasks[0].attempt == 2
            cluster.terminate(job_id)
            cluster.wait(job_id, timeout=PATIENCE_S)


def _is_running(engine: Engine, container: str) -> bool:
    try:
        return bool(engine.client.inspect_container(container)["State"]["Running"])
    except NotFound:  # removed since it was listed
        return False


def test_with_the_cluster_gone_its_containers_are(engine: Engine, tmp_path: Path) -> None:
    with LocalCluster(runtime="docker", docker_host=engine.host, image=engine.image, store_dir=tmp_path) as cluster:
        cluster.launch(command("sh", "-c", "trap '' TERM; while :; do sleep 1; done"))
        wait_until(lambda: _all(engine, tmp_path), PATIENCE_S)
    wait_until(lambda: not _all(engine, tmp_path), PATIENCE_S)


def test_auto_takes_processes_where_no_engine_answers(tmp_path: Path) -> None:
    with LocalCluster(runtime="auto", docker_host=f"unix://{tmp_path}/none") as cluster:
        assert cluster.wait(cluster.launch(command("true")), timeout=PATIENCE_S).status is JobStatus.SUCCEEDED


def test_without_an_engine_a_cluster_of_containers_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(
        ClusterStartError,
        match=rf"^worker-0 could not be started: the Docker engine at unix://{tmp_path}/none cannot be reached",
    ):
        LocalCluster(runtime="docker", docker_host=f"unix://{tmp_path}/none")


def test_containers_are_as_the_cluster_says(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("seen\n")
    with LocalCluster(
        runtime="docker",
        docker_host=engine.host,
        image=engine.image,
        network="none",
        profile="trusted",
        mount_roots=[tmp_path],
        shm_size="16MiB",
        ulimits={"nofile": (512, 1024), "core": 0},
    ) as cluster:
        script = "cat /data/data; df -m /dev/shm | tail -1; ulimit -n; ulimit -Hn; touch /allowed; ls /sys/class/net"
        environment = EnvironmentConfig(mounts={"/data": str(tmp_path)})
        request = JobRequest(name="look", entrypoint=Entrypoint(command=("sh", "-c", script)), environment=environment)
        job_id = cluster.launch(request)
        assert cluster.wait(job_id, timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
        seen, shared, soft, hard, *networks = texts(cluster, job_id)
    assert (seen, shared.split()[1], soft, hard, networks) == ("seen", "16", "512", "1024", ["lo"])


def test_builds_are_as_the_cluster_says(engine: Engine) -> None:
    environment = EnvironmentConfig(pip_packages=("rich",))
    with LocalCluster(
        runtime="docker", docker_host=engine.host, image=engine.image, build_network="none", build_timeout=0.001
    ) as cluster:
        job_id = cluster.launch(command("true").model_copy(update={"environment": environment}))
        info = cluster.wait(job_id, timeout=PATIENCE_S)
    assert info.error_message is not None
    assert "the image for its packages was not built within 0.001 s" in info.error_message


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"network": "none", "mount_roots": ["/srv"]}, "network, mount_roots are for tasks in containers"),
        ({"runtime": "docker", "profile": "root"}, "profile='root' is not known: choose default, gpu, trusted"),
        ({"runtime": "docker", "ulimits": {"nofile": -2}}, "ulimits has nofile=-2: give a number"),
        ({"runtime": "docker", "shm_size": "much"}, "much"),
        ({"build_network": "none", "mount_roots": ["/srv"]}, "mount_roots, build_network are for tasks in containers"),
        ({"runtime": "docker", "build_timeout": -1}, "build_timeout=-1: give seconds"),
        ({"runtime": "docker", "build_ca": "/nowhere/ca.pem"}, "build_ca='/nowhere/ca.pem' cannot be read"),
        ({"drain_timeout": float("nan")}, "drain_timeout=nan: give seconds"),
    ],
)
def test_settings_of_containers_that_cannot_be(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        LocalCluster(**given)


def test_a_worker_whose_engine_is_away_charges_nobody_and_returns_with_it(
    own_engine: OwnEngine, tmp_path: Path
) -> None:
    settings = ContainerSettings(engine=own_engine.host, image=own_engine.image)
    # A family of the daemons alone: the engine that is started again is to outlive the test.
    with Daemons(tmp_path, Family()) as daemons, daemons.connect() as cluster:
        daemons.start_controller()
        daemons.start_worker("w1", working_dir=None, containers=settings)
        own_engine.stop()
        try:
            job = cluster.launch(command("true"))
            wait_until(lambda: f"w1 takes no work: the Docker engine at {own_engine.host}" in cluster.explain(job))
        finally:
            own_engine.start()
        (task,) = cluster.wait(job, timeout=PATIENCE_S).tasks
        assert (task.status, task.failures, task.preemptions) == (JobStatus.SUCCEEDED, 0, 0)


def test_an_engine_whose_disk_is_full_costs_no_task_anything(tmp_path: Path) -> None:
    # A family of the daemons alone, as the engine has processes too.
    with small_engine() as engine, Daemons(tmp_path, Family()) as daemons:
        daemons.start_controller()
        daemons.start_worker(
            "w1", working_dir=None, containers=ContainerSettings(engine=engine.host, image=engine.image)
        )
        with daemons.connect() as cluster:
            assert cluster.wait(cluster.launch(command("true")), timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
            engine.fill()
            jobs = [cluster.launch(command("true")) for _ in range(3)]
            wait_until(
                lambda: (
                    f"w1 takes no work: the disk of the Docker engine at {engine.host} has no room"
                    in cluster.explain(jobs[0])
                )
            )
            engine.make_room()
            for each in cluster.wait(jobs, timeout=PATIENCE_S):
                (task,) = each.tasks
                assert (task.status, task.failures, task.preemptions) == (JobStatus.SUCCEEDED, 0, 0)


def test_an_engine_without_room_for_an_image_costs_no_task_anything(tmp_path: Path) -> None:
    with (
        small_engine() as engine,
        running_registry(bytes(100 << 20)) as (address, _),
        Daemons(tmp_path, Family()) as daemons,
    ):
        daemons.start_controller()
        settings = ContainerSettings(engine=engine.host, image=engine.image)
        limits = WorkerLimits(disk=DiskLimits(least_free_bytes=1 << 20))
        daemons.start_worker("w1", working_dir=None, containers=settings, limits=limits)
        with daemons.connect() as cluster:
            engine.fill(left_bytes=30 << 20)  # enough for all else, and less than a tenth
            environment = EnvironmentConfig(image=f"{address}/big:1")
            job = cluster.launch(
                JobRequest(name="big", entrypoint=Entrypoint(command=("true",)), environment=environment)
            )
            wait_until(
                lambda: "w1 takes no work: only" in cluster.explain(job),
                describe=lambda: cluster.explain(job),
            )
            engine.make_room()
            info = cluster.wait(job, timeout=PATIENCE_S)
            assert "command 'true' cannot be run in image" in info.error_message, "it was pulled"
            assert (info.tasks[0].failures, info.tasks[0].preemptions) == (1, 0)


def test_a_worker_does_not_believe_a_registry_that_its_engine_is_full(contained: LocalCluster) -> None:
    with running_registry() as (address, registry):
        registry.refusal = "no space left on device"
        environment = EnvironmentConfig(image=f"{address}/tiny:1")
        job = contained.launch(command("true").model_copy(update={"environment": environment}))
        wait_until(
            lambda: sum(task.failures + task.preemptions for task in contained.poll(job).tasks),
            describe=lambda: contained.explain(job),
        )
        (worker,) = contained.list_workers()
        assert worker.info.trouble == ""
        contained.terminate(job)
        contained.wait(job, timeout=PATIENCE_S)


@pytest.mark.slow
def test_an_engine_that_is_nearly_full_charges_no_task_for_packages_without_room(tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    wheel = make_wheel(workspace, "large")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("large.bin", os.urandom(20 << 20))
    environment = EnvironmentConfig(workspace=workspace, pip_packages=(f"./{wheel.name}",))
    with small_engine() as engine, Daemons(tmp_path, Family()) as daemons:
        daemons.start_controller()
        settings = ContainerSettings(engine=engine.host, image=engine.image)
        limits = WorkerLimits(disk=DiskLimits(least_free_bytes=1 << 20))
        daemons.start_worker("w1", working_dir=None, containers=settings, limits=limits)
        with daemons.connect() as cluster:
            engine.fill(left_bytes=30 << 20)
            job = cluster.launch(command("true").model_copy(update={"environment": environment}))
            wait_until(lambda: "w1 takes no work: only" in cluster.explain(job), describe=lambda: cluster.explain(job))
            engine.make_room()
            (task,) = cluster.wait(job, timeout=PATIENCE_S).tasks
            assert (task.status, task.failures, task.preemptions) == (JobStatus.SUCCEEDED, 0, 0)


def test_who_waits_for_an_image_sees_how_far_it_is(contained: LocalCluster, engine: Engine) -> None:
    with running_registry() as (address, registry):
        registry.gate.clear()
        name = f"{address}/slow:1"
        request = JobRequest(
            name="slow",
            entrypoint=Entrypoint(command=("true",)),
            environment=EnvironmentConfig(image=name),
            replicas=2,
        )
        job = contained.launch(request)
        try:
            wait_until(
                lambda: (
                    f"tasks are being prepared on worker-0, since 0 s: pulling image {name}" in contained.explain(job)
                ),
                describe=lambda: contained.explain(job),
            )
            assert contained.poll(job).progress_message == f"pulling image {name}"
            registry.gate.set()
            contained.wait(job, timeout=PATIENCE_S)
            lines = [line.text for line in contained.logs(job) if "image" in line.text]
            assert lines[0] == f"pulling image {name}"
            assert len([line for line in lines if line.startswith(f"image {name} is there, after")]) == 1
        finally:
            engine.client.remove_image(name)


def test_a_task_in_a_container_has_the_disk_that_it_asked_for(engine: Engine, tmp_path: Path, family: Family) -> None:
    settings = ContainerSettings(engine=engine.host, image=engine.image)
    total = Capacity(cpu=4, memory=4 << 30, disk=1 << 30)
    disk = ResourceConfig.with_cpu(1, disk="16MiB")
    with Daemons(tmp_path, family) as daemons, daemons.connect() as cluster:
        daemons.start_controller()
        daemons.start_worker("w1", containers=settings, enforce_limits="auto", total=total, working_dir=None)
        limits = cluster.worker_health(WorkerId("w1")).limits
        if "disk is enforced" not in limits:
            optional.skip("mounts", f"DISK LIMITS OF CONTAINERS ARE NOT TESTED: {limits}")
        over = cluster.launch(command("sh", "-c", "head -c 40M /dev/zero > data", resources=disk))
        fine = cluster.launch(call(lambda: bytes(1 << 20), resources=disk))
        info = cluster.wait(over, timeout=PATIENCE_S)
        assert info.status is JobStatus.FAILED
        assert info.error_message.startswith("exit code 1; its disk of 16 MiB was full")
        assert cluster.result(fine, timeout=PATIENCE_S) == bytes(1 << 20)
