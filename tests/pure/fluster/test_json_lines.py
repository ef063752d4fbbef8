"""Messages between processes, a JSON object a line: cut anywhere, of a bounded length, and none is lost to a bad one beside it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster.json_lines import BadLineError, JsonLines, Lines, checked, encoded

_MAX_BYTES = 40

_MESSAGES = st.dictionaries(st.text(max_size=3), st.integers(0, 9) | st.none() | st.text(max_size=3), max_size=2)
_GARBAGE = st.sampled_from([b"", b"?", b"{", b"[1]", b"null", b"\xff", b'{"a": 1', b"x" * 41, b"x" * 100, b"  "])


def _pieces(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


def _is_message(line: bytes) -> bool:
    try:
        return len(line) <= _MAX_BYTES and isinstance(json.loads(line), dict)
    except ValueError:
        return False


@given(st.lists(_MESSAGES.map(lambda each: encoded(each)[:-1]) | _GARBAGE, max_size=8), st.integers(1, 60))
def test_each_line_is_a_message_or_bad_however_the_bytes_come(lines: list[bytes], size: int) -> None:
    decoder = JsonLines(_MAX_BYTES)
    data = b"".join(line + b"\n" for line in lines)
    found = [each for piece in _pieces(data, size) for each in decoder.feed(piece)]
    said = [line for line in lines if line.strip()]
    assert [None if isinstance(each, BadLineError) else each for each in found] == [
        json.loads(line) if _is_message(line) else None for line in said
    ]


@given(st.lists(st.binary(max_size=60), max_size=8), st.integers(1, 60))
def test_lines_of_any_kind_are_cut_where_they_end(written: list[bytes], size: int) -> None:
    expected = b"".join(written).split(b"\n")[:-1]
    data = b"".join(written).rpartition(b"\n")[0]
    splitter = Lines(_MAX_BYTES)
    found = [each for piece in _pieces(data + b"\n" if expected else b"", size) for each in splitter.feed(piece)]
    assert [None if isinstance(each, BadLineError) else each for each in found] == [
        line if len(line) <= _MAX_BYTES else None for line in expected
    ]


def test_a_line_that_is_too_long_is_bad_before_it_ends_and_once() -> None:
    decoder = JsonLines(_MAX_BYTES)
    assert list(decoder.feed(b"x" * _MAX_BYTES)) == []
    (bad,) = decoder.feed(b"x")
    assert isinstance(bad, BadLineError)
    assert str(bad) == f"the line b'{'x' * 41}' is longer than 40 bytes"
    assert list(decoder.feed(b"x" * 1000)) == []
    assert list(decoder.feed(b"x\n" + encoded({"next": 1}))) == [{"next": 1}]


def test_a_bad_line_says_what_it_is() -> None:
    bad, worse = JsonLines(10_000).feed(b"[1, 2]\n{" + b"y" * 300 + b"\n")
    with pytest.raises(BadLineError, match=r"the line b'\[1, 2\]' is not a JSON object"):
        checked(bad)
    with pytest.raises(BadLineError, match=r"^the line b'\{y{199}'… is not JSON: Expecting property name") as caught:
        checked(worse)
    assert len(str(caught.value)) < 350
    assert checked({"a": 1}) == {"a": 1}


def test_nesting_without_end_is_a_bad_line() -> None:
    (bad,) = JsonLines(1_000_000).feed(b'{"a":' * 100_000 + b"\n")
    assert isinstance(bad, BadLineError)
