"""Workspaces, packages and interpreters of jobs on a LocalCluster. No package index is asked."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fluster.cli.jobs import outcome
from fluster.cluster import Cluster, LocalCluster
from fluster.errors import WorkspaceError
from fluster.worker_pool import WorkerPool
from fluster_bus.messages import (
    Entrypoint,
    EnvironmentConfig,
    JobId,
    JobInfo,
    JobRequest,
    JobStatus,
    create_environment,
)
from fluster_services.worker.contract.faults import BuildError
from fluster_services.worker.environments.uv import find_uv
from tests.system.job_requests import call, command, texts
from tests.system.processes import Family
from tests.system.wheels import make_wheel
from tests.waiting import wait_until

PATIENCE_S = 60
OTHER_PYTHONS = [f"3.{minor}" for minor in (11, 12, 13) if minor != sys.version_info.minor]


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """uv's cache and settings are none of the machine's; no index is asked for a package."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("UV_")]:
            patch.delenv(name)
        patch.setenv("UV_CACHE_DIR", str(tmp_path_factory.mktemp("uv-cache")))
        patch.setenv("UV_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def site(_own_cache: None) -> Iterator[LocalCluster]:
    """A cluster of one worker with fresh caches."""
    with LocalCluster(workers=1) as cluster:
        yield cluster


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A folder with a module of its own and a file beside it."""
    folder = tmp_path / "workspace"
    (folder / "src").mkdir(parents=True)
    (folder / "only_in_workspace.py").write_text("ANSWER = 42\n")
    (folder / "src" / "below_src.py").write_text("ANSWER = 43\n")
    (folder / "data.txt").write_text("some data")
    return folder


def _in(environment: EnvironmentConfig, *words: str, **fields: Any) -> JobRequest:
    """A job that runs a command in an environment."""
    return command(*words, **fields).model_copy(update={"environment": environment})


def _run(cluster: Cluster, environment: EnvironmentConfig, what: Callable[[], object] | list[str]) -> JobInfo:
    entrypoint = Entrypoint(command=tuple(what)) if isinstance(what, list) else Entrypoint(callable=what)
    request = JobRequest(name="job", entrypoint=entrypoint, environment=environment)
    return cluster.wait(cluster.launch(request), timeout=PATIENCE_S)


def _succeed(cluster: Cluster, environment: EnvironmentConfig, what: Callable[[], object] | list[str]) -> JobId:
    info = _run(cluster, environment, what)
    assert info.status is JobStatus.SUCCEEDED, (info.error_message, texts(cluster, info.job_id, "stderr"))
    return info.job_id


def _fail(cluster: Cluster, environment: EnvironmentConfig, what: Callable[[], object] | list[str]) -> str:
    info = _run(cluster, environment, what)
    assert info.status is JobStatus.FAILED
    return info.error_message


def _stored(cluster: LocalCluster, kind: str) -> list[Path]:
    return sorted((cluster.store_dir / "worker-0" / kind).iterdir())


# ---- workspaces -----------------------------------------------------------------------------------------


def test_a_callable_finds_its_workspace(site: LocalCluster, workspace: Path) -> None:
    def work() -> None:
        import below_src  # type: ignore[import-not-found]
        import only_in_workspace  # type: ignore[import-not-found]

        print(
            only_in_workspace.ANSWER,
            below_src.ANSWER,
            Path("data.txt").read_text(),
            sorted(path.name for path in Path().iterdir()),
        )

    job_id = _succeed(site, EnvironmentConfig(workspace=workspace), work)
    assert texts(site, job_id) == ["42 43 some data ['data.txt', 'only_in_workspace.py', 'src']"]


def test_a_command_finds_its_workspace(site: LocalCluster, workspace: Path) -> None:
    script = "import only_in_workspace, below_src; print(only_in_workspace.ANSWER, below_src.ANSWER)"
    job_id = _succeed(site, create_environment(workspace=str(workspace)), ["python", "-c", script])
    assert texts(site, job_id) == ["42 43"]


def test_each_task_has_a_workspace_of_its_own(site: LocalCluster, workspace: Path) -> None:
    script = "cat data.txt; echo; echo $FLUSTER_TASK_INDEX >>data.txt; echo spoilt >only_in_workspace.py"
    for _ in range(2):
        job_id = site.launch(_in(EnvironmentConfig(workspace=workspace), "sh", "-c", script, replicas=3))
        assert site.wait(job_id, timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
        assert texts(site, job_id) == ["some data"] * 3
    assert (workspace / "data.txt").read_text() == "some data"


def test_a_workspace_is_stored_and_unpacked_once(site: LocalCluster, workspace: Path) -> None:
    (workspace / "data.txt").write_text("of this test")
    before = len(_stored(site, "workspaces"))
    requests = [_in(EnvironmentConfig(workspace=workspace), "true") for _ in range(4)]
    for _ in range(2):
        infos = site.wait(site.launch_many(requests), timeout=PATIENCE_S)
        assert {info.status for info in infos} == {JobStatus.SUCCEEDED}
    assert len(_stored(site, "workspaces")) == before + 1


def test_a_job_launches_a_child_with_a_workspace(site: LocalCluster, workspace: Path) -> None:
    """With the rights of a job, which may not do much."""

    def work() -> None:
        from fluster.cluster import current_cluster

        Path("made_here.py").write_text("print('hello from the child')")
        cluster = current_cluster()
        child = JobRequest(
            name="child",
            entrypoint=Entrypoint(command=("python", "made_here.py")),
            environment=EnvironmentConfig(workspace="."),
        )
        job_id = cluster.launch(child)
        assert cluster.wait(job_id, timeout=60).status is JobStatus.SUCCEEDED
        print(*(line.text for line in cluster.logs(job_id)))

    job_id = _succeed(site, EnvironmentConfig(workspace=workspace), work)
    assert texts(site, job_id) == ["hello from the child"]


def test_what_cannot_be_packed_is_refused_at_launch(site: LocalCluster, workspace: Path) -> None:
    (workspace / "link").symlink_to("/etc")
    with pytest.raises(WorkspaceError, match="link link to /etc, which leads out"):
        site.launch(_in(EnvironmentConfig(workspace=workspace), "true"))
    with pytest.raises(WorkspaceError, match="is not a folder"):
        site.launch(_in(EnvironmentConfig(workspace=workspace / "missing"), "true"))


def test_a_workspace_that_is_not_stored_is_told(site: LocalCluster) -> None:
    error = _fail(site, EnvironmentConfig(bundle="0" * 64), ["true"])
    assert "its workspace cannot be had: object 000" in error
    assert "launch the job again" in error


def test_a_stored_file_that_is_no_workspace_is_told(site: LocalCluster) -> None:
    async def put(data: bytes) -> str:
        from fluster_bus.storage.objects import ObjectStore

        return await ObjectStore(site.asynchronous.bus, site.namespace).put(data)

    bundle = site.portal.run(put, b"no archive, and long enough to be looked at")
    assert "not a zip archive" in _fail(site, EnvironmentConfig(bundle=bundle), ["true"])


# ---- packages -------------------------------------------------------------------------------------------


def _where(name: str) -> Callable[[], None]:
    def work() -> None:
        import importlib

        module = importlib.import_module(name)
        print(module.VERSION)
        print(module.where())
        print(sys.executable)

    return work


def test_a_callable_has_its_packages_and_fluster(site: LocalCluster, workspace: Path, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "for_callables", "1.5")

    def work() -> None:
        import for_callables  # type: ignore[import-not-found]
        import only_in_workspace

        from fluster.cluster import current_cluster

        print(for_callables.VERSION, only_in_workspace.ANSWER, os.environ["MODE"], Path.cwd().name)
        print(sys.prefix == os.environ["VIRTUAL_ENV"], for_callables.where().startswith(sys.prefix))
        print(len(current_cluster().list_workers()), current_cluster().namespace)

    environment = EnvironmentConfig(workspace=workspace, pip_packages=(str(wheel),), env_vars={"MODE": "training"})
    job_id = _succeed(site, environment, work)
    assert texts(site, job_id) == ["1.5 42 training work", "True True", "1 default"]
    said = texts(site, job_id, "stderr")
    assert said[0].startswith("$ uv venv")
    assert any("for-callables==1.5" in line for line in said)


def test_a_command_has_its_packages(site: LocalCluster, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "for_commands")
    script = "import for_commands, fluster, sys; print(for_commands.VERSION, sys.executable.startswith(sys.prefix))"
    environment = create_environment(pip_packages=[str(wheel)])
    job_id = _succeed(site, environment, ["python", "-c", script])
    assert texts(site, job_id) == ["1.0 True"]


def test_the_environments_packages_go_before_the_workers(site: LocalCluster, tmp_path: Path) -> None:
    environment = EnvironmentConfig(pip_packages=(str(make_wheel(tmp_path, "typer", "99.0")),))

    def work() -> None:
        import cloudpickle  # noqa: F401 - the worker's
        import typer

        print(typer.VERSION)  # type: ignore[attr-defined]

    assert texts(site, _succeed(site, environment, work)) == ["99.0"]


def test_an_exception_in_an_environment_arrives_as_itself(site: LocalCluster, tmp_path: Path) -> None:
    def work() -> None:
        raise KeyError("lost")

    info = _run(site, EnvironmentConfig(pip_packages=(str(make_wheel(tmp_path, "failing")),)), work)
    message = info.error_message.partition(";")[0]
    assert (info.status, message, info.exit_code) == (JobStatus.FAILED, "KeyError: 'lost'", 1)


def test_requirements_with_options_and_paths_within_the_workspace(site: LocalCluster, workspace: Path) -> None:
    make_wheel(workspace / "wheels", "one_of_two", requires="two_of_two>=2")
    make_wheel(workspace / "wheels", "two_of_two", "1.0")
    make_wheel(workspace / "wheels", "two_of_two", "2.0")
    requirements = "--no-index\n--find-links ./wheels\none_of_two==1.0\n"
    for version in ("2.0", "3.0"):
        make_wheel(workspace / "wheels", "two_of_two", version)
        job_id = _succeed(site, EnvironmentConfig(workspace=workspace, requirements=requirements), _where("two_of_two"))
        assert texts(site, job_id)[0] == version, "another workspace, another environment"


LOCK = """
version = 1
revision = 3
requires-python = ">=3.11"

[[package]]
name = "locked"
version = "4.2"
source = { path = "wheels/locked-4.2-py3-none-any.whl" }
wheels = [{ filename = "locked-4.2-py3-none-any.whl", hash = "sha256:SHA256" }]

[[package]]
name = "user-project"
version = "1"
source = { virtual = "." }
dependencies = [{ name = "locked" }]

[package.metadata]
requires-dist = [{ name = "locked", path = "wheels/locked-4.2-py3-none-any.whl" }]
"""


def test_a_lock_of_the_workspace(site: LocalCluster, workspace: Path) -> None:
    make_wheel(workspace / "wheels", "locked", "4.2")
    (workspace / "pyproject.toml").write_text(
        '[project]\nname = "user-project"\nversion = "1"\nrequires-python = ">=3.11"\ndependencies = ["locked"]\n'
        '[tool.uv.sources]\nlocked = {path = "wheels/locked-4.2-py3-none-any.whl"}\n'
    )
    environment = EnvironmentConfig(workspace=workspace, uv_lock=True)
    assert "no uv.lock: run `uv lock` there" in _fail(site, environment, ["true"])
    wheel = workspace / "wheels/locked-4.2-py3-none-any.whl"
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (workspace / "uv.lock").write_text(LOCK.replace("SHA256", sha256))
    job_id = _succeed(site, environment, _where("locked"))
    assert texts(site, job_id)[0] == "4.2"


def test_tasks_that_start_together_build_one_environment(site: LocalCluster, tmp_path: Path) -> None:
    environment = EnvironmentConfig(pip_packages=(str(make_wheel(tmp_path, "shared")),))
    before = len(_stored(site, "environments"))
    job_ids = site.launch_many(
        [call(_where("shared"), environment=environment, replicas=2), call(_where("shared"), environment=environment)]
    )
    infos = site.wait(job_ids, timeout=PATIENCE_S)
    assert {info.status for info in infos} == {JobStatus.SUCCEEDED}
    lines = [line for job_id in job_ids for line in texts(site, job_id)]
    assert len(lines) == 9
    assert len(set(lines)) == 3
    assert len(_stored(site, "environments")) == before + 1
    said = [line for job_id in job_ids for line in texts(site, job_id, "stderr")]
    assert sum(line.startswith("$ uv venv") for line in said) == 1


def test_what_uv_says_of_a_bad_package_is_in_the_error_and_the_log(site: LocalCluster, tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "there")
    requirements = f"--no-index\n--find-links {tmp_path}/wheels\nnot-there\nthere"
    before = _stored(site, "environments")
    info = _run(site, EnvironmentConfig(requirements=requirements), ["true"])
    assert info.status is JobStatus.FAILED
    assert "`uv pip install" in info.error_message
    assert "not-there was not found in the provided package locations" in info.error_message
    assert any("not-there was not found" in line for line in texts(site, info.job_id, "stderr"))
    wait_until(lambda: _stored(site, "environments") == before, PATIENCE_S)
    (task,) = info.tasks
    assert (task.failures, task.preemptions) == (1, 0)


def test_a_worker_without_uv_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BuildError, match=r"has no uv.*`/nowhere/python -m pip install uv`"):
        find_uv()


# ---- other Pythons --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OtherPython:
    version: str
    path: str


@pytest.fixture(scope="module")
def other() -> OtherPython:
    """A Python that this machine has beside the one that runs the tests."""
    for version in OTHER_PYTHONS:
        found = subprocess.run(
            [find_uv(), "python", "find", "--no-project", "--offline", "--no-python-downloads", version],
            check=False,
            capture_output=True,
            text=True,
        )
        if found.returncode == 0:
            return OtherPython(version, os.path.realpath(found.stdout.strip()))
    pytest.skip(f"this machine has no Python beside {sys.version_info[:2]}")


def test_what_was_said_in_vain_is_in_the_log_and_what_said_nothing_is_not_looked_for(site: LocalCluster) -> None:
    refused = _run(
        site, EnvironmentConfig(pip_packages=("no-such-package-here==1.0",), requirements="--no-index"), ["true"]
    )
    assert f"; `fluster logs {refused.job_id}` shows what it wrote" in outcome(refused)
    assert any("no-such-package-here" in text for text in texts(site, refused.job_id, "stderr"))
    missing = _run(site, EnvironmentConfig(python="/no/such/python"), ["true"])
    assert missing.tasks[0].started_at is not None, "a worker took it, and made its environment in vain"
    assert "`fluster logs" not in outcome(missing)
    assert [line.text for line in site.logs(missing.job_id)] == []


def test_a_command_has_another_python(site: LocalCluster, other: OtherPython, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "for_another")
    script = "import sys, for_another; print('%d.%d' % sys.version_info[:2])"
    environment = EnvironmentConfig(python=other.path, pip_packages=(str(wheel),))
    assert texts(site, _succeed(site, environment, ["python", "-c", script])) == [other.version]


def test_a_callable_of_another_python_is_refused(site: LocalCluster, other: OtherPython) -> None:
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    error = _fail(site, EnvironmentConfig(python=other.path), print)
    assert f"python='{other.path}' is Python {other.version} and this worker's is {own}" in error
    assert "Give the job as a command" in error
    pickled = Entrypoint(callable=print).model_copy(update={"python": other.version})
    error = site.wait(site.launch(JobRequest(name="old", entrypoint=pickled)), timeout=PATIENCE_S).error_message
    assert f"pickled by Python {other.version}, and this worker's is {own}: launch it from Python {own}" in error


def test_a_python_by_its_path(site: LocalCluster) -> None:
    job_id = _succeed(site, EnvironmentConfig(python=sys.executable), lambda: print(sys.prefix != sys.base_prefix))
    assert texts(site, job_id) == ["True"]


def test_a_python_that_is_not_there(site: LocalCluster) -> None:
    assert "No interpreter found for Python 3.99" in _fail(site, EnvironmentConfig(python="3.99"), ["true"])


# ---- what goes on meanwhile -----------------------------------------------------------------------------


@pytest.fixture
def slow_package(tmp_path: Path) -> Path:
    """A package whose build says that it has begun, by a file, and waits for a second file to be there."""
    source = tmp_path / "slow"
    source.mkdir()
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "slow"\nversion = "1"\n'
    )
    (source / "backend.py").write_text(
        "import pathlib, sys, threading\n"
        f"place = pathlib.Path({str(tmp_path)!r})\n"
        "def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):\n"
        "    (place / 'begun').touch()\n"
        "    while not (place / 'may-end').exists():\n"
        "        threading.Event().wait(0.02)\n"
        f"    sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "    from tests.system.wheels import make_wheel\n"
        "    return make_wheel(pathlib.Path(wheel_directory), 'slow', '1').name\n"
    )
    return source


def test_a_job_that_waits_for_its_environment_is_building_and_can_be_stopped(
    family: Family, site: LocalCluster, slow_package: Path
) -> None:
    environment = EnvironmentConfig(pip_packages=(str(slow_package),))
    job_ids = site.launch_many([_in(environment, "true") for _ in range(2)])
    begun, may_end = slow_package.parent / "begun", slow_package.parent / "may-end"
    wait_until(begun.exists, PATIENCE_S)
    assert {site.poll(job_id).status for job_id in job_ids} == {JobStatus.BUILDING}
    said = functools.partial(_said_by_uv, site, job_ids)
    wait_until(lambda: any(line.startswith("$ uv pip install") for line in said()), PATIENCE_S, said)
    site.terminate(job_ids[0], reason="changed my mind")
    info = site.wait(job_ids[0], timeout=PATIENCE_S)
    assert (info.status, info.error_message) == (JobStatus.KILLED, "changed my mind")
    assert site.poll(job_ids[1]).status is JobStatus.BUILDING, "the other one still wants it"
    may_end.touch()
    assert site.wait(job_ids[1], timeout=PATIENCE_S).status is JobStatus.SUCCEEDED


def _said_by_uv(site: LocalCluster, job_ids: list[JobId]) -> list[str]:
    return [line for job_id in job_ids for line in texts(site, job_id, "stderr")]


def test_a_build_that_nobody_waits_for_is_ended(site: LocalCluster, slow_package: Path) -> None:
    job_id = site.launch(_in(EnvironmentConfig(pip_packages=(str(slow_package),)), "true"))
    wait_until((slow_package.parent / "begun").exists, PATIENCE_S)
    site.terminate(job_id)
    assert site.wait(job_id, timeout=PATIENCE_S).status is JobStatus.KILLED
    wait_until(functools.partial(_nobody_builds, slow_package), PATIENCE_S)
    wait_until(lambda: not [path for path in _stored(site, "environments") if not (path / "made").exists()], PATIENCE_S)


def _nobody_builds(package: Path) -> bool:
    import psutil

    words = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return not any(str(package) in line for line in words)


def test_a_worker_that_dies_while_it_builds_leaves_nothing_running(family: Family, slow_package: Path) -> None:
    with LocalCluster() as cluster:
        environment = EnvironmentConfig(pip_packages=(str(slow_package),))
        job_id = cluster.launch(_in(environment, "true"))
        wait_until((slow_package.parent / "begun").exists, PATIENCE_S)
        (slow_package.parent / "begun").unlink()
        (worker,) = cluster.list_workers()
        os.kill(worker.info.pid, signal.SIGKILL)
        wait_until((slow_package.parent / "begun").exists, PATIENCE_S)  # its second attempt
        (slow_package.parent / "may-end").touch()
        info = cluster.wait(job_id, timeout=PATIENCE_S)
        assert info.status is JobStatus.SUCCEEDED
        assert (info.tasks[0].failures, info.tasks[0].preemptions) == (0, 1)
        assert len(_stored(cluster, "environments")) == 1
    family.wait_gone()


def test_a_running_task_keeps_its_environment_when_its_worker_is_killed(family: Family, tmp_path: Path) -> None:
    wheel, go_on = make_wheel(tmp_path, "lasting"), tmp_path / "go-on"

    def work() -> None:
        print("ready")
        while not go_on.exists():
            threading.Event().wait(0.02)
        import lasting  # type: ignore[import-not-found]

        print(lasting.VERSION)

    with LocalCluster() as cluster:
        job_id = cluster.launch(call(work, environment=EnvironmentConfig(pip_packages=(str(wheel),))))
        wait_until(lambda: texts(cluster, job_id) == ["ready"], PATIENCE_S)
        (worker,) = cluster.list_workers()
        os.kill(worker.info.pid, signal.SIGKILL)
        wait_until(lambda: cluster.list_workers()[0].info.pid != worker.info.pid, PATIENCE_S)
        go_on.touch()
        info = cluster.wait(job_id, timeout=PATIENCE_S)
        assert info.status is JobStatus.SUCCEEDED
        assert (info.tasks[0].attempt, texts(cluster, job_id)) == (1, ["ready", "1.0"])
    family.wait_gone()


# ---- pools ----------------------------------------------------------------------------------------------


def test_the_workers_of_a_pool_have_their_packages(site: LocalCluster, tmp_path: Path) -> None:
    environment = EnvironmentConfig(pip_packages=(str(make_wheel(tmp_path, "for_pools", "7.0")),))

    def version() -> str:
        import for_pools  # type: ignore[import-not-found]

        return str(for_pools.VERSION)

    with WorkerPool(site, 2, environment=environment) as pool:
        assert [pool.submit(version).result(PATIENCE_S) for _ in range(4)] == ["7.0"] * 4
