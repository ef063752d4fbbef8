"""Commands run as in the shell of who submits them: its folder, its PATH, and nothing of the worker's Python."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fluster.cluster import LocalCluster
from fluster_bus.messages import EnvironmentConfig, JobId, JobInfo, JobRequest, JobStatus
from tests.system.job_requests import call, command, texts

_COMMAND = [sys.executable, "-c", "from fluster.cli import main; main()"]
_SYSTEM_PYTHON = Path("/usr/bin/python3")
_LOOK = "import json, re, sys; print(json.dumps([sys.executable, sys.path]))"

Submit = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def submit(cluster: LocalCluster, tmp_path: Path) -> Submit:
    """`fluster submit --follow` with further arguments, typed in `folder`, by default an empty one."""

    def run(*arguments: str, folder: Path = tmp_path, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*_COMMAND, "submit", "--follow", *arguments],
            cwd=folder,
            env={**os.environ, "FLUSTER_CLUSTER_ADDRESS": cluster.address, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@pytest.fixture(scope="module")
def other_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that has nothing of this one."""
    folder = tmp_path_factory.mktemp("other") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder


def finish(cluster: LocalCluster, request: JobRequest) -> JobInfo:
    return cluster.wait(cluster.launch(request), timeout=60)


def in_python(python: str | Path, *words: str) -> JobRequest:
    request = command(*words)
    return request.model_copy(update={"environment": EnvironmentConfig(python=str(python))})


# ---- the folder -----------------------------------------------------------------------------------------


def test_a_command_runs_where_it_was_typed(submit: Submit, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("pwd -P")
    done = submit("--", "sh", "train.sh")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path.resolve()}\n"), done.stderr


def test_a_folder_that_the_worker_does_not_see_is_told(cluster: LocalCluster, tmp_path: Path) -> None:
    from fluster_bus.messages.parts.origin import Origin

    here = Origin.here(folder=tmp_path)
    elsewhere = here.model_copy(update={"inode": here.inode + 1})
    info = finish(cluster, command("sh", "-c", "pwd -P").model_copy(update={"origin": elsewhere}))
    assert info.status is JobStatus.SUCCEEDED
    assert texts(cluster, info.job_id) != [str(tmp_path.resolve())]
    (line,) = texts(cluster, info.job_id, "stderr")
    assert line.startswith(f"fluster: worker {info.worker_id} does not see the folder {str(tmp_path)!r}")
    assert "--workspace" in line


def test_a_child_of_a_job_does_not_run_in_its_parents_own_folder(cluster: LocalCluster, tmp_path: Path) -> None:
    def parent() -> JobId:
        from fluster import current_cluster

        os.chdir(os.environ["FLUSTER_ATTEMPT_DIRECTORY"])
        return current_cluster().launch(command("pwd"))

    job_id = cluster.result(cluster.launch(call(parent)), timeout=60)
    cluster.wait(job_id, timeout=60)
    assert texts(cluster, job_id, "stderr") == []


# ---- the interpreter ------------------------------------------------------------------------------------


@pytest.mark.skipif(not _SYSTEM_PYTHON.exists(), reason="there is no Python of the system")
def test_the_systems_python_runs_also_within_a_script(submit: Submit, tmp_path: Path) -> None:
    (tmp_path / "deep.sh").write_text(f"exec sh -c \"exec {_SYSTEM_PYTHON} -c '{_LOOK}'\"")
    done = submit("--", "sh", "deep.sh")
    assert done.returncode == 0, done.stderr
    _, path = json.loads(done.stdout)
    assert not [entry for entry in path if entry.startswith(sys.prefix)]


def test_another_environment_imports_nothing_of_the_workers(submit: Submit, other_venv: Path) -> None:
    done = submit("--", str(other_venv / "bin/python"), "-c", "import pydantic")
    assert done.returncode == 1
    assert "No module named 'pydantic'" in done.stderr


def test_the_submitters_path_finds_the_program(submit: Submit, other_venv: Path) -> None:
    path = os.pathsep.join([str(other_venv / "bin"), os.environ["PATH"]])
    script = f"python -c '{_LOOK}'; echo PATH=$PATH VENV=$VIRTUAL_ENV PYTHONPATH=$PYTHONPATH"
    done = submit("--", "sh", "-c", script, PATH=path, VIRTUAL_ENV=str(other_venv))
    assert done.returncode == 0, done.stderr
    looked, shown = done.stdout.splitlines()
    assert json.loads(looked)[0] == str(other_venv / "bin/python")
    assert shown == f"PATH={path} VENV={other_venv} PYTHONPATH="


def test_a_path_in_the_jobs_environment_goes_first(submit: Submit) -> None:
    done = submit("--env", "PATH=/usr/bin:/bin", "--", "sh", "-c", "echo $PATH")
    assert done.stdout == "/usr/bin:/bin\n"


# ---- an interpreter that is there -----------------------------------------------------------------------


@pytest.mark.parametrize("which", ["", "bin/python"], ids=["folder", "interpreter"])
def test_an_existing_environment_is_used_as_it_is(cluster: LocalCluster, other_venv: Path, which: str) -> None:
    script = f"python -c '{_LOOK}'; echo $VIRTUAL_ENV"
    info = finish(cluster, in_python(other_venv / which, "sh", "-c", script))
    assert info.status is JobStatus.SUCCEEDED, info.error_message
    looked, venv = texts(cluster, info.job_id)
    assert (json.loads(looked)[0], venv) == (str(other_venv / "bin/python"), str(other_venv))


def test_an_interpreter_by_another_name_is_what_python_means(cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "python4").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "python4").chmod(0o700)
    info = finish(cluster, in_python(tmp_path / "python4", "python", "-c", "import fluster, sys; print(sys.prefix)"))
    assert info.status is JobStatus.SUCCEEDED, info.error_message
    assert texts(cluster, info.job_id) == [sys.prefix]


def test_a_callable_in_an_existing_environment_finds_fluster(cluster: LocalCluster, other_venv: Path) -> None:
    def where() -> str:
        import fluster  # noqa: F401 - it is there

        return sys.prefix

    request = call(where).model_copy(update={"environment": EnvironmentConfig(python=str(other_venv))})
    assert cluster.result(cluster.launch(request), timeout=60) == str(other_venv)


def test_a_path_without_an_interpreter_is_told(cluster: LocalCluster, tmp_path: Path) -> None:
    info = finish(cluster, in_python(tmp_path, "true"))
    assert info.status is JobStatus.FAILED
    assert f"python={str(tmp_path)!r}" in info.error_message
    assert "bin/python" in info.error_message


# ---- a folder by contract -------------------------------------------------------------------------------


def test_a_command_runs_in_the_folder_that_it_names(submit: Submit, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    done = submit("--cwd", "there", "--", "sh", "-c", "pwd -P")
    assert (done.returncode, done.stdout) == (0, f"{(tmp_path / 'there').resolve()}\n"), done.stderr


@pytest.mark.parametrize("kind", [["--retries", "3"], ["--gang", "--replicas", "2"]], ids=["single", "gang"])
def test_a_folder_that_no_worker_has_fails_the_job_and_names_them(submit: Submit, kind: list[str]) -> None:
    done = submit(*kind, "--cwd", "/no/such/folder", "--", "true")
    assert done.returncode == 1
    for worker_id in ("worker-0", "worker-1"):
        assert f"worker {worker_id} has no folder '/no/such/folder'" in done.stderr
    assert "ended as FAILED" in done.stderr


def test_a_copy_is_entered_where_it_says(submit: Submit, tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "data.txt").write_text("some data\n")
    done = submit("--workspace", ".", "--cwd", "part", "--", "cat", "data.txt")
    assert (done.returncode, done.stdout) == (0, "some data\n"), done.stderr
    done = submit("--workspace", ".", "--cwd", "elsewhere", "--", "true")
    assert done.returncode == 1
    assert "elsewhere' cannot be entered: No such file or directory" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cwd", "/data", "--image", "debian:12"], "exclude each other"),
        (["--cwd", "../data", "--workspace", "."], "give a path relative to it"),
    ],
)
def test_a_folder_that_cannot_be_meant_is_refused(submit: Submit, arguments: list[str], message: str) -> None:
    done = submit(*arguments, "--", "true")
    assert done.returncode == 2
    assert message in done.stderr
