"""Timers of actors: when they beat, what they skip, and what may stand below `@every`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster.actors import ActorContext, every
from fluster.actors.definition.definition import methods_of
from fluster.actors.definition.timers import Every, Schedule, Timer, timers_of
from fluster.actors.protocol.clock import Alarm
from fluster.actors.protocol.frames import Moment


class Beating:
    @every(5)
    def refresh(self) -> None: ...

    @every(2.5, jitter=1)
    async def _poll(self, ctx: ActorContext, times: int = 1) -> None: ...

    @staticmethod
    @every(1)
    def fixed() -> None: ...

    def other(self) -> None: ...


class Quiet(Beating):
    def refresh(self) -> None: ...


def test_timers_are_found_also_those_that_nobody_may_call() -> None:
    assert timers_of(Beating) == {"refresh": Every(5), "_poll": Every(2.5, 1), "fixed": Every(1)}
    assert sorted(methods_of(Beating)) == ["fixed", "other", "refresh"]
    assert sorted(timers_of(Quiet)) == ["_poll", "fixed"]


@pytest.mark.parametrize(
    ("seconds", "jitter", "text"),
    [
        (0, 0, r"@every\(0\): give a number of seconds above 0"),
        (float("inf"), 0, "above 0"),
        (float("nan"), 0, "above 0"),
        ("5", 0, "@every\\('5'\\)"),
        (True, 0, "above 0"),
        (5, 5, r"@every\(jitter=5\): give seconds from 0 to less than the 5"),
        (5, -1, "jitter=-1"),
    ],
)
def test_wrong_intervals_are_refused(seconds: Any, jitter: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        every(seconds, jitter=jitter)


def test_only_what_needs_no_arguments_can_be_run() -> None:
    with pytest.raises(TypeError, match="@every above 'refresh': a timer calls it without size, deep"):

        class _Wanting:
            @every(5)
            def refresh(self, ctx: ActorContext, size: int, rest: int = 1, *more: int, deep: bool) -> None: ...

    with pytest.raises(TypeError, match="@every above 'pages': it is a generator"):

        class _Yielding:
            @every(5)
            async def pages(self) -> AsyncIterator[int]:
                yield 1

    with pytest.raises(TypeError, match="@every stands above a method"):
        every(5)(Beating)


def test_beats_are_on_a_grid_that_delays_do_not_move() -> None:
    schedule = Schedule(10, started_at=100)
    assert schedule.delay(100) == 10
    assert schedule.on_beat(113, busy=False) == 0
    assert schedule.delay(113) == 7
    assert schedule.on_beat(120, busy=True) == 1
    assert schedule.delay(121) == 9
    assert schedule.on_beat(155, busy=False) == 2  # those at 130 and 140 were slept through; this is the one at 150
    assert schedule.delay(155) == 5


@given(st.lists(st.tuples(st.floats(0, 35), st.booleans())), st.floats(0.5, 10))
def test_each_beat_brings_a_run_or_is_counted_as_skipped(waits: list[tuple[float, bool]], seconds: float) -> None:
    schedule = Schedule(seconds, started_at=0)
    now, runs, skipped = 0.0, 0, 0
    for late_s, busy in waits:
        now += schedule.delay(now) + late_s
        skipped += schedule.on_beat(now, busy=busy)
        runs += not busy
        beats = now / seconds
        assert beats - 1 - 1e-6 <= runs + skipped <= beats + 1e-6
        assert 0 <= schedule.delay(now) <= seconds + 1e-6


class ManualClock:
    def __init__(self) -> None:
        self.time = 0.0
        self.alarms: list[tuple[float, Callable[[], object]]] = []

    def now(self) -> Moment:
        return Moment("boot", self.time, self.time)

    def call_later(
        self, loop: asyncio.AbstractEventLoop, delay_s: float, callback: Callable[..., object], *args: object
    ) -> Alarm:
        alarm = (self.time + delay_s, lambda: callback(*args))
        self.alarms.append(alarm)

        class Cancel:
            def cancel(_self) -> None:  # noqa: N805 - there is a self already
                self.alarms.remove(alarm)

        return Cancel()

    def ring(self) -> float:
        """Go on to the next alarm; how long that took."""
        self.alarms.sort(key=lambda each: each[0])
        before, (self.time, callback) = self.time, self.alarms.pop(0)
        callback()
        return self.time - before


@pytest.mark.anyio
async def test_a_run_that_has_not_ended_keeps_the_next_away() -> None:
    clock, room, runs = ManualClock(), [True], list[str]()

    def put(timer: Timer) -> bool:
        runs.extend([timer.key] * room[0])
        return room[0]

    timer = Timer(Beating, "refresh", put=put, clock=clock)
    timer.start()
    assert runs == []
    assert clock.ring() == 5
    assert runs == ["every-refresh"]
    clock.ring()
    assert (len(runs), timer.counts.data) == (1, {"skipped": 1})
    timer.on_done()
    room[0] = False  # a full mailbox
    clock.ring()
    assert (len(runs), timer.counts.data) == (1, {"skipped": 2})
    room[0] = True
    clock.ring()
    assert (len(runs), timer.counts.data) == (2, {"skipped": 2})
    timer.stop()
    assert clock.alarms == []


@pytest.mark.anyio
async def test_jitter_delays_a_beat_and_not_those_after_it() -> None:
    clock = ManualClock()
    timer = Timer(Beating, "_poll", put=lambda _timer: True, clock=clock)
    timer.start()
    times = []
    for _ in range(200):
        clock.ring()
        times.append(clock.time)
        timer.on_done()
    late = [time - 2.5 * number for number, time in enumerate(times, start=1)]
    assert all(-1e-6 <= each <= 1 for each in late)
    assert max(late) - min(late) > 0.5
