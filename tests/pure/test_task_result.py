"""What a callable returned, written down by its task and found by its keeper."""

import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from fluster.progress_file import make_progress_pipe
from fluster_services.worker import task_result
from fluster_services.worker.attempt_directory import RESULT_ERROR_FILE, RESULT_FILE
from fluster_services.worker.pipe_words import PipeWords
from fluster_services.worker.task_result import find_result, keep_result


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("value", [0, "text", [1, {"two": 3.0}], b"x" * 100_000])
def test_a_value_is_kept(folder: Path, value: Any) -> None:
    keep_result(value, folder)
    data = (folder / RESULT_FILE).read_bytes()
    assert pickle.loads(data) == value
    assert find_result() == (len(data), None)


def test_nothing_returned_leaves_nothing() -> None:
    assert find_result() == (None, None)


def test_what_cannot_be_pickled_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep_result(threading.Lock(), folder)
    size, reason = find_result()
    assert size is None
    assert reason is not None
    assert "a lock, cannot be pickled" in reason
    assert reason in capsys.readouterr().err
    assert not (folder / RESULT_FILE).exists()


@pytest.mark.parametrize("value", [b"x" * 2_000, [str(each) for each in range(500)]])
def test_what_is_too_large_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    monkeypatch.setattr(task_result, "MAX_LARGE_RESULT_BYTES", 1_000)
    keep_result(value, folder)
    size, reason = find_result()
    assert size is None
    assert reason is not None
    assert "larger than 1,000 bytes when pickled" in reason


def test_a_link_that_the_task_put_there_is_no_result(folder: Path) -> None:
    (folder / "secret").write_text("hidden")
    (folder / RESULT_FILE).symlink_to(folder / "secret")
    assert find_result() == (None, f"{RESULT_FILE} is not what Fluster wrote there")


def test_what_cannot_be_written_is_told(folder: Path) -> None:
    (folder / f"{RESULT_FILE}.draft").mkdir()
    keep_result(1, folder)
    _, reason = find_result()
    assert reason is not None
    assert "could not be written down" in reason


def test_a_full_disk_takes_the_result_but_not_the_success(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = make_progress_pipe(folder)
    words = PipeWords()
    (folder / f"{RESULT_FILE}.draft").symlink_to("/dev/full")
    (folder / f"{RESULT_ERROR_FILE}.draft").symlink_to("/dev/full")
    keep_result(b"x" * 100_000, folder)
    words.feed(os.read(pipe, 1 << 16))
    os.close(pipe)
    size, reason = find_result(folder, words.get(RESULT_ERROR_FILE))
    assert size is None
    assert reason is not None
    assert "could not be written down: [Errno 28] No space left on device" in reason
    assert reason in capsys.readouterr().err
