"""What a job that failed said last stands in its message, whatever became of its worker."""

import os
from pathlib import Path

from fluster.cluster import Cluster
from fluster_bus.messages import JobStatus
from tests.system.daemons import PATIENT, Daemons
from tests.system.job_requests import call, command, wait_ready
from tests.system.processes import Family

PATIENCE_S = 60


def test_a_crash_loop_ends_with_the_last_lines_of_the_log(cluster: Cluster) -> None:
    script = r"""for i in $(seq 30); do echo "out $i of try $FLUSTER_ATTEMPT"; done; printf '\033[31mbad\033[0m\n' >&2; exit 7"""
    job_id = cluster.launch(command("sh", "-c", script, max_retries_failure=2, retry_backoff_s=0.01))
    info = cluster.wait(job_id, timeout=PATIENCE_S)
    assert (info.status, info.tasks[0].failures) == (JobStatus.FAILED, 3)
    first, *words = info.error_message.splitlines()
    assert first == "exit code 7; its last words:"
    assert len(words) == 20
    assert {"out 30 of try 3", "bad"} <= set(words)
    assert info.tasks[0].error_message == "exit code 7"
    assert "\x1b" not in info.error_message


def test_what_a_callable_printed_before_its_exception_is_there_too(cluster: Cluster) -> None:
    def work() -> None:
        print("loss=nan")
        raise ValueError("diverged")

    info = cluster.wait(cluster.launch(call(work)), timeout=PATIENCE_S)
    lines = info.error_message.splitlines()
    assert lines[0] == "ValueError: diverged; its last words:"
    assert {"loss=nan", "ValueError: diverged"} <= set(lines)  # of two streams, whose order is lost at times


def test_they_are_there_when_the_worker_was_killed_meanwhile(tmp_path: Path, family: Family) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with Daemons(tmp_path, family, timing=PATIENT) as daemons:
        daemons.start_controller()
        daemons.start_worker()
        with daemons.connect() as cluster:
            job_id = cluster.launch(command("sh", "-c", f"echo ready; cat {gate}; echo goodbye >&2; exit 3"))
            wait_ready(cluster, job_id)
            daemons.kill("w1")
            gate.write_text("alone\n")
            daemons.start_worker()
            info = cluster.wait(job_id, timeout=PATIENCE_S)
            assert (info.status, info.tasks[0].attempt) == (JobStatus.FAILED, 1)
            first, *words = info.error_message.splitlines()
            assert (first, sorted(words)) == ("exit code 3; its last words:", ["alone", "goodbye", "ready"])
