"""Lines of tasks' output, as they are put in order and shown."""

from __future__ import annotations

import pytest

from fluster.cli.log_lines import print_lines
from fluster.cluster.stream_order import StreamOrder
from fluster_bus.messages import JobId, LogBatch, LogLine


def line(text: str, *, time: float = 0.0, task: int = 0, stream: str = "stdout", goes_on: bool = False) -> LogLine:
    return LogLine(job_id=JobId("j"), task=task, attempt=1, stream=stream, time=time, text=text, goes_on=goes_on)


def batch(offset: int, *, more: bool = False) -> LogBatch:
    return LogBatch(offset=offset, next_offset=offset + 10, more=more, lines=())


def texts(lines: list[LogLine]) -> str:
    return " ".join(each.text for each in lines)


def test_what_one_chunk_gave_for_both_streams_is_put_in_order() -> None:
    order = StreamOrder()
    assert order.add(0, 1, batch(0, more=True), [line("b", time=2), line("d", time=4)]) == []
    assert order.holds
    assert texts(order.add(1, 1, batch(0), [line("other", time=9)])) == "other"  # of another task: it does not wait
    assert texts(order.add(0, 1, batch(0), [line("a", time=1), line("c", time=3), line("d2", time=4)])) == "a b c d d2"
    assert not order.holds


def test_lines_whose_other_stream_never_comes_are_not_lost() -> None:
    order = StreamOrder()
    order.add(0, 1, batch(0, more=True), [line("first", time=5)])
    assert texts(order.add(0, 1, batch(10, more=True), [line("second", time=1)])) == "first"
    assert texts(order.add(0, 1, batch(20), [line("third", time=0)])) == "second third"
    order.add(0, 1, batch(30, more=True), [line("last")])
    assert texts(order.flush()) == "last"
    assert order.flush() == []


def test_pieces_are_one_line_again(capsys: pytest.CaptureFixture[str]) -> None:
    pieces = [
        line("\r10%", goes_on=True),
        line("\r20%", goes_on=True),
        line("between", task=1),
        line("\r30%"),
        line("err", stream="stderr", goes_on=True),
    ]
    print_lines(pieces, as_json=False, follow=False, numbered=True)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("0| \r10%\r20%\n1| between\n0| \r30%\n", "0| err\n")
