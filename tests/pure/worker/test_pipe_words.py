"""What a task tells its keeper through a pipe, where the disk has no room for a file."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster.progress_file import make_progress_pipe
from fluster_services.worker.task.progress_pipe import PipeWords, leave_word


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[int]:
    fd = make_progress_pipe(tmp_path)
    yield fd
    os.close(fd)


def full(folder: Path) -> Path:
    """A file that cannot be written."""
    return folder / "no such folder" / "result.json"


def test_a_word_is_a_file_while_there_is_room(tmp_path: Path, pipe: int) -> None:
    leave_word(tmp_path / "result.json", {"reason": "why"})
    assert (tmp_path / "result.json").read_text() == '{"reason": "why"}'
    with pytest.raises(BlockingIOError):
        os.read(pipe, 1)


def test_else_it_comes_through_the_pipe_between_the_dots_of_progress(tmp_path: Path, pipe: int) -> None:
    os.write(pipe, b"...")
    leave_word(full(tmp_path), {"reason": "ä" * 100_000, "is_final": False}, pipe_folder=tmp_path)
    os.write(pipe, b"..")
    words = PipeWords()
    data = os.read(pipe, 1 << 16)
    for each in data:
        words.feed(bytes([each]))
    told = words.get("result.json")
    assert told is not None
    assert (set(told["reason"]), told["is_final"]) == ({"ä"}, False)
    assert words.get("error.json") is None


def test_without_a_pipe_nothing_is_raised(tmp_path: Path) -> None:
    leave_word(full(tmp_path), {"reason": "why"}, pipe_folder=tmp_path)


@given(st.lists(st.binary(max_size=200) | st.just(b'{"error.json": {"type": 1}}\n'), max_size=50))
def test_whatever_a_task_writes_is_taken(pieces: list[bytes]) -> None:
    words = PipeWords()
    for piece in pieces:
        words.feed(piece)
    assert words.get("error.json") in (None, {"type": 1})
