"""Actors whose calls are stored, and what they save."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from fluster.actors import ActorContext, ActorPool, ActorServer, AsyncActorPool, actor, every, method
from fluster.actors.client import stored_calls
from fluster.actors.protocol import frames
from fluster.cluster import Cluster
from fluster.errors import (
    ActorDeadlockError,
    ActorFailedError,
    ActorGivenUpError,
    ActorNotFoundError,
    ActorTimeoutError,
    ConnectionLostError,
    MailboxFullError,
    SupersededError,
)
from fluster.testing import LocalActors
from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets, server_subjects, subjects
from fluster_bus.core.errors import DisconnectedError, MessageTooLargeError, RequestTimeoutError, ServiceError
from fluster_bus.core.roles import Role
from fluster_bus.messages import HandledCalls, SavedState
from fluster_bus.storage import streams
from fluster_bus.storage.stored_messages import StoredCall, calls_feed, store_call
from fluster_bus.storage.tables import Table
from tests.component.actor_env import NAMESPACE, TIMEOUT_S, Env, Gate
from tests.insides import caller_of
from tests.waiting import wait_until, wait_until_async


@actor(durable=True, max_restarts=2)
class Ledger:
    """Numbers in the order in which they came; all instances of a test share what they ran."""

    def __init__(self, ran: list[Any], gate: Gate | None = None) -> None:
        self.ran, self.gate = ran, gate
        self.numbers: list[Any] = []

    def on_restore(self, state: list[Any]) -> None:
        self.ran.append("restored")
        self.numbers = list(state)

    def on_start(self) -> None:
        self.ran.append("started")

    def add(self, ctx: ActorContext, number: Any) -> int:
        self.ran.append(number)
        self.numbers.append(number)
        ctx.save(self.numbers)
        return len(self.numbers)

    def all(self) -> list[Any]:
        return self.numbers

    def wait(self) -> str:
        assert self.gate is not None
        self.ran.append("waits")
        return self.gate.wait()

    def save_and_wait(self, ctx: ActorContext) -> None:
        assert self.gate is not None
        ctx.save(["saved"])
        self.gate.wait()

    def make(self, size: int) -> bytes:
        return bytes(size)

    def fail(self) -> None:
        raise ActorFailedError("no use")

    def complain(self) -> None:
        raise ValueError("as it pleases")

    def save_too_much(self, ctx: ActorContext) -> None:
        ctx.save(bytes(5 << 20))

    def save_what_cannot_be(self, ctx: ActorContext) -> None:
        ctx.save(threading.Lock())


@actor(durable=True)
class AsyncLedger:
    def __init__(self) -> None:
        self.numbers: list[int] = []

    def on_restore(self, state: list[int]) -> None:
        self.numbers = state

    async def add(self, ctx: ActorContext, number: int) -> int:
        await asyncio.sleep(0)
        self.numbers.append(number)
        await ctx.save_async(self.numbers)
        return len(self.numbers)


class Served:
    """A ledger, its server, and a cluster of its own for it."""

    def __init__(self, on: Env, name: str, ran: list[Any], gate: Gate | None = None) -> None:
        self.cluster: Cluster = on.cluster(Role.JOB)
        self.server = ActorServer(self.cluster)
        make = functools.partial(Ledger, ran, gate)
        self.server.register(name, make(), factory=make)
        self.server.serve_background()

    def end(self) -> None:
        self.server.shutdown(TIMEOUT_S)


def pool_of(on: Env, name: str, role: Role = Role.CLIENT) -> ActorPool[Any]:
    return ActorPool(on.cluster(role), name, actor_class=Ledger)


def on_bus(on: Env, use: Callable[[Bus], Awaitable[None]], role: Role = Role.SERVICE) -> None:
    """Run `use` with a connection of that role."""

    async def run() -> None:
        bus = await Bus.connect(on.server.credentials(role), name="test")
        try:
            await use(bus)
        finally:
            await bus.close()

    on.portal.run(run)


def supersede(on: Env, name: str) -> None:
    """Have another instance behind the name, as far as what is kept tells."""

    async def take(bus: Bus) -> None:
        handled = streams.handled_table(bus, NAMESPACE)
        row = await handled.get(buckets.handled_key(name))
        assert row is not None
        await handled.update(row.key, HandledCalls(instance="other", sequence=row.value.sequence), row.revision)
        states = streams.states_table(bus, NAMESPACE)
        state = await states.get(buckets.state_key(name))
        assert state is not None
        await states.update(state.key, state.value.model_copy(update={"instance": "other"}), state.revision)

    on_bus(on, take)


# ---- calls ----------------------------------------------------------------------------------------------


def test_calls_are_handled_in_order_by_blocking_and_awaited_callers(shared: Env) -> None:
    ran: list[Any] = []
    served = Served(shared, "ordered", ran)
    pool = pool_of(shared, "ordered")
    assert [pool.call().add(number) for number in range(3)] == [1, 2, 3]
    futures = [pool.submit().add(number) for number in range(3, 60)]
    assert [future.result(TIMEOUT_S) for future in futures] == list(range(4, 61))
    assert list(pool.map().add([60, 61])) == [61, 62]

    async def add() -> int:
        asynchronous: AsyncActorPool[Any] = AsyncActorPool(pool.asynchronous.cluster, "ordered")
        result: int = await asynchronous.call().add(62)
        return result

    assert pool.portal.run(add) == 63
    assert pool.call().all() == list(range(63))
    assert ran == ["started", *range(63)]
    served.end()


def test_a_call_raises_what_its_method_raises_and_is_handled(shared: Env) -> None:
    served = Served(shared, "complaints", [])
    pool = pool_of(shared, "complaints")
    with pytest.raises(ValueError, match="as it pleases"):
        pool.call().complain()
    assert pool.call().add(1) == 1
    served.end()


def test_an_actor_that_would_wait_for_itself_is_told(shared: Env) -> None:
    @actor(durable=True)
    class Narcissus:
        def admire(self, ctx: ActorContext) -> str:
            pool: ActorPool[Any] = ActorPool(ctx.cluster, "narcissus", actor_class=Narcissus)
            pool.submit().fade()
            return str(pool.call().fade())

        def fade(self) -> str:
            return "faded"

    server = shared.serve("narcissus", Narcissus())
    pool: ActorPool[Any] = ActorPool(shared.cluster(), "narcissus")
    with pytest.raises(ActorDeadlockError, match="submit"):
        pool.call().admire()
    assert pool.call().fade() == "faded"
    server.shutdown()


def test_a_method_s_timeout_holds_for_who_does_not_know_the_class(shared: Env) -> None:
    gate = Gate()

    @actor(durable=True)
    class Slow:
        @method(timeout=0.05)
        def wait(self) -> str:
            return gate.wait()

    server = shared.serve("slow", Slow())
    with pytest.raises(ActorTimeoutError):
        shared.pool("slow").call().wait()
    gate.opened.set()
    server.shutdown()


@pytest.mark.parametrize("knows_the_class", [True, False])
def test_calls_wait_for_an_actor_that_is_away(shared: Env, knows_the_class: bool) -> None:
    name, ran = f"away-{knows_the_class}", list[Any]()
    Served(shared, name, ran).end()
    kind = Ledger if knows_the_class else None
    pool: ActorPool[Any] = ActorPool(shared.cluster(Role.CLIENT), name, actor_class=kind)
    futures = [pool.submit().add(number) for number in range(5)]
    served = Served(shared, name, ran)
    assert [future.result(TIMEOUT_S) for future in futures] == [1, 2, 3, 4, 5]
    assert ran == ["started", "started", *range(5)]
    served.end()


def test_a_pool_that_was_there_before_the_actor_stores_its_calls_too(shared: Env) -> None:
    pool: ActorPool[Any] = ActorPool(shared.cluster(Role.CLIENT), "later")
    assert pool.size == 0
    served = Served(shared, "later", [])
    pool.wait_for_size(1, TIMEOUT_S)
    assert pool.call().add(1) == 1
    (member,) = pool.members()
    assert member.is_durable
    served.end()


def test_a_call_is_not_run_after_its_deadline(shared: Env) -> None:
    ran: list[Any] = []
    Served(shared, "late", ran).end()
    pool = pool_of(shared, "late")
    with pytest.raises(ActorTimeoutError):
        pool.call(timeout=0.05).add("late")
    in_time = pool.submit().add("in time")
    served = Served(shared, "late", ran)
    assert in_time.result(TIMEOUT_S) == 1
    assert ran == ["started", "started", "in time"]
    served.end()


def wait_stored(pool: ActorPool[Any], calls: int) -> None:
    """Return when so many calls of the pool's client are stored, and not answered."""
    stored = caller_of(pool).stored
    wait_until(lambda: len(stored._out) == calls and stored._storing is None)  # noqa: SLF001 - a call that is stored and unanswered shows nowhere else


def change_stream(on: Env, **changes: Any) -> None:
    """Give the stream of calls other limits."""

    async def change(bus: Bus) -> None:
        config = (await bus.jetstream.stream_info(buckets.calls_stream(NAMESPACE))).config
        await bus.jetstream.update_stream(config.evolve(**changes))

    on_bus(on, change)


def test_a_call_that_comes_twice_under_one_id_is_run_once(env: Env) -> None:
    change_stream(env, duplicate_window=0.1)  # of which the server remembers nothing when it comes again
    ran: list[Any] = []
    served = Served(env, "twice", ran)
    pool = pool_of(env, "twice")
    assert pool.call().add("once") == 1

    async def send_again(bus: Bus) -> None:
        (entry,) = [each async for each in calls_feed(bus, NAMESPACE, "twice").stored()]
        call = StoredCall.of(entry)

        async def store() -> bool:
            return await store_call(bus, NAMESPACE, "twice", call.data, call_id=call.call_id, reply=call.reply)

        await wait_until_async(store, TIMEOUT_S)
        await wait_until_async(store, TIMEOUT_S)

    on_bus(env, send_again)
    assert pool.call().add("next") == 2
    served.end()
    again = Served(env, "twice", ran)
    assert pool.call().add("last") == 3
    assert ran == ["started", "once", "next", "restored", "started", "last"]
    again.end()


def test_a_message_that_is_no_call_is_passed_over(shared: Env) -> None:
    served = Served(shared, "garbled", [])
    pool = pool_of(shared, "garbled")

    async def send(bus: Bus) -> None:
        for number, data in enumerate((b"[1]", b"\x80nonsense", frames.encode_calls([]))):
            assert await store_call(bus, NAMESPACE, "garbled", data, call_id=f"garbled-{number}", reply="no.inbox")

    on_bus(shared, send)
    assert pool.call().add(1) == 1
    served.end()


def test_what_a_durable_actor_refuses(shared: Env) -> None:
    served = Served(shared, "refuses", [])
    pool = pool_of(shared, "refuses")
    with pytest.raises(TypeError, match="there is one of it"):
        pool.broadcast().all().results()
    with pytest.raises(MessageTooLargeError, match="pass its name"):
        pool.call().add(bytes(2 << 20))
    with pytest.raises(MessageTooLargeError, match="over the limit"):
        pool.call().save_too_much()
    with pytest.raises(TypeError, match="pickle"):
        pool.call().save_what_cannot_be()
    assert pool.call().add(1) == 1
    served.end()


def test_one_who_calls_it_directly_is_told(shared: Env) -> None:
    served = Served(shared, "direct", [])

    async def ask(bus: Bus) -> None:
        await bus.request(subjects.actor_any(NAMESPACE, "direct", "all"), b"[]")

    async def send_garbage(bus: Bus) -> None:
        answer = await bus.request(subjects.actor_any(NAMESPACE, "direct", "all"), b"\x80garbage")
        _endpoint_id, [(place, ok, _failure)] = frames.decode_replies(answer.data)
        assert (place, ok) == (0, False)

    with pytest.raises(ServiceError, match=r"direct is durable.*call it from Python"):
        on_bus(shared, ask, Role.OPERATOR)
    on_bus(shared, send_garbage, Role.OPERATOR)
    served.end()


def test_a_stream_that_is_full_refuses_calls(env: Env) -> None:
    Served(env, "full", []).end()

    change_stream(env, max_msgs_per_subject=2)
    pool = pool_of(env, "full")
    futures = [pool.submit().add(number) for number in range(3)]
    with pytest.raises(MailboxFullError, match="not stored"):
        futures[2].result(TIMEOUT_S)
    served = Served(env, "full", [])
    assert [future.result(TIMEOUT_S) for future in futures[:2]] == [1, 2]
    served.end()


def test_large_answers_arrive(shared: Env) -> None:
    served = Served(shared, "large", [])
    assert pool_of(shared, "large").call().make(1 << 20) == bytes(1 << 20)
    served.end()


# ---- state ----------------------------------------------------------------------------------------------


def test_state_goes_on_across_restarts(shared: Env) -> None:
    ran: list[Any] = []
    pool = pool_of(shared, "state")
    for number in range(3):
        served = Served(shared, "state", ran)
        assert pool.call().add(number) == number + 1
        served.end()
    assert ran == ["started", 0, "restored", "started", 1, "restored", "started", 2]


def test_an_instance_that_is_made_anew_is_restored(shared: Env) -> None:
    ran: list[Any] = []
    served = Served(shared, "anew", ran)
    pool = pool_of(shared, "anew")
    assert pool.call().add(1) == 1
    with pytest.raises(ActorFailedError):
        pool.call().fail()
    assert pool.call().all() == [1]
    assert ran == ["started", 1, "restored", "started"]
    served.end()


def test_asynchronous_methods_save_too(shared: Env) -> None:
    pool: ActorPool[Any] = ActorPool(shared.cluster(), "asynchronous", actor_class=AsyncLedger)
    for number in range(2):
        server = shared.serve("asynchronous", AsyncLedger())
        assert pool.call().add(number) == number + 1
        server.shutdown()


def test_a_call_that_saved_and_was_not_answered_is_told_and_not_run_again(shared: Env) -> None:
    ran, gate = list[Any](), Gate()
    served = Served(shared, "unanswered", ran, gate)
    pool = pool_of(shared, "unanswered")
    future = pool.submit().save_and_wait()
    gate.is_entered()
    stopped = threading.Thread(target=served.server.shutdown, args=(0.05,))
    stopped.start()
    stopped.join()
    again = Served(shared, "unanswered", ran, gate)
    with pytest.raises(Exception, match="not run again"):
        future.result(TIMEOUT_S)
    assert pool.call().all() == ["saved"]
    gate.opened.set()
    again.end()


def test_a_call_that_runs_when_its_server_ends_is_run_again_by_the_next(shared: Env) -> None:
    ran, gate = list[Any](), Gate()
    served = Served(shared, "again", ran, gate)
    pool = pool_of(shared, "again")
    future = pool.submit().wait()
    gate.is_entered()
    served.server.shutdown(0.05)
    again = Served(shared, "again", ran, gate)
    gate.is_entered()
    gate.opened.set()
    assert future.result(TIMEOUT_S) == "went through"
    assert ran == ["started", "waits", "started", "waits"]
    again.end()


def test_what_a_call_saves_that_its_server_does_not_wait_for_is_not_done_again(shared: Env) -> None:
    gate, saved = Gate(), threading.Event()

    @actor(durable=True)
    class Slow:
        def __init__(self) -> None:
            self.count = 0

        def on_restore(self, state: int) -> None:
            self.count = state

        def add(self, ctx: ActorContext) -> int:
            gate.wait()
            self.count += 1
            ctx.save(self.count)
            saved.set()
            return self.count

        def now(self) -> int:
            return self.count

        def on_stop(self) -> None:
            gate.opened.set()
            assert saved.wait(TIMEOUT_S)

    server = shared.serve("slow", Slow())
    pool: ActorPool[Any] = ActorPool(shared.cluster(), "slow", actor_class=Slow)
    future = pool.submit().add()
    gate.is_entered()
    server.shutdown(0.05)
    again = shared.serve("slow", Slow())
    with pytest.raises(Exception, match="not run again"):
        future.result(TIMEOUT_S)
    assert pool.call().now() == 1
    again.shutdown()


def test_a_superseded_instance_saves_nothing_and_answers_nothing(shared: Env) -> None:
    ran, gate = list[Any](), Gate()
    served = Served(shared, "superseded", ran, gate)
    pool = pool_of(shared, "superseded")
    assert pool.call().add(1) == 1
    future = pool.submit().wait()
    gate.is_entered()
    supersede(shared, "superseded")
    gate.opened.set()
    with pytest.raises(SupersededError, match="nothing was written"):
        served.server.serve()
    assert not future.done()
    again = Served(shared, "superseded", ran, gate)
    assert future.result(TIMEOUT_S) == "went through"
    again.end()


def test_saving_raises_in_a_superseded_instance(shared: Env) -> None:
    errors: list[Exception] = []

    @actor(durable=True)
    class Saver:
        def on_restore(self, state: object) -> None: ...

        def save(self, ctx: ActorContext) -> None:
            try:
                ctx.save("mine")
            except SupersededError as error:
                errors.append(error)

    server = shared.serve("saver", Saver())
    pool: ActorPool[Any] = ActorPool(shared.cluster(), "saver", actor_class=Saver)
    pool.call().save()
    supersede(shared, "saver")
    future = pool.submit().save()
    with pytest.raises(SupersededError):
        server.serve()
    assert len(errors) == 1
    assert not future.done()


def test_state_without_a_hook_to_take_it_is_told(shared: Env) -> None:
    @actor(durable=True)
    class Forgetful:
        def save(self, ctx: ActorContext) -> None:
            ctx.save(1)

    server = shared.serve("forgetful", Forgetful())
    pool: ActorPool[Any] = ActorPool(shared.cluster(), "forgetful", actor_class=Forgetful)
    with pytest.raises(TypeError, match="on_restore"):
        pool.call().save()
    server.shutdown()


def test_an_actor_that_is_not_durable_saves_nothing(shared: Env) -> None:
    class Plain:
        def save(self, ctx: ActorContext) -> None:
            ctx.save(1)

    shared.serve("plain", Plain())
    with pytest.raises(RuntimeError, match="durable=True"):
        shared.pool("plain").call().save()


def test_a_timer_may_save(shared: Env) -> None:
    saved = threading.Event()

    @actor(durable=True)
    class Ticker:
        def on_restore(self, state: int) -> None:
            self.restored = state

        @every(0.01)
        def tick(self, ctx: ActorContext) -> None:
            ctx.save(42)
            saved.set()

        def seen(self) -> int:
            return self.restored

    server = shared.serve("ticker", Ticker())
    assert saved.wait(TIMEOUT_S)
    server.shutdown()
    again = shared.serve("ticker", Ticker())
    pool: ActorPool[Any] = ActorPool(shared.cluster(), "ticker", actor_class=Ticker)
    assert pool.call().seen() == 42
    again.shutdown()


def test_what_a_timer_saves_forgets_no_call_that_saved_before(shared: Env) -> None:
    """Else a call that was not acknowledged when its server ended would be run again, on a state that has it in."""
    may_tick, ticked = threading.Event(), threading.Event()

    @actor(durable=True)
    class Ticker:
        def on_restore(self, state: object) -> None: ...

        def save(self, ctx: ActorContext) -> None:
            ctx.save("by the call")

        @every(0.01)
        def tick(self, ctx: ActorContext) -> None:
            if may_tick.is_set() and not ticked.is_set():
                ctx.save("by the timer")
                ticked.set()

    found: list[SavedState] = []

    async def look(bus: Bus) -> None:
        row = await streams.states_table(bus, NAMESPACE).get(buckets.state_key("saving-ticker"))
        assert row is not None
        found.append(row.value)

    server = shared.serve("saving-ticker", Ticker())
    pool: ActorPool[Any] = ActorPool(shared.cluster(), "saving-ticker", actor_class=Ticker)
    for _ in range(2):
        pool.call().save()
    on_bus(shared, look)
    may_tick.set()
    assert ticked.wait(TIMEOUT_S)
    on_bus(shared, look)
    by_call, by_timer = found
    assert by_timer.data != by_call.data
    assert by_timer.sequence == by_call.sequence > 0
    server.shutdown()


def test_a_write_whose_acknowledgement_was_lost_is_known_by_what_it_wrote(
    shared: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, ran = "unacknowledged-state", list[Any]()
    served = Served(shared, name, ran)
    pool = pool_of(shared, name)
    assert pool.call().add(1) == 1
    update = Table.update

    async def lose(self: Table[Any], key: str, value: Any, revision: int) -> int:
        written = await update(self, key, value, revision)
        if key != buckets.state_key(name):
            return written
        monkeypatch.setattr(Table, "update", update)
        raise DisconnectedError("the acknowledgement is lost")

    monkeypatch.setattr(Table, "update", lose)
    assert pool.submit().add(2).result(TIMEOUT_S) == 2
    assert pool.call().add(3) == 3
    assert ran == ["started", 1, 2, 3]
    served.end()


# ---- the stream -----------------------------------------------------------------------------------------


def test_calls_go_on_when_the_server_was_away(env: Env) -> None:
    served = Served(env, "restarted", [])
    pool = pool_of(env, "restarted")
    assert pool.call().add(1) == 1
    env.server.stop()
    env.server.start()
    wait_until(lambda: pool.asynchronous.cluster.bus.connected)
    assert pool.call().add(2) == 2
    served.end()


def test_a_call_whose_sending_was_lost_is_sent_again(env: Env) -> None:
    ran: list[Any] = []
    served, proxy = Served(env, "lost", ran), env.proxy()
    address = replace(env.cluster().asynchronous.bus.address, url=f"nats://127.0.0.1:{proxy.port}")
    with Cluster(address) as cluster:
        pool: ActorPool[Any] = ActorPool(cluster, "lost", actor_class=Ledger)
        assert pool.call().add(1) == 1
        env.portal.run(proxy.hold)
        futures = [pool.submit().add(number) for number in (2, 3)]
        env.portal.run(proxy.cut)
        env.portal.run(proxy.release)
        assert [future.result(TIMEOUT_S) for future in futures] == [2, 3]
    assert ran == ["started", 1, 2, 3]
    served.end()


@pytest.mark.parametrize("cut", [True, False])
def test_a_call_whose_acknowledgement_was_lost_is_run_once(
    shared: Env,
    monkeypatch: pytest.MonkeyPatch,
    cut: bool,
) -> None:
    name, ran, gate, tries = f"unacknowledged-{cut}", list[Any](), Gate(), list[bool]()
    served = Served(shared, name, ran, gate)
    pool = pool_of(shared, name)
    pool_of(shared, name).submit().wait()
    gate.is_entered()

    async def store(*args: Any, **more: Any) -> bool:
        tries.append(await store_call(*args, **more))
        if len(tries) == 1:
            if cut:
                caller_of(pool).stored.on_disconnected()
            raise DisconnectedError("the acknowledgement is lost")
        return tries[-1]

    monkeypatch.setattr(stored_calls, "store_call", store)
    future = pool.submit().add(1)
    wait_until(lambda: len(tries) == 2)
    if cut:  # the answer may have come meanwhile
        with pytest.raises(ConnectionLostError, match="it is run"):
            future.result(TIMEOUT_S)
    gate.opened.set()
    if not cut:
        assert future.result(TIMEOUT_S) == 1
    assert tries == [True, False]
    assert pool.call().add(2) == 2
    assert ran == ["started", "waits", 1, 2]
    served.end()


def test_a_call_that_cannot_be_stored_holds_up_no_other_beyond_its_deadline(
    shared: Env,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served, pool = Served(shared, "held-up", []), pool_of(shared, "held-up")
    assert pool.call().add(1) == 1
    answers = asyncio.Event()

    async def store(*args: Any, timeout_s: float, **more: Any) -> bool:
        if args[3].find(b"complain") < 0:
            return await store_call(*args, timeout_s=timeout_s, **more)
        try:
            await asyncio.wait_for(answers.wait(), timeout_s)
        except TimeoutError as error:
            raise RequestTimeoutError("nobody answered") from error
        raise AssertionError("nobody answers")

    monkeypatch.setattr(stored_calls, "store_call", store)
    refused, taken = pool.submit(timeout=0.2).complain(), pool.submit(timeout=TIMEOUT_S).add(2)
    with pytest.raises(ActorTimeoutError):
        refused.result(TIMEOUT_S)
    assert taken.result(TIMEOUT_S) == 2
    monkeypatch.setattr(stored_calls, "_STORE_TIMEOUT_S", 0.2)
    with pytest.raises(ConnectionLostError, match="is the server's disk full"):
        pool.call().complain()
    served.end()


def test_a_caller_that_was_cut_off_is_told_and_its_call_is_run(env: Env) -> None:
    ran, gate = list[Any](), Gate()
    served, proxy = Served(env, "cut-off", ran, gate), env.proxy()
    address = replace(env.cluster().asynchronous.bus.address, url=f"nats://127.0.0.1:{proxy.port}")
    with Cluster(address) as cluster:
        pool: ActorPool[Any] = ActorPool(cluster, "cut-off", actor_class=Ledger)
        running, behind = pool.submit().wait(), pool.submit().add(1)
        gate.is_entered()
        wait_stored(pool, 2)
        env.portal.run(proxy.cut)
        for future in (running, behind):
            with pytest.raises(ConnectionLostError, match="stored"):
                future.result(TIMEOUT_S)
        gate.opened.set()
        assert pool.call().all() == [1]
    served.end()


def purge_calls(on: Env, name: str, **which: int) -> None:
    """As `nats stream purge --subject` does it."""

    async def purge(bus: Bus) -> None:
        request = {"filter": subjects.durable_calls(NAMESPACE, name), **which}
        answer = await bus.request(
            server_subjects.stream_purge(buckets.calls_stream(NAMESPACE)), json.dumps(request).encode()
        )
        assert json.loads(answer.data)["success"]

    on_bus(on, purge, Role.OPERATOR)


def test_an_operator_removes_the_call_of_which_processes_die(shared: Env) -> None:
    ran, gate = list[Any](), Gate()
    served = Served(shared, "poisoned", ran, gate)
    pool = pool_of(shared, "poisoned")
    assert pool.call().add(1) == 1
    pool.submit().wait()
    behind = pool.submit().add(2)
    gate.is_entered()
    wait_stored(pool, 2)
    served.server.shutdown(0.05)
    sequences: list[int] = []

    async def look(bus: Bus) -> None:
        row = await streams.handled_table(bus, NAMESPACE).get(buckets.handled_key("poisoned"))
        assert row is not None
        question = {"seq": row.value.sequence + 1, "next_by_subj": subjects.durable_calls(NAMESPACE, "poisoned")}
        stream = server_subjects.direct_get(buckets.calls_stream(NAMESPACE))
        answer = await bus.request(stream, json.dumps(question).encode())
        assert answer.headers is not None
        sequences.append(int(answer.headers["Nats-Sequence"]))

    on_bus(shared, look, Role.OPERATOR)
    purge_calls(shared, "poisoned", seq=sequences[0] + 1)
    again = Served(shared, "poisoned", ran, gate)
    assert behind.result(TIMEOUT_S) == 2
    assert ran == ["started", 1, "waits", "restored", "started", 2]
    gate.opened.set()
    again.end()


def test_whom_an_operator_removed_leaves_nothing_to_the_next(shared: Env) -> None:
    served = Served(shared, "removed", [])
    pool = pool_of(shared, "removed")
    assert [pool.call().add(number) for number in range(3)] == [1, 2, 3]
    served.end()
    purge_calls(shared, "removed")

    async def remove(bus: Bus) -> None:
        await streams.handled_table(bus, NAMESPACE).delete(buckets.handled_key("removed"))
        await streams.states_table(bus, NAMESPACE).delete(buckets.state_key("removed"))
        await streams.seats_table(bus, NAMESPACE).delete(buckets.seat_key("removed"))

    on_bus(shared, remove, Role.OPERATOR)
    ran: list[Any] = []
    again = Served(shared, "removed", ran)
    assert pool.call().add(4) == 1
    assert ran == ["started", 4]
    again.end()


def test_calls_that_are_cancelled_or_whose_pool_is_closed_are_run(shared: Env) -> None:
    ran, gate = list[Any](), Gate()
    served = Served(shared, "left", ran, gate)
    pool = pool_of(shared, "left")
    running, cancelled, left = pool.submit().wait(), pool.submit().add(1), pool.submit().add(2)
    gate.is_entered()
    wait_stored(pool, 3)
    assert cancelled.cancel()
    pool.shutdown()
    for future in (running, left):
        with pytest.raises(ActorNotFoundError, match="shut down"):
            future.result(TIMEOUT_S)
    gate.opened.set()
    assert pool_of(shared, "left").call().all() == [1, 2]
    served.end()


def test_an_actor_that_is_given_up_leaves_its_calls_to_the_next(shared: Env) -> None:
    ran: list[Any] = []
    cluster = shared.cluster(Role.JOB)
    server = ActorServer(cluster)
    server.register("given-up", Ledger(ran))
    server.serve_background()
    pool = pool_of(shared, "given-up")
    failing, behind = pool.submit().fail(), pool.submit().add(1)
    with pytest.raises(ActorGivenUpError):
        server.serve()
    with pytest.raises(ActorFailedError):
        failing.result(TIMEOUT_S)
    served = Served(shared, "given-up", ran)
    assert behind.result(TIMEOUT_S) == 1
    assert ran == ["started", "started", 1]
    served.end()


def test_a_call_is_run_once_when_the_bus_is_away_as_it_ends(env: Env) -> None:
    ran, gate = list[Any](), Gate()
    served = Served(env, "ends-alone", ran, gate)
    pool = pool_of(env, "ends-alone")
    future = pool.submit().wait()
    gate.is_entered()
    env.server.stop()
    gate.opened.set()
    with pytest.raises(ConnectionLostError):
        future.result(TIMEOUT_S)
    env.server.start()
    wait_until(lambda: pool.asynchronous.cluster.bus.connected)
    assert pool.call().add(1) == 1
    assert ran == ["started", "waits", 1]
    served.end()


def test_memory_is_no_place_for_durable_actors() -> None:
    with LocalActors() as actors:
        with pytest.raises(TypeError, match="LocalCluster"):
            actors.deploy(Ledger, [])
        with pytest.raises(TypeError, match="LocalCluster"):
            actors.register("ledger", Ledger([]))
