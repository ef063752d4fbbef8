"""Which controller leads."""

from __future__ import annotations

from fluster_bus.messages.parts.model import Message

_FENCE_CHARACTERS = 512


class Leader(Message):
    """The controller that leads, as it says itself. It does as long as it writes this again and again."""

    controller_id: str
    instance: str  # of the process, and of its time as leader: another one under the same id is another
    since: float  # by the leader's wall clock, for people
    restoring: bool = False  # it is none: the store is being restored, and no controller may lead until that is over


class Fence(Message):
    """In a bucket of jobs: whose verdicts are taken there."""

    controller_id: str
    instance: str
    padding: str = ""  # makes all of one size: in a full bucket a record is replaced by none that is larger

    @classmethod
    def of(cls, leader: Leader) -> Fence:
        """The fence of who leads."""
        return cls(
            controller_id=leader.controller_id,
            instance=leader.instance,
            padding=" " * max(0, _FENCE_CHARACTERS - len(leader.controller_id) - len(leader.instance)),
        )
