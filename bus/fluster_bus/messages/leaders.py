"""Which controller leads."""

from __future__ import annotations

from fluster_bus.messages.model import Message


class Leader(Message):
    """The controller that leads, as it says itself. It does as long as it writes this again and again."""

    controller_id: str
    instance: str  # of the process, and of its time as leader: another one under the same id is another
    since: float  # by the leader's wall clock, for people


class Fence(Message):
    """In a bucket of jobs: whose verdicts are taken there."""

    controller_id: str
    instance: str
