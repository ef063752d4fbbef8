"""Cancelled calls over a real server: what the actor sees of them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fluster.actors import ActorContext, ActorPool, AsyncActorPool, actor
from fluster.cluster import AsyncCluster
from fluster.errors import ActorTimeoutError
from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.errors import ServiceError
from fluster_bus.core.roles import Role
from tests.component.actor_env import NAMESPACE, TIMEOUT_S, Calculator, Env
from tests.waiting import wait_until_async


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Env]:
    """Each test uses names of its own."""
    env = Env(tmp_path_factory.mktemp("store"))
    yield env
    env.close()


class Slow:
    """Tells the test what becomes of its calls."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.ended = threading.Semaphore(0)
        self.opened = threading.Event()
        self.seen: list[Any] = []

    def is_entered(self) -> None:
        assert self.entered.acquire(timeout=TIMEOUT_S)

    def is_ended(self) -> None:
        assert self.ended.acquire(timeout=TIMEOUT_S)

    def block(self) -> None:
        self.entered.release()
        assert self.opened.wait(TIMEOUT_S)

    def note(self, what: Any) -> Any:
        self.seen.append(what)
        return what

    def watch(self, ctx: ActorContext) -> None:
        self.seen.append(ctx.cancelled)
        self.entered.release()
        self.seen += [ctx.wait_cancelled(TIMEOUT_S), ctx.cancelled]
        self.ended.release()

    async def sleep(self) -> None:
        self.entered.release()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.seen.append("cancelled")
            raise
        finally:
            await asyncio.sleep(0)
            self.seen.append("cleaned up")
            self.ended.release()


@actor(max_concurrency=3)
class Wide(Slow):
    pass


def serve(env: Env, name: str, instance: Slow | None = None) -> tuple[Slow, ActorPool[Any]]:
    slow = instance or Slow()
    env.serve(name, slow)
    return slow, env.pool(name)


def test_a_call_that_waits_is_taken_out_of_the_mailbox(shared: Env) -> None:
    slow, pool = serve(shared, "queued")
    blocking, unwanted = pool.submit().block(), [pool.submit().note(number) for number in range(3)]
    wanted = pool.submit().note("wanted")
    slow.is_entered()
    assert all(each.cancel() for each in unwanted)
    for each in unwanted:
        with pytest.raises(concurrent.futures.CancelledError):
            each.result()
    also = pool.submit().note("after it")
    with pytest.raises(AttributeError):  # answered at once, and sent after the cancels
        pool.call().no_such_method()
    pool.broadcast().note("to all")
    slow.opened.set()
    assert blocking.result(TIMEOUT_S) is None
    assert (wanted.result(TIMEOUT_S), also.result(TIMEOUT_S)) == ("wanted", "after it")
    assert not wanted.cancel()
    assert pool.call().note("end") == "end"
    assert slow.seen == ["wanted", "after it", "to all", "end"]


@actor(mailbox_calls=3)
class Narrow(Slow):
    pass


def test_what_is_taken_out_makes_room(shared: Env) -> None:
    slow, pool = serve(shared, "room", Narrow())
    running = pool.submit().block()
    slow.is_entered()
    for each in [pool.submit().note(number) for number in range(2)]:
        assert each.cancel()
    futures = [pool.submit().note(f"again {number}") for number in range(2)]
    with pytest.raises(AttributeError):
        pool.call().no_such_method()
    slow.opened.set()
    assert [each.result(TIMEOUT_S) for each in futures] == ["again 0", "again 1"]
    assert running.result(TIMEOUT_S) is None


@pytest.mark.parametrize("kind", [Slow, Wide])
def test_a_method_sees_that_it_is_cancelled(shared: Env, kind: type[Slow]) -> None:
    slow, pool = serve(shared, f"sees-{kind.__name__}", kind())
    for method in ("watch", "sleep"):
        future = getattr(pool.submit(), method)()
        slow.is_entered()
        assert future.cancel()
        slow.is_ended()
    assert slow.seen == [False, True, True, "cancelled", "cleaned up"]
    assert pool.call(timeout=TIMEOUT_S).note("next") == "next"


def test_a_call_that_runs_into_its_timeout_is_cancelled(shared: Env) -> None:
    slow, pool = serve(shared, "late")
    with pytest.raises(ActorTimeoutError):
        pool.call(timeout=2.0).sleep()  # it is run in that time
    slow.is_ended()
    assert slow.seen == ["cancelled", "cleaned up"]


def test_a_cancel_reaches_no_other_call(shared: Env) -> None:
    """Many calls of two clients, every third one cancelled at some moment: all others are answered."""
    shared.serve("others", Calculator())
    pools = [shared.pool("others") for _ in range(2)]
    for _ in range(5):
        futures = [(number, pools[number % 2].submit().add_later(number, 0)) for number in range(300)]
        for number, future in futures:
            if number % 3 == 0:
                future.cancel()
        for number, future in futures:
            if number % 3:
                assert future.result(TIMEOUT_S) == number
            else:
                assert future.cancelled() or future.result(TIMEOUT_S) == number


@actor(codec="json")
class JsonSlow(Slow):
    pass


def test_calls_of_actors_that_take_json_only_are_cancelled_as_well(shared: Env) -> None:
    slow, pool = serve(shared, "json-slow", JsonSlow())
    running, queued = pool.submit().sleep(), pool.submit().note("queued")
    slow.is_entered()
    assert queued.cancel()
    assert running.cancel()
    slow.is_ended()
    assert pool.call(timeout=TIMEOUT_S).note("next") == "next"
    assert slow.seen == ["cancelled", "cleaned up", "next"]


def test_an_answer_of_a_broadcast_can_be_cancelled(shared: Env) -> None:
    slow, other = Slow(), Slow()
    shared.serve("half", slow, other)
    pool = shared.pool("half", size=2)
    first, second = pool.broadcast().sleep().futures()
    slow.is_entered()
    other.is_entered()
    assert first.cancel()
    slow.is_ended()
    assert (slow.seen, other.seen) == (["cancelled", "cleaned up"], [])
    assert second.cancel()
    other.is_ended()


@pytest.mark.anyio
async def test_cancelling_a_task_cancels_what_it_awaits(shared: Env) -> None:
    slow = Slow()
    shared.serve("task", slow)
    async with await AsyncCluster.connect(shared.server.credentials(Role.OPERATOR)) as cluster:
        pool: AsyncActorPool[Any] = AsyncActorPool(cluster, "task")
        await pool.wait_for_size(1, timeout=TIMEOUT_S)

        async def work() -> None:
            await pool.call().sleep()

        async def limited() -> None:
            async with asyncio.timeout(None) as limit:
                entering = asyncio.create_task(asyncio.to_thread(slow.is_entered))
                entering.add_done_callback(lambda _entering: limit.reschedule(0))  # sooner, the call might never be run
                try:
                    await pool.call().sleep()
                finally:
                    await entering

        task = asyncio.create_task(work())
        await asyncio.to_thread(slow.is_entered)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(slow.is_ended)
        with pytest.raises(TimeoutError):
            await limited()
        await asyncio.to_thread(slow.is_ended)
        assert slow.seen == ["cancelled", "cleaned up"] * 2


@pytest.mark.anyio
async def test_a_broadcast_that_is_given_up_before_the_members_are_known_harms_nobody(shared: Env) -> None:
    shared.serve("given-up", Calculator())
    async with await AsyncCluster.connect(shared.server.credentials(Role.OPERATOR)) as cluster:
        pool: AsyncActorPool[Any] = AsyncActorPool(cluster, "given-up")
        result = pool.broadcast().add(1)
        asking = asyncio.create_task(result.futures())
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await pool.wait_for_size(1, timeout=TIMEOUT_S)
        assert await pool.call().add(1) == 2


@pytest.mark.anyio
async def test_junk_in_place_of_a_cancel_is_dropped(shared: Env) -> None:
    slow, pool = serve(shared, "junk")
    future = pool.submit().sleep()
    slow.is_entered()
    bus = await Bus.connect(shared.server.credentials(Role.OPERATOR), name="junk")
    to_all = subjects.actor_all(NAMESPACE, "junk", "_cancel")
    for body in (b"junk", b"[1]", b""):
        with pytest.raises(ServiceError, match="no calls to cancel could be read"):
            await bus.request(to_all, body)
    await bus.publish(to_all, b"\x80junk", reply=f"{bus.inbox()}.1")
    await bus.flush()
    await bus.close()
    assert future.cancel()
    await wait_until_async(lambda: slow.seen == ["cancelled", "cleaned up"])
