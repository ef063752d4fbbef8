"""When workers are judged: a controller that could hear nobody judges nobody for it. With a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from fluster_bus.messages import Capacity, Heartbeat, WorkerId, WorkerInfo
from fluster_services.config import Timing
from fluster_services.controller import judge as judge_module
from fluster_services.controller.books import Books
from fluster_services.controller.judge import Judge
from fluster_services.controller.liveness import Liveness
from fluster_services.controller.roster import Roster

W = WorkerId("w")
TIMING = Timing(heartbeat_s=0.02, fence_after_s=90, worker_timeout_s=120)


class Judging:
    """A judge, one worker that it knows since 0 s, and all else of a controller that it looks at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.looks = 0
        self.sure = asyncio.Event()
        self.sure.set()
        self.while_asleep: dict[int, float] = {}  # {after so many looks: seconds that pass during the next sleep}
        monkeypatch.setattr(judge_module, "time", SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now))
        self.roster = Roster(Books(), Liveness(TIMING.worker_timeout_s))
        info = WorkerInfo(worker_id=W, host="", pid=1, total=Capacity(cpu=1), version="", python="", started_at=0.0)
        self.roster.on_registered(info, now=0.0)
        scheduler = SimpleNamespace(needs=lambda: ())
        controller: Any = SimpleNamespace(
            config=SimpleNamespace(timing=TIMING),
            roster=self.roster,
            books=Books(),
            bus=SimpleNamespace(connected=True, on_reconnect=self._none, serve=self._async, subscribe=self._async),
            seat=SimpleNamespace(wait_sure=self._wait_sure, wait_led_since=self.sure.wait),
            dispatch=SimpleNamespace(scheduler=scheduler, on_room=self._none),
            gangs=SimpleNamespace(give_up_misfits=self._async),
            workers_table=SimpleNamespace(delete=self._async),
            write_verdicts=self._async,
        )
        self.judge = Judge(controller)

    def _none(self, *_args: object, **_more: object) -> None: ...

    async def _async(self, *_args: object, **_more: object) -> None: ...

    async def _wait_sure(self) -> None:
        await self.sure.wait()
        self.looks += 1
        passing = self.while_asleep.pop(self.looks, 0.0)
        asyncio.get_running_loop().call_soon(self._pass_time, passing)  # it comes to that when the judge sleeps

    def _pass_time(self, seconds: float) -> None:
        self.now += seconds

    async def look(self, times: int) -> None:
        """Let it look so many times."""
        judging = asyncio.create_task(self.judge.run())
        until = self.looks + times
        while self.looks < until:
            await asyncio.sleep(TIMING.heartbeat_s / 4)
            assert not judging.done(), judging
        await asyncio.sleep(0)
        judging.cancel()

    @property
    def is_alive(self) -> bool:
        return self.roster.liveness.is_alive(W)


def judging(test: Callable[[Judging], Coroutine[Any, Any, None]]) -> Callable[[pytest.MonkeyPatch], None]:
    def run(monkeypatch: pytest.MonkeyPatch) -> None:
        async def main() -> None:
            await test(Judging(monkeypatch))

        asyncio.run(asyncio.wait_for(main(), 20))

    run.__name__ = test.__name__
    return run


@judging
async def test_one_that_begins_to_lead_gives_all_their_whole_time(it: Judging) -> None:
    it.now = 1_000.0
    await it.look(3)
    assert it.is_alive, "another led until now: this one could not hear it"
    it.now += TIMING.worker_timeout_s
    it.roster.take_lost(now=it.now)
    assert not it.is_alive


ASLEEP_S = TIMING.heartbeat_s + TIMING.fence_after_s / 2


@judging
async def test_one_that_was_stopped_judges_nobody_for_what_it_did_not_hear(it: Judging) -> None:
    it.while_asleep = {1: 80.0 - 1e-3, 2: ASLEEP_S + 1e-3}
    await it.look(4)
    assert it.is_alive


@judging
async def test_one_that_was_merely_slow_judges(it: Judging) -> None:
    it.while_asleep = {1: ASLEEP_S - 1e-3, 2: ASLEEP_S - 1e-3, 3: ASLEEP_S - 1e-3}
    await it.look(6)
    assert not it.is_alive


@judging
async def test_a_beat_is_not_acknowledged_before_it_is_known_who_leads(it: Judging) -> None:
    it.sure.clear()
    beat = Heartbeat(worker_id=W, free=Capacity(), attempts=())
    heard = asyncio.create_task(it.judge._on_heartbeat(beat, ""))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not heard.done(), "a leader that was deposed would keep a worker from its fence"
    it.sure.set()
    assert (await heard).registered
