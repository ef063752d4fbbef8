"""What people try on their first day: the first of several jobs, a breakpoint, completion, more CPUs than there are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fluster import Entrypoint, JobRequest, LocalCluster
from fluster.errors import JobTimeoutError
from fluster_bus.messages import EnvironmentConfig, JobStatus
from tests.system.job_requests import texts
from tests.system.test_up_clusters import shell, up  # noqa: F401 - a fixture


def _command(*words: str) -> JobRequest:
    return JobRequest(name="first", entrypoint=Entrypoint(command=words))


def test_the_first_of_several_jobs_is_waited_for(cluster: LocalCluster) -> None:
    long, short = cluster.launch(_command("sleep", "600")), cluster.launch(_command("true"))
    assert cluster.wait_first([long, short], timeout=60).job_id == short
    assert cluster.wait_first([short, long]).job_id == short
    with pytest.raises(JobTimeoutError, match="none of 1 jobs has finished"):
        cluster.wait_first([long], timeout=0.1)
    with pytest.raises(ValueError, match="jobs is empty"):
        cluster.wait_first([])
    cluster.terminate(long)
    assert cluster.wait_first([long], timeout=60).status is JobStatus.KILLED


def _stops() -> int:
    breakpoint()  # noqa: T100 - what this is about
    return 1


def test_a_breakpoint_in_a_task_says_how_to_debug(cluster: LocalCluster) -> None:
    refused = cluster.wait(cluster.launch(JobRequest(name="stops", entrypoint=Entrypoint(callable=_stops))), timeout=60)
    assert refused.status is JobStatus.FAILED
    assert "a task has no terminal. Call the function, or run the command, where you have one" in refused.error_message
    passed_over = EnvironmentConfig(env_vars={"PYTHONBREAKPOINT": "0"})
    request = JobRequest(name="stops", entrypoint=Entrypoint(callable=_stops), environment=passed_over)
    assert cluster.result(cluster.launch(request)) == 1


def test_a_breakpoint_in_a_command_says_how_to_debug(cluster: LocalCluster, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("breakpoint(); print('went on')")
    refused, ignored, passed_over, child = cluster.launch_many(
        [
            _command(sys.executable, str(script)),
            _command(sys.executable, "-S", str(script)),  # so it finds no Fluster
            _command("env", "PYTHONBREAKPOINT=0", sys.executable, str(script)),
            _command("sh", "-c", f"{sys.executable} {script} || echo a child was refused"),
        ]
    )
    info = cluster.wait(refused, timeout=60)
    assert info.status is JobStatus.FAILED
    assert "a task has no terminal. Call the function, or run the command, where you have one" in info.error_message
    for job_id, said in (
        (ignored, 'Ignoring unimportable $PYTHONBREAKPOINT: "fluster.breakpoints.a_task_has_no_terminal"'),
        (passed_over, ""),
    ):
        assert cluster.wait(job_id, timeout=60).status is JobStatus.SUCCEEDED
        assert texts(cluster, job_id) == ["went on"]
        assert said in "".join(texts(cluster, job_id, "stderr"))
    assert cluster.wait(child, timeout=60).status is JobStatus.SUCCEEDED
    assert texts(cluster, child) == ["a child was refused"]


def test_a_shell_completes_commands() -> None:
    variables = {"_FLUSTER_COMPLETE": "complete_bash", "COMP_WORDS": "fluster can", "COMP_CWORD": "1"}
    program = "import sys; sys.argv = ['fluster']; from fluster.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["cancel"]


@pytest.mark.usefixtures("shell")
def test_more_than_the_machine_has_is_noted_at_the_start(capfd: pytest.CaptureFixture[str]) -> None:
    with up("--cpu", "100000") as process:
        process.terminate()
        process.wait(60)
    assert "note: it offers 100000 CPUs, and this machine has" in capfd.readouterr().err
