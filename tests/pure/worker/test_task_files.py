"""What a task has left in its folder, read by those who may read more than it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fluster_services.worker.contract.attempt_directory import ERROR_FILE, RESULT_WORD_FILE, read_task_json, write_json
from fluster_services.worker.contract.attempt_records import TaskError, read_task_error
from fluster_services.worker.task.task_result import find_result

WRONG: list[dict[str, object]] = [
    {"type": 1},
    {"message": None},
    {"pickled": ["x"]},
    {"is_final": "yes"},
    {"traceback": {}},
]
ERROR = {"type": "ValueError", "message": "no such luck"}


def test_an_error_that_fluster_wrote_is_read(tmp_path: Path) -> None:
    assert read_task_error(tmp_path) is None
    write_json(tmp_path / ERROR_FILE, {**ERROR, "from a later version": 1})
    assert read_task_error(tmp_path) == TaskError("ValueError", "no such luck")


@pytest.mark.parametrize(
    "left",
    [
        b"",
        b"no JSON",
        b"[" * 100_000,
        b"[]",
        b'{"type": "ValueError"}',
        *(json.dumps({**ERROR, **wrong}).encode() for wrong in WRONG),
        json.dumps({**ERROR, "traceback": "x" * (5 << 20)}).encode(),
    ],
)
def test_an_error_that_a_task_made_up_is_none(tmp_path: Path, left: bytes) -> None:
    (tmp_path / ERROR_FILE).write_bytes(left)
    assert read_task_error(tmp_path) is None


def _link(path: Path) -> None:
    secret = path.with_name("secret")
    write_json(secret, ERROR)
    path.symlink_to(secret)


@pytest.mark.parametrize("leave", [_link, os.mkfifo, Path.mkdir], ids=["link", "pipe", "folder"])
def test_only_plain_files_are_read(tmp_path: Path, leave: Any) -> None:
    leave(tmp_path / ERROR_FILE)
    assert read_task_json(tmp_path / ERROR_FILE) is None
    (tmp_path / RESULT_WORD_FILE).symlink_to(tmp_path / ERROR_FILE)
    assert find_result(tmp_path)[0] is None
