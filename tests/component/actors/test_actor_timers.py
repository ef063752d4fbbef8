"""`@every` over a real server: runs take their turn among calls, end with the actor, and are counted."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from queue import SimpleQueue
from typing import Any, ClassVar

import pytest

from fluster.actors import ActorContext, ActorServer, actor, every
from fluster.errors import ActorFailedError
from tests.component.actor_env import TIMEOUT_S, Env, Gate, MemoryEnv
from tests.component.actors.test_actors import plain
from tests.insides import served_by
from tests.waiting import wait_until


class Beating:
    def __init__(self) -> None:
        self.ran = threading.Semaphore(0)
        self.runs: list[str | None] = []

    @every(0.02)
    def refresh(self, ctx: ActorContext) -> None:
        self.runs.append(ctx.method)
        self.ran.release()

    @every(0.02, jitter=0.01)
    async def _poll(self) -> None:
        await asyncio.sleep(0)
        self.runs.append("_poll")
        self.ran.release()

    @every(0.02)
    def _fail(self) -> None:
        raise ValueError("every time")

    def seen(self) -> int:
        return len(self.runs)


@pytest.mark.anyio
async def test_methods_run_again_and_again_until_the_actor_ends(shared: Env, caplog: Any) -> None:
    beating = Beating()
    with caplog.at_level(logging.ERROR, "fluster"):
        server = shared.serve("beating", beating)
        pool = shared.pool("beating")
        for _ in range(12):
            assert beating.ran.acquire(timeout=TIMEOUT_S)
        assert pool.call().seen() >= 12
        pool.call().refresh()
        async with plain(shared) as client:
            with pytest.raises(AttributeError):
                pool.call().seen_nothing()
            answer = await client.request(f"{pool.members()[0].address}.every-_poll", b"", timeout=TIMEOUT_S)
            assert json.loads(answer.data)["error"]["type"] == "AttributeError"  # only the timer runs it
            stats = json.loads((await client.request("$SRV.STATS.beating", timeout=TIMEOUT_S)).data)
        server.shutdown()
    assert {*beating.runs} == {"every-refresh", "_poll", "refresh"}
    counts = {each["name"]: each for each in stats["endpoints"]}
    assert counts["every-refresh"]["num_requests"] >= 1
    assert "skipped" in counts["every-refresh"]["data"]
    failed = counts["every-_fail"]
    assert 1 <= failed["num_errors"] <= failed["num_requests"] <= failed["num_errors"] + 1  # one may be under way
    assert failed["last_error"] == "ValueError: every time"
    assert any("beating.every-_fail failed" in record.message and record.exc_info for record in caplog.records)
    assert all(timer._alarm is None and timer.idle.is_set() for timer in served_by(server)[0].actor.timers)  # noqa: SLF001 - an alarm that is left behind does nothing that shows


class Slow(Gate):
    @every(0.01)
    def tick(self) -> None:
        self.wait()


def test_runs_take_their_turn_and_never_pile_up(either: Env | MemoryEnv) -> None:
    slow = Slow()
    server = either.serve("slow-ticks", slow)
    pool = either.pool("slow-ticks")
    either.pass_time(0.01)
    slow.is_entered()
    either.pass_time(0.05)
    timer = served_by(server)[0].actor.timers[0]
    wait_until(lambda: timer.counts.data["skipped"] >= 5)
    call = pool.submit().wait()
    slow.opened.set()
    assert call.result(TIMEOUT_S) == "went through"
    assert slow.most_at_once == 1


@actor(max_restarts=1)
class Fragile:
    made: ClassVar[SimpleQueue[int]] = SimpleQueue()
    ran: ClassVar[SimpleQueue[Fragile]] = SimpleQueue()

    def __init__(self) -> None:
        self.made.put(1)

    @every(0.01)
    def _tick(self) -> None:
        self.ran.put(self)
        if self.made.qsize() == 1:
            raise ActorFailedError("broken")

    def ping(self) -> None: ...


def test_a_run_may_find_its_actor_broken_and_goes_on_with_the_next_instance(shared: Env) -> None:
    server = ActorServer(shared.cluster())
    first = Fragile()
    server.register("fragile", first, factory=Fragile)
    server.serve_background()
    assert Fragile.ran.get(timeout=TIMEOUT_S) is first
    assert Fragile.ran.get(timeout=TIMEOUT_S) is not first
    server.shutdown()
