"""A broadcast that its waiting thread carries: answers are kept as they come, and calls are made for who has to know them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from fluster.actors.protocol.calls import Broadcast
from fluster.actors.protocol.frames import Moment
from fluster.actors.protocol.members import Member
from fluster.actors.routing.messages_out import MessageOut
from fluster.actors.routing.pool_state import PoolState


class BroadcastOut:
    """One that is out, as a MessageOut is, but without a call and a future for each member until `make_calls` makes them.

    Most end with a plain result of each, which then is all that there is to know.
    """

    __slots__ = (
        "_lock",
        "_message",
        "_results",
        "_wakes",
        "broadcast",
        "members",
        "missing",
        "number",
        "pool",
        "sent_at",
    )

    def __init__(self, pool: PoolState, broadcast: Broadcast, members: Sequence[Member], now: Moment) -> None:
        self.pool = pool
        self.broadcast = broadcast
        self.members = members
        self.sent_at = now
        self.number: int | None = None
        self.missing: set[str] = {
            member.endpoint_id for member in members
        }  # those that have not answered; for who looks only
        self._results: dict[str, bytes] = {}
        self._message: MessageOut | None = None
        self._wakes: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def take(self, endpoint_id: str, payload: bytes) -> bool:
        """Keep the result of a member; False when it is to be given to its call, as there are calls."""
        with self._lock:
            if self._message is not None:
                return False
            if endpoint_id in self.missing:  # else it is new, and was not asked
                self._results[endpoint_id] = payload
                self.missing.remove(endpoint_id)
        if not self.missing:
            self._wake()
        return True

    def results(self) -> list[bytes] | None:
        """The payloads of all, in the order of the members; None when some are missing, or there are calls."""
        if self.missing or self._message is not None:
            return None
        return [self._results[member.endpoint_id] for member in self.members]

    def make_calls(self) -> MessageOut:
        """The message with the calls that are not answered yet: those who wait are given futures, from any thread."""
        with self._lock:
            if self._message is None:
                calls = self.broadcast.calls(self.members)
                for endpoint_id, payload in self._results.items():
                    call = calls.pop(endpoint_id)
                    call.over = True
                    call.ticket.settle(True, payload)
                for call in calls.values():
                    call.number = self.number
                self._message = MessageOut(self.pool, None, self.sent_at, calls)
        self._wake()
        return self._message

    def when_changed(self, wake: Callable[[], object]) -> None:
        """Have `wake` called once all have answered, or calls were made, or one of those is answered."""
        with self._lock:
            message = self._message
            if message is None:
                self._wakes.append(wake)
        futures: list[Any] = [] if message is None else [call.ticket for call in list(message.calls.values())]
        for future in futures:
            future.add_done_callback(lambda _done: wake())
        if not futures and (message is not None or not self.missing):
            wake()

    def _wake(self) -> None:
        with self._lock:
            wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake()
