"""fluster.testing: actors without a server, and a clock that the test moves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluster.actors import ActorContext, actor, every, method
from fluster.cluster import Cluster
from fluster.cluster.portal import Portal
from fluster.errors import (
    ActorFailedError,
    ActorGivenUpError,
    ActorNameTakenError,
    ActorNotFoundError,
    ActorTimeoutError,
)
from fluster.testing import FakeClock, LocalActors
from fluster_bus.core.errors import ClosedError
from fluster_bus.messages import Entrypoint, JobRequest

TIMEOUT_S = 60.0


class Counter:
    def __init__(self, start: int = 0, *, gate: threading.Event | None = None) -> None:
        self.value = start
        self.gate = gate
        self.ticks = 0

    def add(self, amount: int = 1) -> int:
        self.value += amount
        return self.value

    @method(timeout=60)
    def wait(self) -> str:
        assert self.gate is not None
        assert self.gate.wait(TIMEOUT_S)
        return "went through"

    def double(self, ctx: ActorContext) -> int:
        assert isinstance(ctx.cluster, Cluster)
        return 2 * self.value

    @every(10)
    async def tick(self) -> None:
        await asyncio.sleep(0)
        self.ticks += 1

    def seen(self) -> int:
        return self.ticks


@actor(codec="json", name="json")
class JsonCounter(Counter):
    pass


@pytest.fixture
def actors() -> Iterator[LocalActors]:
    with LocalActors() as actors:
        yield actors


@pytest.mark.parametrize("kind", [Counter, JsonCounter])
def test_actors_are_deployed_called_and_shut_down(actors: LocalActors, kind: type[Counter]) -> None:
    pool = actors.deploy(kind, 1, replicas=2)
    assert pool.size == 2
    assert [pool.call().add(1), pool.call().add(1), pool.submit().add(1).result(TIMEOUT_S)] == [2, 2, 3]
    assert sorted(pool.broadcast().add().results(TIMEOUT_S)) == [3, 4]
    with pytest.raises(ActorNameTakenError):
        actors.deploy(kind)
    pool.shutdown()
    again = actors.deploy(kind, 5)
    double: Any = again.call().double  # its callers leave the context out
    assert double() == 10
    assert actors.deploy(kind, 7, name="other").call().add(0) == 7
    assert actors.pool("other").call().add(1) == 8


@actor(max_restarts=1)
class Fragile:
    def __init__(self, start: int) -> None:
        self.value = start

    def add(self) -> int:
        self.value += 1
        return self.value

    def fail(self) -> None:
        raise ActorFailedError("broken")


def test_an_actor_that_fails_is_made_anew(actors: LocalActors) -> None:
    pool = actors.deploy(Fragile, 5)
    assert pool.call().add() == 6
    with pytest.raises(ActorFailedError):
        pool.call().fail()
    assert pool.call().add() == 6
    with pytest.raises(ActorFailedError):
        pool.call().fail()
    with pytest.raises((ActorGivenUpError, ActorNotFoundError)):
        pool.call().add()


def test_an_instance_is_served_as_it_is(actors: LocalActors) -> None:
    counter = Counter(gate=threading.Event())
    actors.register("counter", counter, {"kind": "stub"})
    actors.register("counter", Counter(100))
    pool = actors.pool("counter")
    pool.wait_for_size(2, TIMEOUT_S)
    assert (pool.members()[0].metadata or {})["kind"] == "stub"
    assert pool.call().add() == counter.value == 1


def test_what_is_wrong_is_told_as_ever(actors: LocalActors) -> None:
    with pytest.raises(TypeError, match="deploy\\(\\) takes a class"):
        actors.deploy(Counter())  # type: ignore[arg-type]
    for replicas in (0, -1, True, "3", 10_001):
        with pytest.raises(ValueError, match=f"replicas={replicas!r}: give the number of actors, from 1 to 10,000"):
            actors.deploy(Counter, replicas=replicas)  # type: ignore[arg-type]
    with pytest.raises(ActorNotFoundError, match="no actor serves 'nothing'"):
        actors.pool("nothing").call().add()
    with pytest.raises(NotImplementedError, match="use a LocalCluster"):
        actors.cluster.launch(JobRequest(name="job", entrypoint=Entrypoint(command=("true",))))


def test_deadlines_come_when_the_clock_says_so(actors: LocalActors) -> None:
    gate = threading.Event()
    pool = actors.deploy(Counter, gate=gate)
    running, own, longer = pool.submit(timeout=5).wait(), pool.submit().wait(), pool.submit(timeout=3600).add()
    actors.clock.advance(4.999)
    assert not running.done()
    actors.clock.advance(0.001)
    with pytest.raises(ActorTimeoutError, match="no answer within 5 s"):
        running.result(TIMEOUT_S)
    actors.clock.advance(55, wait=False)  # the actor is held up, and its timer with it
    with pytest.raises(ActorTimeoutError, match="no answer within 60 s"):
        own.result(TIMEOUT_S)
    gate.set()
    assert longer.result(TIMEOUT_S) == 1
    assert actors.clock.elapsed_s == 60


def test_timers_run_when_the_clock_says_so(actors: LocalActors) -> None:
    pool = actors.deploy(Counter, replicas=2)
    actors.clock.advance(9.9)
    assert pool.broadcast().seen().results(TIMEOUT_S) == [0, 0]
    actors.clock.advance(0.1)
    assert pool.broadcast().seen().results(TIMEOUT_S) == [1, 1]
    actors.clock.advance(3600)
    assert pool.broadcast().seen().results(TIMEOUT_S) == [361, 361]
    pool.shutdown()
    actors.clock.advance(3600)


def test_beats_at_a_busy_actor_are_skipped_and_not_waited_for(actors: LocalActors) -> None:
    gate = threading.Event()
    pool = actors.deploy(Counter, gate=gate)
    waits = pool.submit(timeout=3600).wait()
    actors.clock.advance(100, wait=False)
    gate.set()
    assert waits.result(TIMEOUT_S) == "went through"
    assert pool.call().seen() == 1
    actors.clock.advance(10)
    assert pool.call().seen() == 2


def test_the_clock_goes_forwards() -> None:
    clock = FakeClock(lambda _wait: None)
    with pytest.raises(ValueError, match=r"advance\(-1\): time does not go backwards"):
        clock.advance(-1)
    before = clock.now()
    clock.advance(1.5)
    assert (clock.now().monotonic - before.monotonic, clock.now().wall - before.wall) == (1.5, 1.5)


def test_alarms_ring_in_order_each_at_its_time() -> None:
    portal, rang = Portal("test"), list[tuple[str, float]]()
    clock = FakeClock(lambda _wait: None)

    async def set_alarms() -> None:
        loop = asyncio.get_running_loop()

        def ring(name: str) -> None:
            rang.append((name, clock.elapsed_s))
            if name == "first":
                clock.call_later(loop, 1, ring, "from the first")

        for name, delay_s in (("late", 9), ("second", 2), ("first", 1), ("also second", 2)):
            clock.call_later(loop, delay_s, ring, name)
        clock.call_later(loop, 1, ring, "cancelled").cancel()
        clock.call_later(loop, 0, ring, "at once")
        await asyncio.sleep(0)

    portal.run(set_alarms)
    clock.advance(5)
    portal.close()
    assert rang == [("at once", 0), ("first", 1), ("second", 2), ("also second", 2), ("from the first", 2)]


@pytest.mark.anyio
async def test_futures_are_awaited_too(actors: LocalActors) -> None:
    pool = actors.deploy(Counter, 1)
    assert await asyncio.gather(*(pool.submit().add() for _ in range(3))) == [2, 3, 4]


def test_after_the_end_calls_are_refused() -> None:
    actors = LocalActors()
    pool: Any = actors.deploy(Counter)
    actors.close()
    actors.close()
    with pytest.raises(ClosedError):
        pool.call().add()


def test_the_example_of_the_page_is_true() -> None:
    page = Path(__file__).parents[3] / "docs" / "how-to" / "testing.md"
    example = next(each for each in page.read_text("utf-8").split("```python\n") if "LocalActors() as" in each)
    names: dict[str, Any] = {}
    exec(example.partition("```")[0], names)
    tests = [each for name, each in names.items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()


@pytest.mark.parametrize("replicas", [0, -1, True, "2"])
def test_a_pool_has_members(replicas: Any) -> None:
    with LocalActors() as actors, pytest.raises(ValueError, match=r"replicas=.*: give the number of actors, from 1 to"):
        actors.deploy(_Kept, replicas=replicas)


class _Kept:
    def get(self) -> int:
        return 1
