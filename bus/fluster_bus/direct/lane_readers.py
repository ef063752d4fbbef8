"""Threads that wait for answers on a lane, each for its own, and read for all of them in turn meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from fluster_bus.direct.lane import Lane
from fluster_bus.direct.waiting import Eagerness, Waker
from fluster_bus.running.blocked_waits import LOOK_S, wait_seeing_signals


class LaneReaders:
    """Those of one lane. What they wait for is brought about by the lane's callbacks, in the thread that reads."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._turns = lane.turns
        self._interrupter = Waker()

    def read_while(
        self,
        is_out: Callable[[], bool],
        when_done: Callable[[Callable[[], object]], object],
        timeout_s: float | None,
        eagerness: Eagerness | None = None,
    ) -> None:
        """Return when it `is_out` no more, or when the time is over or the lane is closed; take one's turn at reading meanwhile.

        `when_done(callback)` has a callback run once it is not, at once if it is not already. The reading thread sleeps as late as
        `eagerness` wants.
        """
        lane = self._lane
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while is_out() and lane.closed is None and (deadline is None or time.monotonic() < deadline):
            woken = threading.Event()
            try:
                try:
                    self._read_or_wait(woken, is_out, when_done, deadline, eagerness)
                finally:
                    lane.leave(woken.set)
            finally:
                lane.leave(woken.set)  # once more: Ctrl-C may come at any moment, in the midst of leaving too

    def interrupt(self) -> None:
        """Have the reading thread ask again whether it is done."""
        self._interrupter.wake()

    def _read_or_wait(
        self,
        woken: threading.Event,
        is_out: Callable[[], bool],
        when_done: Callable[[Callable[[], object]], object],
        deadline: float | None,
        eagerness: Eagerness | None,
    ) -> None:
        if not self._turns.ask(woken.set):
            self._lane.wake()  # it may be the keeper's turn
            when_done(woken.set)
            wait_seeing_signals(woken.wait, _left_s(deadline))
        if self._turns.has(woken.set):
            self._read_in_turn(is_out, deadline, eagerness)

    def _read_in_turn(self, is_out: Callable[[], bool], deadline: float | None, eagerness: Eagerness | None) -> None:
        lane = self._lane
        while is_out() and lane.closed is None and (deadline is None or time.monotonic() < deadline):
            # As wait_seeing_signals does.
            look_s = LOOK_S if deadline is None else min(deadline - time.monotonic(), LOOK_S)
            lane.receive(look_s, beside=self._interrupter, eagerness=eagerness)


def _left_s(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0)
