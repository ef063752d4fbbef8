"""What a keeper reads of a task's two streams, and in which order it stores that."""

import fcntl
import os
import selectors
from collections.abc import Iterator
from pathlib import Path

import pytest

from fluster_services.worker.contract.attempt_directory import LOG_FILE
from fluster_services.worker.contract.spool import Stream, read_spool
from fluster_services.worker.linux.timers import Timers
from fluster_services.worker.task.task_output import EpollPipes, SelectPipes, TaskOutput

LOOK_S = 60
# Also with what systems have that lack the kernel's queue.
anywhere = pytest.mark.parametrize("task", [EpollPipes, SelectPipes], indirect=True)


class _Task:
    """The writing ends of a task's streams; `look` is a round of its keeper."""

    def __init__(self, readable: type[EpollPipes | SelectPipes]) -> None:
        self._selector = selectors.DefaultSelector()
        self.output = TaskOutput(
            self._selector, Timers(), max_line_bytes=1 << 16, max_log_bytes=1 << 30, readable=readable
        )
        self._ends: dict[Stream, int] = {"stdout": self.output.open("stdout"), "stderr": self.output.open("stderr")}

    def write(self, stream: Stream, text: str) -> None:
        os.write(self._ends[stream], f"{text}\n".encode())

    def grow(self, stream: Stream, size: int) -> None:
        fcntl.fcntl(self._ends[stream], fcntl.F_SETPIPE_SZ, size)

    def look(self) -> None:
        for key, _ in self._selector.select(LOOK_S):
            key.data()

    def is_silent(self) -> bool:
        return not self._selector.select(0)

    def end(self) -> None:
        for end in self._ends.values():
            os.close(end)
        self._ends.clear()

    def close(self) -> None:
        self.end()
        if self._selector.get_map():
            self.output.close()
        assert not self._selector.get_map()
        self._selector.close()


@pytest.fixture
def task(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Task]:
    monkeypatch.chdir(tmp_path)
    task = _Task(getattr(request, "param", EpollPipes))
    yield task
    task.close()


def _stored() -> list[str]:
    return [record.text for record in read_spool(LOG_FILE)[0]]


@pytest.mark.parametrize("before", ["stdout", "stderr"])
@pytest.mark.parametrize("order", [("stdout", "stderr"), ("stderr", "stdout")])
def test_lines_of_both_streams_keep_their_order_while_the_keeper_is_away(
    task: _Task, before: Stream, order: tuple[Stream, Stream]
) -> None:
    task.write(before, "before")
    task.look()
    for stream in order:
        task.write(stream, stream)
    task.look()
    assert _stored() == ["before", *order]
    assert task.is_silent()


@pytest.mark.parametrize("order", [("stdout", "stderr"), ("stderr", "stdout")])
def test_the_last_lines_keep_their_order(task: _Task, order: tuple[Stream, Stream]) -> None:
    for stream in order:
        task.write(stream, stream)
    task.output.close()  # the task has ended since the last look
    assert _stored() == list(order)


@anywhere
def test_more_than_one_look_takes_is_read_to_its_end(task: _Task) -> None:
    lines = [f"{number:0999}" for number in range(200)]
    task.grow("stdout", 1 << 18)
    task.write("stdout", "\n".join(lines))
    task.write("stderr", "end")
    while not task.is_silent():
        task.look()
    assert [line for line in _stored() if line != "end"] == lines


@anywhere
def test_a_stream_that_the_task_closes_is_left_alone(task: _Task) -> None:
    task.write("stdout", "end")
    task.end()
    while not task.is_silent():
        task.look()
    assert _stored() == ["end"]
