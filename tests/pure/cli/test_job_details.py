"""What `fluster status` shows of a job's environment."""

import sys

import pytest

from fluster.cli.common.output import shown_details
from fluster.cli.jobs import _in_a_list, outcome
from fluster_bus.messages import (
    Entrypoint,
    EnvironmentConfig,
    JobDetails,
    JobId,
    JobInfo,
    JobRequest,
    JobStatus,
    Namespace,
)


def shown(environment: EnvironmentConfig) -> str:
    request = JobRequest(name="a", entrypoint=Entrypoint(command=("true",)), environment=environment)
    details = JobDetails.of(request)
    info = JobInfo(
        job_id=JobId("a-1"),
        name="a",
        namespace=Namespace("default"),
        status=JobStatus.PENDING,
        details=details,
    )
    return shown_details(info)[-1]


def test_all_that_was_asked_for_of_an_environment_is_shown() -> None:
    everything = EnvironmentConfig(
        bundle="0123456789abcdef" * 4,
        cwd="runs",
        python="3.12",
        pip_packages=("numpy>=2", "rich"),
        requirements="--no-index\nattrs\n",
    )
    assert (
        shown(everything)
        == "workspace 0123456789ab; cwd runs; python 3.12; packages numpy>=2, rich; requirements of 2 lines"
    )
    assert shown(EnvironmentConfig(image="python:3.12", mounts={"/data": "/srv/data"})) == (
        "image python:3.12; mounts /srv/data at /data"
    )
    assert shown(EnvironmentConfig(bundle="ab" * 32, uv_lock=True)) == "workspace abababababab; packages of uv.lock"


def test_what_is_as_anywhere_is_not_shown() -> None:
    assert shown(EnvironmentConfig(env_vars={"A": "1"})) == "-"


def test_a_long_command_is_cut_in_a_list_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    command = "python -c " + "x" * 100
    request = JobRequest(name="a", entrypoint=Entrypoint(command=tuple(command.split())))
    info = JobInfo(
        job_id=JobId("a-1"),
        name="a",
        namespace=Namespace("default"),
        status=JobStatus.PENDING,
        details=JobDetails.of(request),
    )
    assert shown_details(info)[1] == command
    assert _in_a_list("1 CPU", command) == ("1 CPU", command)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert _in_a_list("1 CPU", command) == ("1 CPU", f"{command[:59]}…")


def test_logs_that_were_just_shown_are_not_pointed_to() -> None:
    info = JobInfo.model_validate(
        {
            "job_id": "a-1",
            "name": "a",
            "namespace": "default",
            "status": "FAILED",
            "error_message": "exit code 1",
            "tasks": [{"task": 0, "status": "FAILED", "attempt": 1, "has_output": True}],
        }
    )
    assert outcome(info) == "job a-1 ended as FAILED: exit code 1; `fluster logs a-1` shows what it wrote"
    assert outcome(info, seen="the last line") == "job a-1 ended as FAILED: exit code 1"
