"""Groups of methods that run beside each other, and that nothing which runs holds up the connection."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from fluster.actors import actor, method
from fluster.actors.server import host
from fluster.errors import MailboxFullError
from fluster_bus.core import buckets, subjects
from tests.component.actor_env import NAMESPACE, TIMEOUT_S, Env, Gate


@actor(concurrency_groups={"io": 2, "ordered": 1, "later": 3}, mailbox_calls=40)
class Grouped:
    def __init__(self) -> None:
        self.io, self.plain = Gate(), Gate()
        self.seen: list[int] = []
        self.lingering = threading.Semaphore(0)
        self.at_once = self.most_at_once = 0
        self.open_later: asyncio.Event | None = None

    @method(concurrency_group="io")
    def load(self) -> str:
        return self.io.wait()

    @method(concurrency_group="io")
    def store(self) -> str:
        return self.io.wait()

    @method(concurrency_group="ordered")
    def note(self, what: int) -> None:
        self.seen.append(what)

    @method(concurrency_group="ordered")
    async def note_later(self, what: int) -> None:
        await asyncio.sleep(0)
        self.seen.append(what)

    @method(concurrency_group="later")
    async def linger(self) -> None:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.open_later = self.open_later or asyncio.Event()
        self.lingering.release()
        await self.open_later.wait()
        self.at_once -= 1

    async def let_go(self) -> None:
        assert self.open_later is not None
        self.open_later.set()

    def compute(self) -> str:
        return self.plain.wait()

    def usual(self) -> str:
        return "usual"


def test_a_group_runs_so_many_at_once_and_holds_up_no_other(shared: Env) -> None:
    grouped = Grouped()
    shared.serve("grouped", grouped)
    pool = shared.pool("grouped")
    futures = [pool.submit().load() if number % 2 else pool.submit().store() for number in range(6)]
    for _ in range(2):
        grouped.io.is_entered()
    assert pool.call(timeout=TIMEOUT_S).usual() == "usual"
    computing = pool.submit().compute()
    grouped.plain.is_entered()
    usual = pool.submit().usual()
    pool.call(timeout=TIMEOUT_S).note(1)  # while all others are busy
    assert not usual.done()  # without a group: one at a time
    grouped.plain.opened.set()
    assert [computing.result(TIMEOUT_S), usual.result(TIMEOUT_S)] == ["went through", "usual"]
    grouped.io.opened.set()
    assert [future.result(TIMEOUT_S) for future in futures] == ["went through"] * 6
    assert grouped.io.most_at_once == 2


def test_calls_of_a_group_of_one_run_in_the_order_sent(shared: Env) -> None:
    grouped = Grouped()
    shared.serve("in-order", grouped)
    pool = shared.pool("in-order")
    futures = []
    for number in range(300):
        verb = pool.submit(wait=True)
        futures.append(verb.note(number) if number % 3 else verb.note_later(number))
        if number % 30 == 29:  # no more than the mailbox takes
            futures[-1].result(TIMEOUT_S)
    assert grouped.seen == list(range(300))


def test_asynchronous_calls_of_a_group_are_bounded_as_well(shared: Env) -> None:
    grouped = Grouped()
    shared.serve("bounded", grouped)
    pool = shared.pool("bounded")
    futures = [pool.submit().linger() for _ in range(5)]
    for _ in range(3):
        assert grouped.lingering.acquire(timeout=TIMEOUT_S)
    pool.call().let_go()
    for future in futures:
        future.result(TIMEOUT_S)
    assert grouped.most_at_once == 3


def test_each_group_has_a_mailbox_of_its_own(shared: Env) -> None:
    grouped = Grouped()
    shared.serve("mailboxes", grouped)
    pool = shared.pool("mailboxes")
    filling = [pool.submit().load() for _ in range(40)]
    with pytest.raises(MailboxFullError, match="40 calls waiting"):
        pool.call().store()
    assert pool.call().usual() == "usual"
    grouped.io.opened.set()
    assert {future.result(TIMEOUT_S) for future in filling} == {"went through"}


def test_a_shutdown_finishes_all_groups(shared: Env) -> None:
    grouped = Grouped()
    server = shared.serve("all-groups", grouped)
    pool = shared.pool("all-groups")
    futures = [pool.submit().load(), pool.submit().compute(), pool.submit().note(7)]
    grouped.io.is_entered()
    grouped.plain.is_entered()
    ending = threading.Thread(target=server.shutdown)
    ending.start()
    for gate in (grouped.io, grouped.plain):
        gate.opened.set()
    ending.join(TIMEOUT_S)
    assert [future.result(TIMEOUT_S) for future in futures] == ["went through", "went through", None]


def test_a_group_that_the_class_does_not_have_is_refused(shared: Env) -> None:
    @actor(concurrency_groups={"io": 2})
    class Mistaken:
        @method(concurrency_group="oi")
        def load(self) -> None: ...

    with pytest.raises(ValueError, match=r"Mistaken\.load is in concurrency_group='oi', .*there is io"):
        shared.serve("mistaken", Mistaken())
    with pytest.raises(ValueError, match=r"concurrency_groups\['io'\]=0"):
        actor(concurrency_groups={"io": 0})


@actor(concurrency_groups={"asynchronous": 2, "other": 1})
class Blocking:
    """Its methods hold up whatever they run on."""

    def __init__(self) -> None:
        self.running = threading.Semaphore(0)
        self.ended = False

    def compute(self) -> None:
        self.running.release()
        while not self.ended:  # keeps taking the interpreter
            pass

    @method(concurrency_group="asynchronous")
    async def block_the_loop(self) -> None:
        self.running.release()
        while not self.ended:
            time.sleep(0.001)  # noqa: ASYNC251 - what users do by mistake

    @method(concurrency_group="other")
    def end(self) -> str:
        self.ended = True
        return "ended"


def test_what_runs_holds_up_neither_the_connection_nor_the_lease(
    shared: Env,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "LEASE_S", 0.15)
    renewed = threading.Semaphore(0)

    blocking = Blocking()
    shared.serve("blocking", blocking)
    pool: Any = shared.pool("blocking")
    futures = [pool.submit().compute(), pool.submit().block_the_loop()]
    for _ in futures:
        assert blocking.running.acquire(timeout=TIMEOUT_S)
    subject = subjects.watch_endpoints(NAMESPACE, buckets.endpoints_named("blocking"))
    cluster = shared.cluster()
    cluster.portal.run(cluster.asynchronous.bus.subscribe, subject, lambda _registration: renewed.release())
    for _ in range(3):
        assert renewed.acquire(timeout=TIMEOUT_S)
    assert not any(future.done() for future in futures)
    assert pool.call(timeout=TIMEOUT_S).end() == "ended"
    for future in futures:
        future.result(TIMEOUT_S)
