"""What news of members mean for a call in JSON that is out."""

import dataclasses

import pytest

from fluster.actors.client.json_calls import end_of
from fluster.actors.client.rosters import Change, Joined, Left, Synced
from fluster.actors.protocol.frames import now
from fluster.actors.protocol.members import Member
from fluster.errors import ActorDiedError, ConnectionLostError

SENT_AT = now()
MEMBER = Member.at("shapes", "fluster.default.actors.shapes.one.e1")


def _was_away(seconds_after_the_call: float, member: Member = MEMBER) -> Joined:
    return Joined(dataclasses.replace(member, disconnected_at=SENT_AT.after(seconds_after_the_call)))


@pytest.mark.parametrize(
    "change",
    [
        Synced(),
        Joined(MEMBER),
        Left("e2"),
        _was_away(-1.0),
        _was_away(1.0, Member.at("shapes", "fluster.default.actors.shapes.one.e2")),
    ],
)
def test_other_news_do_not_end_it(change: Change) -> None:
    assert end_of(change, "e1", SENT_AT, "shapes.move") is None


def test_it_ends_with_its_member() -> None:
    ended = end_of(Left("e1", "exit code 3"), "e1", SENT_AT, "shapes.move")
    assert isinstance(ended, ActorDiedError)
    assert str(ended) == "shapes.move: the actor e1 ended (exit code 3) while the call was out; it may have run"


def test_it_ends_when_its_member_was_cut_off_meanwhile() -> None:
    ended = end_of(_was_away(1.0), "e1", SENT_AT, "shapes.move")
    assert isinstance(ended, ConnectionLostError)
    assert "shapes.move: the actor lost its connection" in str(ended)
