"""Calls and replies in JSON between Fluster's own ends."""

from __future__ import annotations

import json

import pytest

from fluster.actors.protocol import frames, json_frames
from fluster.actors.protocol.failures import decode_failure
from fluster.errors import MailboxFullError, RemoteError
from fluster_bus.core import codec
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import InvalidMessageError


def test_a_call_is_what_people_write() -> None:
    assert json.loads(json_frames.encode_call(codec.encode(((1, "a"), {"b": [2]})))) == {
        "args": [1, "a"],
        "kwargs": {"b": [2]},
    }
    with pytest.raises(TypeError, match="no JSON form"):
        json_frames.encode_call(codec.encode(((b"bytes",), {})))


def test_deadlines_travel_in_a_header() -> None:
    moment = frames.now()
    assert json_frames.deadline_of(Delivery("subject", b"", headers=json_frames.headers_of(moment))) == moment
    assert json_frames.deadline_of(Delivery("subject", b"")) is None
    assert json_frames.headers_of(None) is None
    for text in ("soon", "3", '["boot", "x", 1]', "[1]"):
        with pytest.raises(InvalidMessageError, match=r"is not \[boot id"):
            json_frames.deadline_of(Delivery("subject", b"", headers={json_frames.DEADLINE_HEADER: text}))


def test_replies_are_results_or_exceptions() -> None:
    ok, payload = json_frames.decode_reply(codec.encode_json_result({"a": [1]}))
    assert (ok, codec.decode(payload)) == (True, {"a": [1]})
    for kind, expected in (
        ("ValueError", ValueError),
        ("fluster.errors.MailboxFullError", MailboxFullError),
        ("UnicodeDecodeError", RemoteError),
        ("SystemExit", RemoteError),
        ("StopIteration", RemoteError),
        ("print", RemoteError),
        ("their.Error", RemoteError),
    ):
        ok, payload = json_frames.decode_reply(codec.encode_json_error(kind, "text", "Traceback"))
        error = decode_failure(payload)
        assert (ok, type(error)) == (False, expected)
        assert "text" in str(error)
        assert "Traceback" in error.__notes__[0]


@pytest.mark.parametrize("data", [b"", b"{", b"3", b"{}", b'{"error": 3}', b'{"error": {}}', codec.encode(3)])
def test_what_is_no_reply_is_told(data: bytes) -> None:
    with pytest.raises(InvalidMessageError, match="is not a reply"):
        json_frames.decode_reply(data)
