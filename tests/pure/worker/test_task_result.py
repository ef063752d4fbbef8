"""What a callable returned, written down by its task and found by its keeper."""

import json
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from fluster.progress_file import make_progress_pipe
from fluster_services.worker.contract.attempt_directory import RESULT_FILE, RESULT_WORD_FILE
from fluster_services.worker.task import task_result
from fluster_services.worker.task.progress_pipe import PipeWords
from fluster_services.worker.task.task_result import MAX_JSON_BYTES, find_result, keep_result


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("value", [0, "text", [1, {"two": 3.0}], b"x" * 100_000])
def test_a_value_is_kept(folder: Path, value: Any) -> None:
    keep_result(value, folder)
    data = (folder / RESULT_FILE).read_bytes()
    found = find_result()
    assert (found.size, found.problem) == (len(data), None)
    assert pickle.loads(data[: len(data) - found.json_size]) == value


@pytest.mark.parametrize(
    "value",
    [0, "text", "caf\udce9", [1, {"two": 3.0}], None, [float("inf")], "x" * (MAX_JSON_BYTES - 1_000)],
    ids=str.split("number text surrogate nested none infinity long"),
)
def test_plain_data_is_kept_as_json_too(folder: Path, value: Any) -> None:
    keep_result(value, folder)
    data, found = (folder / RESULT_FILE).read_bytes(), find_result()
    assert json.loads(data[len(data) - found.json_size :]) == value


@pytest.mark.parametrize(
    "value",
    [b"x", {1, 2}, Path(), {(1, 2): 3}, "x" * MAX_JSON_BYTES, ["\u1234" * 200_000], 10**5_000],
    ids=str.split("bytes set path keys long escaped digits"),
)
def test_what_is_no_plain_data_or_long_is_not(folder: Path, value: Any) -> None:
    keep_result(value, folder)
    assert find_result() == ((folder / RESULT_FILE).stat().st_size, 0, None)


@pytest.mark.parametrize("told", [-1, 1 << 40, "1", None, True, [], 2.0, 10])
def test_a_size_of_the_tasks_own_making_is_not_believed(folder: Path, told: Any) -> None:
    (folder / RESULT_FILE).write_bytes(b"123456789")
    (folder / RESULT_WORD_FILE).write_text(json.dumps({"json_bytes": told}))
    assert find_result() == (9, 0, None)
    assert find_result(told={"json_bytes": told}) == (9, 0, None)


def test_nothing_returned_leaves_nothing() -> None:
    assert find_result() == (None, 0, None)


def test_what_cannot_be_pickled_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep_result(threading.Lock(), folder)
    size, _, reason = find_result()
    assert size is None
    assert reason is not None
    assert "a lock, cannot be pickled" in reason
    assert reason in capsys.readouterr().err
    assert not (folder / RESULT_FILE).exists()


@pytest.mark.parametrize("value", [b"x" * 2_000, [str(each) for each in range(500)]])
def test_what_is_too_large_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    monkeypatch.setattr(task_result, "MAX_LARGE_RESULT_BYTES", 1_000)
    keep_result(value, folder)
    size, _, reason = find_result()
    assert size is None
    assert reason is not None
    assert "larger than 1,000 bytes when pickled" in reason


def test_a_link_that_the_task_put_there_is_no_result(folder: Path) -> None:
    (folder / "secret").write_text("hidden")
    (folder / RESULT_FILE).symlink_to(folder / "secret")
    assert find_result() == (None, 0, f"{RESULT_FILE} is not what Fluster wrote there")


def test_what_cannot_be_written_is_told(folder: Path) -> None:
    (folder / f"{RESULT_FILE}.draft").mkdir()
    keep_result(1, folder)
    _, _, reason = find_result()
    assert reason is not None
    assert "could not be written down" in reason


def test_a_full_disk_takes_the_result_but_not_the_success(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = make_progress_pipe(folder)
    words = PipeWords()
    (folder / f"{RESULT_FILE}.draft").symlink_to("/dev/full")
    (folder / f"{RESULT_WORD_FILE}.draft").symlink_to("/dev/full")
    keep_result(b"x" * 100_000, folder)
    words.feed(os.read(pipe, 1 << 16))
    os.close(pipe)
    size, _, reason = find_result(folder, words.get(RESULT_WORD_FILE))
    assert size is None
    assert reason is not None
    assert "could not be written down: [Errno 28] No space left on device" in reason
    assert reason in capsys.readouterr().err
