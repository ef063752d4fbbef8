from __future__ import annotations

import errno
import itertools
import pickle
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster.actors.protocol import frames
from fluster.actors.protocol.failures import decode_failure, encode_failure
from fluster.actors.protocol.frames import MAX_BYTES, MAX_CALLS, Moment, seconds_between
from fluster.errors import JobFailedError, RemoteError
from fluster_bus.core import codec
from fluster_bus.core.errors import InvalidMessageError, ServiceError
from fluster_bus.messages import JobId, JobInfo, JobStatus, Namespace


def test_calls_and_replies_come_back_as_they_were() -> None:
    calls: list[frames.WireCall] = [("add", ("boot", 1.0, 2.0), b"one"), ("sub", None, b"")]
    assert frames.decode_calls(frames.encode_calls(calls)) == calls
    assert codec.is_pickle(frames.encode_calls(calls))
    assert frames.decode_replies(frames.encode_replies("abc", [(0, True, b"r")])) == ("abc", [(0, True, b"r")])


@pytest.mark.parametrize("data", [b"", b"\x80junk", pickle.dumps("text"), pickle.dumps([1]), pickle.dumps([("a",)])])
def test_what_is_no_frame_is_said_to_be_none(data: bytes) -> None:
    with pytest.raises(InvalidMessageError):
        frames.decode_calls(data)
    with pytest.raises(InvalidMessageError):
        frames.decode_replies(data)


@given(st.lists(st.integers(0, MAX_BYTES * 2), max_size=300))
def test_batches_keep_order_and_limits(sizes: list[int]) -> None:
    batches = list(frames.batches(list(enumerate(sizes)), sizes))
    assert [item for batch in batches for item in batch] == list(enumerate(sizes))
    for batch in batches:
        assert 1 <= len(batch) <= MAX_CALLS
        assert len(batch) == 1 or sum(size for _number, size in batch) <= MAX_BYTES
    for batch, behind in itertools.pairwise(batches):  # they are no more than there must be
        assert len(batch) == MAX_CALLS or sum(size for _number, size in [*batch, behind[0]]) > MAX_BYTES


def test_on_one_machine_the_steady_clock_counts() -> None:
    start = Moment("boot", 100.0, 1_000_000.0)
    clock_was_set = Moment("boot", 101.0, 1_003_600.0)
    assert seconds_between(start, clock_was_set) == 1
    assert seconds_between(start, clock_was_set._replace(boot="other")) == 3_600
    assert seconds_between(start._replace(boot=""), clock_was_set._replace(boot="")) == 3_600
    assert seconds_between(start, start.after(5)) == 5


class Unreadable(Exception):  # noqa: N818
    """Pickles, and cannot be unpickled: its constructor wants more than its args."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.number = code


class MisplacedError(FileNotFoundError):
    def __init__(self, place: str) -> None:
        super().__init__(errno.ENOENT, "gone", place)
        self.held = threading.Lock()


class Unprintable(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Unpicklable(Exception):  # noqa: N818
    def __init__(self) -> None:
        super().__init__("it holds a generator")
        self.held = (number for number in range(3))


def _raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def _sent(error: BaseException) -> Exception:
    return decode_failure(encode_failure(_raised(error)))


def test_an_exception_arrives_as_itself_with_the_remote_traceback() -> None:
    error = ValueError("bad", 3)
    error.add_note("a note of its own")
    found = _sent(error)
    assert type(found) is ValueError
    assert found.args == ("bad", 3)
    assert found.__notes__[0] == "a note of its own"
    assert "in _raised" in found.__notes__[1]


def test_the_cause_stands_in_the_traceback() -> None:
    error = KeyError("outer")
    error.__cause__ = _raised(OSError("inner"))
    assert "OSError: inner" in _sent(error).__notes__[0]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (StopIteration(7), "StopIteration: 7"),
    ],
)
def test_what_cannot_travel_as_itself_arrives_as_text(error: BaseException, text: str) -> None:
    found = _sent(error)
    assert isinstance(found, RemoteError)
    assert str(found).endswith(text)
    assert found.traceback


@pytest.mark.parametrize(
    ("error", "text"),
    [(Unreadable(3, "odd"), "odd"), (Unpicklable(), "it holds a generator"), (MisplacedError("/x"), "gone")],
)
def test_what_cannot_be_made_again_is_caught_by_its_own_class_too(error: Exception, text: str) -> None:
    sent = _sent(error)
    for found in (sent, pickle.loads(pickle.dumps(sent)), _sent(sent)):
        assert isinstance(found, type(error))
        assert isinstance(found, RemoteError)
        assert (type(found).__qualname__, found.args) == (type(error).__qualname__, error.args)
        assert text in str(found)
        assert found.traceback


def test_it_keeps_those_of_its_attributes_that_can_be_pickled() -> None:
    assert vars(_sent(Unreadable(3, "odd")))["number"] == 3
    found = _sent(MisplacedError("/x"))
    assert isinstance(found, OSError)
    assert (found.errno, found.filename) == (2, "/x")


def test_an_exception_without_words_arrives_all_the_same() -> None:
    assert type(_sent(Unprintable())) is Unprintable


def test_a_class_that_is_missing_here_arrives_as_text() -> None:
    kind, message, text, _itself, advice = pickle.loads(encode_failure(_raised(ValueError("bad"))))
    found = decode_failure(pickle.dumps((kind, message, text, b"cno.such.module\nError\n.", advice)))
    assert isinstance(found, RemoteError)
    assert any("no.such" in note or "'no'" in note for note in found.__notes__)


def test_a_huge_message_is_shortened() -> None:
    assert len(encode_failure(_raised(ValueError("x" * 10_000_000)))) < 1_000_000


def test_our_own_errors_survive_pickling() -> None:
    info = JobInfo(job_id=JobId("j"), name="j", namespace=Namespace("default"), status=JobStatus.FAILED)
    errors: list[Any] = [JobFailedError(info), RemoteError("T", "m", "tb"), ServiceError("Code", "text")]
    for error in errors:
        found = pickle.loads(pickle.dumps(error))
        assert type(found) is type(error)
        assert str(found) == str(error)
