"""A log that is read again from its beginning, by a reader that had some of it, or more than it has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster_services.worker.contract import container_output
from fluster_services.worker.contract.container_output import LogPosition

LINES = [b"%d\n" % number for number in range(100)]


def read(position: LogPosition, data: bytes, piece: int) -> bytes:
    return b"".join(position.new(data[start : start + piece]) for start in range(0, len(data), piece))


@given(
    st.lists(st.tuples(*[st.integers(0, 100)] * 3).map(sorted), min_size=1, max_size=3),
    st.booleans(),
    st.integers(1, 40),
)
def test_nothing_is_missed_or_repeated_whoever_was_ahead_when_the_engine_ended(
    ends: list[list[int]], log_was_ahead: bool, piece: int
) -> None:
    position, told, log, at = LogPosition(), b"", b"", 0
    wanted: list[bytes] = []
    for behind, ahead, lost in ends:  # lines from `ahead` to `lost` went down with the engine
        if behind < at:
            continue
        has_logged, was_told = (ahead, behind) if log_was_ahead else (behind, ahead)
        told += read(position, b"".join(LINES[at:was_told]), piece)
        log += b"".join(LINES[at:has_logged])
        position.again()
        told += read(position, log, piece)
        wanted += LINES[at:ahead]
        assert told == b"".join(wanted)
        at = lost
    told += read(position, b"".join(LINES[at:]), piece)
    assert told == b"".join([*wanted, *LINES[at:]])


def test_a_line_that_differs_late_is_told_whole() -> None:
    position = LogPosition()
    assert position.new(b"20\n21\n") == b"20\n21\n"
    position.again()
    assert read(position, b"20\n22\n23\n", 4) == b"22\n23\n"
    position.again()
    assert position.new(b"20\n22\n23\n24\n") == b"24\n"


def test_lines_before_those_that_are_compared_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container_output, "_TAIL_BYTES", 10)
    position = LogPosition()
    text = b"".join(LINES)
    assert read(position, text, 7) == text
    position.again()
    assert read(position, text.replace(b"99\n", b"") + b"new\n", 7) == b"new\n"


def test_a_line_longer_than_what_is_compared_is_not_told_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container_output, "_TAIL_BYTES", 10)
    position = LogPosition()
    assert position.new(b"x" * 50) == b"x" * 50
    position.again()
    assert position.new(b"x" * 45 + b"\nnew") == b"\nnew"
