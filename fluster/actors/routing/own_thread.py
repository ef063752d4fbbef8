"""The one thread of an actor that runs one call at a time: whoever waits there for that very actor waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from fluster.actors.protocol.calls import Call
from fluster.actors.protocol.members import Member
from fluster.errors import ActorDeadlockError


@dataclass(frozen=True)
class OwnThread:
    """What no other thread runs."""

    endpoint_id: str
    name: str  # of the actor
    methods: Collection[str]

    in_use: ClassVar[bool] = False  # whether there is any: plain callers shall not look further

    def enter(self) -> None:
        """This thread is it, from now on."""
        OwnThread.in_use = True
        _thread.own = self

    def deadlock(self, call: Call, member: Member) -> ActorDeadlockError | None:
        """Why a call to `member`, for which this thread waits, could never end; None when it may."""
        if member.endpoint_id != self.endpoint_id or call.method in (member.timeouts or ()):
            return None
        return self._deadlock(
            call, ", or give the class max_concurrency, or one of the two methods a concurrency_group of its own"
        )

    def stored_deadlock(self, call: Call) -> ActorDeadlockError | None:
        """The same for a call that is stored for the one actor of its name."""
        if call.pool != self.name:
            return None
        return self._deadlock(call, ", or submit() it, and do not wait for it here")

    def _deadlock(self, call: Call, other_remedies: str) -> ActorDeadlockError | None:
        if call.method not in self.methods or call.deadline is not None:
            return None
        return ActorDeadlockError(
            f"{call} was called by the actor itself, which runs one call at a time and would wait for its own end: "
            f"write self.{call.method}(…){other_remedies}; it was not run"
        )


class _Thread(threading.local):
    own: OwnThread | None = None


_thread = _Thread()


def own_thread() -> OwnThread | None:
    """What this thread is the only one to run."""
    return _thread.own if OwnThread.in_use else None
