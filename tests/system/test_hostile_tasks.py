"""Tasks that spoil what their worker reads of them: they fail, and the worker goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from fluster import Entrypoint, JobRequest, JobStatus, LocalCluster
from fluster.progress_file import DIRECTORY_VARIABLE, PROGRESS_FILE, PROGRESS_PIPE
from tests.system.daemons import Daemons
from tests.system.job_requests import call
from tests.system.processes import Family
from tests.waiting import wait_until

PATIENCE_S = 60


def _folder() -> Path:
    return Path(os.environ[DIRECTORY_VARIABLE])


def raise_no_text() -> None:
    raise ValueError(os.fsdecode(b"caf\xe9"))


def leave_a_large_error() -> None:
    (_folder() / "error.json").write_text('{"type": "E", "message": "%s", "pickled": "caf\u00e9"}' % ("m" * 3_900_000))
    os._exit(1)


def write_over_the_notes() -> None:
    (_folder() / "keeper.jsonl").write_text('{"started": 1, "exited": {"reason": 7}}\n')
    raise ValueError("notes")


def write_over_the_log() -> None:
    print("a line", flush=True)
    (_folder() / "log").write_bytes(b"0001-01-01T00:00:00 nowhere F \xff\n" * 100)
    raise ValueError("log")


def make_the_log_a_pipe() -> None:
    (_folder() / "log").unlink(missing_ok=True)
    os.mkfifo(_folder() / "log")
    print("a line", flush=True)
    raise ValueError("pipe")


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (raise_no_text, r"ValueError: caf\udce9"),
        (leave_a_large_error, "E: mmm"),
        (write_over_the_notes, "ValueError: notes"),
        (write_over_the_log, "ValueError: log"),
        (make_the_log_a_pipe, "ValueError: pipe"),
    ],
)
def test_what_a_task_spoils_is_its_own(cluster: LocalCluster, spoil: Callable[[], None], told: str) -> None:
    workers = {each.info.worker_id: each.info.started_at for each in cluster.list_workers()}
    info = cluster.wait(cluster.launch(call(spoil)), timeout=PATIENCE_S)
    assert info.status is JobStatus.FAILED
    assert info.error is not None
    assert f"{info.error.type}: {info.error.message}".startswith(told)
    assert cluster.result(cluster.launch(call(int, "7")), timeout=PATIENCE_S) == 7
    assert {each.info.worker_id: each.info.started_at for each in cluster.list_workers()} == workers


def kill_its_keeper() -> None:
    os.kill(os.getppid(), signal.SIGKILL)


def test_a_task_that_kills_its_keeper_takes_no_worker_out(cluster: LocalCluster) -> None:
    """It was taken for a fault of the worker, which took no work while the task was tried again at no cost, for ever."""
    requests = [
        call(kill_its_keeper),
        JobRequest(name="x", entrypoint=Entrypoint(command=("sh", "-c", "kill -9 $PPID"))),
    ]
    jobs = [
        cluster.launch(each.model_copy(update={"max_retries_preemption": 1, "retry_backoff_s": 0})) for each in requests
    ]
    for job in jobs:
        info = cluster.wait(job, timeout=PATIENCE_S, raise_on_failure=False)
        assert (info.status, [task.preemptions for task in info.tasks]) == (JobStatus.WORKER_FAILED, [2])
        assert "its keeper was killed" in info.error_message
    assert cluster.result(cluster.launch(call(int, "7")), timeout=PATIENCE_S) == 7
    assert [each.info.trouble for each in cluster.list_workers()] == [""] * len(cluster.list_workers())


def test_a_task_may_have_more_time_than_there_is(cluster: LocalCluster) -> None:
    """Its keeper could not wait for so long, and died of that."""
    job = cluster.launch(call(int, "7").model_copy(update={"timeout_s": 1e308, "scheduling_timeout_s": 1e308}))
    assert cluster.result(job, timeout=PATIENCE_S) == 7
    assert [each.attempt for each in cluster.poll(job).tasks] == [1]


def forge_progress(text: str) -> str:
    (_folder() / PROGRESS_FILE).write_text(text)
    (_folder() / PROGRESS_PIPE).write_text("?")
    return "done"


@pytest.mark.parametrize(
    "text",
    ['[0.5, "\\udce9"]', f'[{10**400}, ""]', f'[-{10**400}, ""]', "[NaN, 1]"],
    ids=["text", "large", "small", "nan"],
)
def test_progress_that_is_none_is_passed_over(cluster: LocalCluster, text: str) -> None:
    workers = {each.info.worker_id: each.info.started_at for each in cluster.list_workers()}
    job = cluster.launch(call(forge_progress, text))
    assert cluster.result(job, timeout=PATIENCE_S) == "done"
    assert [each.attempt for each in cluster.poll(job).tasks] == [1]
    assert {each.info.worker_id: each.info.started_at for each in cluster.list_workers()} == workers


def pretend_to_be_the_keeper(said: bytes, ready: str) -> None:
    (_folder() / "s").unlink()
    listener = socket.socket(socket.AF_UNIX)
    os.chdir(_folder())
    listener.bind("s")
    listener.listen()
    Path(ready).touch()
    while True:
        connection, _ = listener.accept()
        with contextlib.suppress(OSError):  # it listens no longer
            connection.sendall(said * 10_000)


@pytest.mark.parametrize(
    "said",
    [b"no json\n", b'{"spooled": []}\n', b"x" * 2_000],
    ids=["no-json", "wrong-type", "endless"],
)
def test_a_worker_that_comes_back_outlives_a_task_in_its_keepers_place(
    tmp_path: Path, family: Family, said: bytes
) -> None:
    with Daemons(tmp_path, family) as daemons:
        daemons.start_controller()
        daemons.start_worker()
        with daemons.connect() as cluster:
            ready = tmp_path / "ready"
            job = cluster.launch(call(pretend_to_be_the_keeper, said, str(ready)))
            wait_until(ready.exists)
            daemons.kill("w1")
            daemons.start_worker()
            info = cluster.wait(job, timeout=PATIENCE_S)
            assert info.status is JobStatus.FAILED
            assert "its worker could not follow it any further" in info.error_message
            assert cluster.result(cluster.launch(call(int, "7")), timeout=PATIENCE_S) == 7
            assert daemons.running["w1"].poll() is None
        family.kill()  # the task's true keeper does not hear that it is over
