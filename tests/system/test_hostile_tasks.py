"""Tasks that spoil what their worker reads of them: they fail, and the worker goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fluster import JobStatus, LocalCluster
from fluster.progress_file import DIRECTORY_VARIABLE
from tests.system.job_requests import call

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
