"""Reading the logs of jobs: filters, and the end of following."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fluster import Cluster, JobId, JobStatus
from tests.system.job_requests import call, command, followed

TIMEOUT_S = 60


@pytest.fixture(scope="module")
def counted(cluster: Cluster) -> JobId:
    """A job of two tasks that count to 100 on stdout."""
    job = cluster.launch(command("sh", "-c", 'seq 1 100 | sed "s/^/$FLUSTER_TASK_INDEX: /"', replicas=2))
    assert cluster.wait(job, timeout=TIMEOUT_S).status is JobStatus.SUCCEEDED
    return job


def texts(lines: object) -> list[str]:
    return [line.text for line in lines]  # type: ignore[attr-defined]


def test_all_lines_are_there_in_order(cluster: Cluster, counted: JobId) -> None:
    for task in (0, 1):
        assert texts(cluster.logs(counted, task=task)) == [f"{task}: {number}" for number in range(1, 101)]


@pytest.mark.parametrize("tail", [0, 1, 7, 1_000])
def test_tail_keeps_the_last_lines(cluster: Cluster, counted: JobId, tail: int) -> None:
    assert (
        texts(cluster.logs(counted, task=1, tail=tail))
        == [f"1: {number}" for number in range(1, 101)][100 - min(tail, 100) :]
    )


def test_grep_keeps_the_lines_that_match(cluster: Cluster, counted: JobId) -> None:
    assert texts(cluster.logs(counted, task=0, grep="0$")) == [f"0: {number}" for number in range(10, 101, 10)]


def test_attempt_and_since_choose_too(cluster: Cluster, counted: JobId) -> None:
    assert len(list(cluster.logs(counted, attempt=1))) == 200
    assert list(cluster.logs(counted, attempt=2)) == []
    assert len(list(cluster.logs(counted, since=timedelta(hours=1)))) == 200
    assert list(cluster.logs(counted, since=datetime.now(UTC) + timedelta(hours=1))) == []


def test_following_with_a_tail_goes_on_with_what_comes(cluster: Cluster) -> None:
    script = "import sys\nfor number in range(5): print(number)\nsys.stdin.close()\nimport time\nprint('end')"
    job = cluster.launch(command("python", "-c", script))
    assert texts(cluster.logs(job, follow=True))[-1] == "end"
    with followed(cluster, job) as lines:
        assert texts(lines) == ["0", "1", "2", "3", "4", "end"]
    assert texts(cluster.logs(job, follow=True, tail=2)) == ["4", "end"]


def test_both_streams_come_in_the_order_of_writing(cluster: Cluster) -> None:
    # Each line waits until the one before it was read: of what both pipes hold at the same time the order is not known for sure.
    script = """
import fcntl, os, termios, time
for number in range(1, 21):
    for fd, stream in ((1, "o"), (2, "e")):
        os.write(fd, f"{stream}{number}\\n".encode())
        while any(fcntl.ioctl(fd, termios.FIONREAD, bytes(4))):
            time.sleep(0.001)  # no event tells that a pipe was emptied
"""
    job = cluster.launch(command("python", "-c", script))
    expected = [f"{stream}{number}" for number in range(1, 21) for stream in "oe"]
    assert texts(cluster.logs(job, follow=True)) == expected
    assert texts(cluster.logs(job)) == expected
    assert texts(cluster.logs(job, tail=3)) == expected[-3:]


def test_a_progress_bar_is_seen_as_it_is_written(cluster: Cluster, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    job = cluster.launch(command("sh", "-c", f"printf '\\r 50%%'; read go < {gate}; printf '\\r100%%\\ndone\\n'"))
    with followed(cluster, job) as lines:
        first = next(lines)
        assert (first.text, first.goes_on) == ("\r 50%", True)
        gate.write_text("go\n")
        assert [(line.text, line.goes_on) for line in lines] == [("\r100%", False), ("done", False)]


def test_pieces_of_a_long_line_say_that_it_goes_on(cluster: Cluster) -> None:
    job = cluster.launch(command("sh", "-c", "printf '%0150000d\\nshort\\n' 7"))
    cluster.wait(job, timeout=TIMEOUT_S)
    assert [(len(line.text), line.goes_on) for line in cluster.logs(job)] == [
        (65_536, True),
        (65_536, True),
        (18_928, False),
        (5, False),
    ]


def _launch_detached(detached: bool) -> None:
    from fluster import Entrypoint, JobRequest, current_cluster

    request = JobRequest(name="child", entrypoint=Entrypoint(command=("sleep", "600")), detached=detached)
    print(current_cluster().launch(request))


@pytest.mark.parametrize(("detached", "ends"), [(False, True), (True, False)])
def test_a_detached_job_lives_on_when_its_launcher_ends(cluster: Cluster, detached: bool, ends: bool) -> None:
    launcher = cluster.launch(call(_launch_detached, detached))
    assert cluster.wait(launcher, timeout=TIMEOUT_S).status is JobStatus.SUCCEEDED
    (child,) = texts(cluster.logs(launcher))
    if not ends:
        assert cluster.poll(JobId(child)).parent is None
        cluster.terminate(JobId(child))
    info = cluster.wait(JobId(child), timeout=TIMEOUT_S)
    assert info.status is JobStatus.KILLED
    assert (info.error_message != "terminated by request") is ends


@pytest.mark.parametrize("wrong", [{"tail": -1}, {"grep": "("}])
def test_wrong_filters_are_refused_at_once(cluster: Cluster, counted: JobId, wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"tail=-1|grep='\('"):
        list(cluster.logs(counted, **wrong))  # type: ignore[arg-type]
