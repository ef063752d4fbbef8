"""Lines of tasks' output, as they are put in order and shown."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fluster.cli.common.output import print_chunks
from fluster.cluster.jobs.log_chunks import LastLines, LogChunk, StreamOrder, chunks_of
from fluster_bus.messages import JobId, LogBatch, LogLine


def line(text: str, *, time: float = 0.0, task: int = 0, stream: str = "stdout", goes_on: bool = False) -> LogLine:
    return LogLine(job_id=JobId("j"), task=task, attempt=1, stream=stream, time=time, text=text, goes_on=goes_on)


def chunk(*lines: tuple[float, str], task: int = 0, stream: str = "stdout") -> LogChunk:
    return LogChunk(JobId("j"), task, 1, stream, [(time, text, False) for time, text in lines])


def batch(offset: int, *, more: bool = False) -> LogBatch:
    return LogBatch(offset=offset, next_offset=offset + 10, more=more, lines=())


def texts(chunks: list[LogChunk]) -> str:
    return " ".join(text for each in chunks for _time, text, _goes_on in each.lines)


def test_what_one_chunk_gave_for_both_streams_is_put_in_order() -> None:
    order = StreamOrder()
    assert order.add(batch(0, more=True), chunk((2, "b"), (4, "d"), stream="stderr")) == []
    assert order.holds
    assert texts(order.add(batch(0), chunk((9, "other"), task=1))) == "other"  # of another task: it does not wait
    shown = order.add(batch(0), chunk((1, "a"), (3, "c"), (4, "d2")))
    assert texts(shown) == "a b c d d2"
    assert [each.stream for each in shown] == ["stdout", "stderr", "stdout", "stderr", "stdout"]
    assert not order.holds


def test_lines_whose_other_stream_never_comes_are_not_lost() -> None:
    order = StreamOrder()
    order.add(batch(0, more=True), chunk((5, "first")))
    assert texts(order.add(batch(10, more=True), chunk((1, "second")))) == "first"
    assert texts(order.add(batch(20), chunk((0, "third")))) == "second third"
    order.add(batch(30, more=True), chunk((0, "last")))
    assert texts(order.flush()) == "last"
    assert order.flush() == []
    order.add(batch(40, more=True), chunk())  # none of its lines were wanted
    assert order.flush() == []


def test_the_last_lines_of_many_chunks_are_kept() -> None:
    for count, kept in ((0, ""), (1, "e"), (2, "d e"), (4, "b c d e"), (9, "a b c d e")):
        last = LastLines(count)
        for added in ([chunk((0, "a"), (0, "b"))], [], [chunk((0, "c")), chunk((0, "d"), (0, "e"))]):
            last.add(added)
        assert texts(last.take()) == kept, count


def test_chunks_have_all_that_their_messages_have() -> None:
    lines = [line("a"), line("b", time=1.0, goes_on=True), line("c", stream="stderr"), line("d", task=1)]
    chunks = list(chunks_of(lines))
    assert [len(each.lines) for each in chunks] == [2, 1, 1]
    assert [each for chunk in chunks for each in chunk.messages()] == lines


def test_pieces_are_one_line_again(capsys: pytest.CaptureFixture[str]) -> None:
    pieces = [
        line("\r10%", goes_on=True),
        line("\r20%", goes_on=True),
        line("between", task=1),
        line("\r30%"),
        line("err", stream="stderr", goes_on=True),
    ]
    print_chunks([chunks_of(pieces)], as_json=False, numbered=True)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("0| \r10%\r20%\n1| between\n0| \r30%\n", "0| err\n")


def test_both_streams_in_one_file_are_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `fluster logs job > file 2>&1`, where stdout is kept back until much has come."""
    with (tmp_path / "both").open("a+") as stdout, (tmp_path / "both").open("a") as stderr:
        monkeypatch.setattr("sys.stdout", stdout)
        monkeypatch.setattr("sys.stderr", stderr)
        lines = [line("1"), line("2", stream="stderr"), line("3"), line("4", stream="stderr", goes_on=True), line("5")]
        print_chunks([chunks_of(lines)], as_json=False, numbered=False)
        stdout.seek(0)
        assert stdout.read() == "1\n2\n3\n4\n5\n"


def test_a_terminal_is_not_steered_by_what_tasks_write(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, line_end = os.openpty()
    with os.fdopen(terminal, "rb", buffering=0) as seen, os.fdopen(line_end, "w") as screen:
        monkeypatch.setattr(sys, "stdout", screen)
        print_chunks([[chunk((0, "\x1b]0;title\x07\x1b[31mred\x1b[0m"))]], as_json=False, numbered=False)
        assert seen.read(1000) == b"\\x1b]0;title\\x07\x1b[31mred\x1b[0m\r\n"
