"""A fault in Fluster's own code ends the calls that it concerns, and no others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from fluster.actors import actor
from fluster.actors.client.publisher import Notices
from fluster.actors.protocol import frames
from fluster.actors.protocol.calls import Broadcast, Call
from fluster.actors.routing.routing_pass import RoutingPass
from fluster.errors import ActorError
from tests.component.actor_env import TIMEOUT_S, Calculator, Env, Gate, MemoryEnv


class FaultError(Exception):
    """What the code under test raises where it never should."""


def faulty(genuine: Callable[..., Any]) -> Callable[..., Any]:
    """Fails for the calls of one method, as a bug would."""

    def fail_sometimes(self: Any, *args: Any) -> Any:
        if any(isinstance(each, Call | Broadcast) and each.method == "note" for each in (self, *args)):
            raise FaultError("no such thing")
        return genuine(self, *args)

    return fail_sometimes


@pytest.mark.parametrize("place", ["encoding", "routing"])
def test_a_fault_ends_only_the_calls_that_it_concerns(
    either: Env | MemoryEnv,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = f"faults-in-{place}"
    either.serve(name, Calculator())
    pool = either.pool(name)
    if place == "encoding":
        monkeypatch.setattr(Call, "to_wire", faulty(Call.to_wire))
    else:
        monkeypatch.setattr(RoutingPass, "place_call", faulty(RoutingPass.place_call))
        monkeypatch.setattr(RoutingPass, "place_broadcast", faulty(RoutingPass.place_broadcast))
    with caplog.at_level(logging.ERROR, logger="fluster"):
        futures = [pool.submit().add(1), pool.submit().note(2), pool.submit().add(3)]
        everyone = pool.broadcast().note(4)
        with pytest.raises(
            ActorError, match=rf"{name}\.note.* a fault of Fluster's own: FaultError: no such thing"
        ) as one:
            futures[1].result(TIMEOUT_S)
        assert isinstance(one.value.__cause__, FaultError)
        with pytest.raises(ActorError, match="a fault of Fluster's own"):
            everyone.results(TIMEOUT_S)
    assert [futures[0].result(TIMEOUT_S), futures[2].result(TIMEOUT_S)] == [2, 4]
    assert pool.call().add(5) == 6
    assert {record.exc_info[0] for record in caplog.records if record.exc_info} == {FaultError}


def test_a_fault_in_what_actors_are_told_ends_no_calls(
    either: Env | MemoryEnv,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = Gate()
    either.serve("told", gate)
    pool = either.pool("told")

    def fail(_notices: Notices) -> None:
        raise FaultError("no such thing")

    waits = pool.submit().wait()
    gate.is_entered()
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, logger="fluster"):
        patch.setattr(Notices, "publish", fail)
        pool.submit().wait().cancel()
        behind = pool.submit().wait()
        gate.opened.set()
        assert waits.result(TIMEOUT_S) == behind.result(TIMEOUT_S) == "went through"
    assert any(record.exc_info and record.exc_info[0] is FaultError for record in caplog.records)


class Unreadable:
    """Can be pickled, and not be read again."""

    def __reduce__(self) -> Any:
        return frames.decode_calls, (b"nothing",)


@actor(codec="json")
class Plain:
    def same(self, value: object) -> object:
        return value


def test_an_argument_that_cannot_be_read_again_for_json_ends_only_its_call(either: Env | MemoryEnv) -> None:
    either.serve("rereads", Plain())
    pool = either.pool("rereads")
    before = pool.submit().same(1)
    with pytest.raises(TypeError, match="the arguments have no JSON form: they cannot be read again"):
        pool.call().same(Unreadable())
    assert before.result(TIMEOUT_S) == pool.call().same(1) == 1
