"""Calls that the waiting threads carry themselves: that they do, and what becomes of them when something else happens."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self

import pytest

from fluster.actors import ActorPool, method
from fluster.cluster import Cluster
from fluster.errors import ActorDiedError, ActorNotFoundError, ActorTimeoutError, ConnectionLostError, NotRunError
from fluster_bus.core.errors import ClosedError
from fluster_bus.core.roles import Role
from tests.component.actor_env import TIMEOUT_S, Calculator, Env, Gate
from tests.insides import caller_of, mailbox_of
from tests.missed_signals import missed_ctrl_c
from tests.waiting import wait_until


class Both(Gate, Calculator):
    def __init__(self) -> None:
        Gate.__init__(self)
        Calculator.__init__(self)

    @method(timeout=0.05)
    def hurried(self) -> str:
        return self.wait()


class Via(NamedTuple):
    """What a thread calls that waits."""

    name: str
    of: Callable[[ActorPool[Any]], Any]


WAYS = [
    Via("pool", lambda pool: pool),
    Via("member", lambda pool: pool.to(pool.members()[0])),
    Via("key", lambda pool: pool.on("some key")),
]
each_way = pytest.mark.parametrize("via", WAYS, ids=[via.name for via in WAYS])


def carried(pool: ActorPool[Any]) -> dict[int, Any]:
    """The calls that are out on the lane."""
    lane = caller_of(pool).carried.lane
    return lane.out if lane is not None else {}


def press_ctrl_c() -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def may_be_offered(pool: ActorPool[Any]) -> bool:
    """Whether a broadcast may wait for the thread that submitted it."""
    caller = caller_of(pool)
    return caller.arrivals._alarm is not None and caller.carried.free_lane() is not None  # noqa: SLF001 - whether the caller sleeps decides which way a broadcast goes


def wait_until_out(pool: ActorPool[Any], count: int) -> None:
    wait_until(lambda: len(carried(pool)) + len(caller_of(pool).router.out()) == count)


def goes_through(pool: ActorPool[Any]) -> bool:
    try:
        return bool(pool.call(timeout=TIMEOUT_S).add(1) == 2)
    except ConnectionLostError:
        return False


def in_thread(call: Any) -> list[Any]:
    """What a call gives, once it has."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    threading.Thread(target=run, daemon=True).start()
    return found


def only(found: list[Any]) -> Any:
    return wait_until(lambda: list(found), TIMEOUT_S)[0]


@each_way
def test_a_call_that_is_alone_goes_over_the_lane_and_one_behind_others_does_not(shared: Env, via: Via) -> None:
    actor = Both()
    shared.serve(f"alone-{via.name}", actor)
    pool = shared.pool(f"alone-{via.name}")
    target = via.of(pool)
    wait_until(lambda: caller_of(pool).carried.lane.connected)  # type: ignore[union-attr]
    alone = in_thread(target.call().wait)
    actor.is_entered()
    assert len(carried(pool)) == 1
    actor.opened.set()
    assert only(alone) == "went through"
    assert not carried(pool)
    actor.opened.clear()
    before = pool.submit().wait()
    behind = in_thread(target.call().wait)
    actor.is_entered()
    wait_until_out(pool, 2)
    assert not carried(pool)
    actor.opened.set()
    assert before.result(TIMEOUT_S) == only(behind) == "went through"


@each_way
def test_calls_stay_in_order_whichever_way_they_go(shared: Env, via: Via) -> None:
    shared.serve(f"mixed-{via.name}", Calculator())
    pool = shared.pool(f"mixed-{via.name}")
    target = via.of(pool)
    for number in range(0, 600, 6):
        target.call().note(number)
        pool.submit().note(number + 1)
        pool.submit().note(number + 2)
        target.call().note(number + 3)
        pool.broadcast().note(number + 4)
        target.call().note(number + 5)
    assert target.call().notes() == list(range(600))


@each_way
def test_a_call_ends_at_its_deadline_whoever_reads(shared: Env, via: Via) -> None:
    actor = Both()
    shared.serve(f"late-{via.name}", actor)
    pool = shared.pool(f"late-{via.name}")
    target = via.of(pool)
    target.call().add(1)
    reader = in_thread(target.call().wait)
    actor.is_entered()
    with pytest.raises(ActorTimeoutError, match=rf"late-{via.name}\.add: no answer within 0\.05 s"):
        target.call(timeout=0.05).add(1)
    with pytest.raises(ActorTimeoutError, match=rf"late-{via.name}\.hurried: no answer within 0\.05 s"):
        target.call().hurried()
    actor.opened.set()
    assert only(reader) == "went through"
    assert target.call().add(1) == 2


def test_a_pool_made_while_the_last_of_its_name_is_being_given_up_keeps_its_calls(shared: Env) -> None:
    actor = Gate()
    shared.serve("given-up", actor)
    cluster = shared.cluster()
    first: ActorPool[Any] = ActorPool(cluster, "given-up")
    first.wait_for_size(1, TIMEOUT_S)
    caller = caller_of(first)
    wait_until(lambda: caller.carried.lane.connected)  # type: ignore[union-attr]
    is_held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        let_go.wait(TIMEOUT_S)

    cluster.portal.loop.call_soon_threadsafe(hold)
    assert is_held.wait(TIMEOUT_S)  # a loop that is busy comes to what follows in one go
    del first
    gc.collect()
    second: ActorPool[Any] = ActorPool(cluster, "given-up")
    found = in_thread(second.call().wait)
    wait_until(lambda: carried(second) or caller.is_sending)
    let_go.set()
    actor.is_entered()
    actor.opened.set()
    assert only(found) == "went through"


@each_way
def test_calls_end_with_their_actor_their_pool_and_their_client(shared: Env, via: Via) -> None:
    for end, error in (("actor", ActorDiedError), ("pool", ActorNotFoundError), ("client", ClosedError)):
        actor = Both()
        server = shared.serve(f"ends-{end}-{via.name}", actor)
        cluster = shared.cluster()
        pool: ActorPool[Any] = ActorPool(cluster, f"ends-{end}-{via.name}")
        pool.wait_for_size(1, TIMEOUT_S)
        target = via.of(pool)
        target.call().add(1)
        reader = in_thread(target.call().wait)
        actor.is_entered()
        waiting = [in_thread(target.call().wait) for _ in range(3)]
        mailbox = mailbox_of(server)
        wait_until(lambda mailbox=mailbox: len(mailbox) == 4)  # type: ignore[misc]  # otherwise they find no actor
        if end == "actor":
            server.shutdown(timeout=0.01)
        elif end == "pool":
            pool.shutdown()
        else:
            cluster.close()
        assert isinstance(only(reader), error)
        assert all(isinstance(only(each), error) for each in waiting)
        actor.opened.set()


@each_way
def test_what_an_actor_answered_before_it_ended_arrives(shared: Env, via: Via) -> None:
    for _ in range(10):
        actor = Both()
        server = shared.serve(f"answered-{via.name}", actor)
        pool = shared.pool(f"answered-{via.name}")
        target = via.of(pool)
        target.call().add(1)
        calls = [in_thread(target.call().wait) for _ in range(4)]
        actor.is_entered()
        mailbox = mailbox_of(server)
        wait_until(lambda mailbox=mailbox: len(mailbox) == 4)  # type: ignore[misc]
        ending = in_thread(server.shutdown)
        wait_until(lambda pool=pool: pool.size == 0)  # type: ignore[misc]
        actor.opened.set()
        assert [only(each) for each in calls] == ["went through"] * 4
        assert only(ending) is None


def test_a_call_to_an_actor_that_is_gone_goes_to_another(shared: Env) -> None:
    shared.serve("moves-on", Calculator(), Calculator())
    pool = shared.pool("moves-on", size=2)
    caller = caller_of(pool)
    member = pool.members()[0]
    gone = replace(member, address=f"{member.address}-gone")

    async def pretend() -> None:
        caller.router.on_member("moves-on", gone)

    targets: list[Any] = [pool, *map(pool.on, range(10))]
    for each in targets:  # some of which are the gone member's
        assert [each.call().add(number) for number in range(3)] == [1, 2, 3]
        pool.portal.run(pretend)
    with pytest.raises(NotRunError, match=f"{gone.endpoint_id} has ended; the call was not run"):
        pool.to(gone).call().add(1)
    assert pool.call().add(1) == 2


def test_a_call_to_one_member_is_alone_when_others_are_busy(shared: Env) -> None:
    actors = Both(), Both()
    shared.serve("neighbours", *actors)
    pool = shared.pool("neighbours", size=2)
    first, second = pool.members()
    assert pool.to(first).call().add(1) == 2
    busy = pool.to(first).submit().wait()
    wait_until(lambda: not caller_of(pool).is_sending)
    alone = in_thread(pool.to(second).call().wait)
    wait_until_out(pool, 2)
    assert len(carried(pool)) == 1
    for actor in actors:
        actor.opened.set()
    assert only(alone) == busy.result(TIMEOUT_S) == "went through"


@each_way
def test_a_lost_lane_ends_what_is_out_and_what_comes_after_is_sent(env: Env, via: Via) -> None:
    actor, proxy = Both(), env.proxy()
    env.serve(f"lost-lane-{via.name}", actor)
    address = replace(env.server.credentials(Role.OPERATOR), url=f"nats://127.0.0.1:{proxy.port}")
    with Cluster(address) as cluster:
        pool: ActorPool[Any] = ActorPool(cluster, f"lost-lane-{via.name}")
        pool.wait_for_size(1, TIMEOUT_S)
        target = via.of(pool)
        for _ in range(5):
            actor.opened.clear()
            calls = [in_thread(target.call().wait) for _ in range(3)]
            actor.is_entered()
            wait_until_out(pool, 3)
            env.portal.run(proxy.cut)
            assert all(isinstance(only(each), ConnectionLostError) for each in calls)
            actor.opened.set()
            wait_until(lambda: goes_through(pool))  # the client's other connection may be lost a moment later


class Voice(Both):
    def speak(self) -> int:
        raise ValueError("no voice")

    def count(self, end: int) -> Iterator[int]:
        yield from range(end)


def entered(*actors: Gate) -> None:
    for actor in actors:
        actor.is_entered()


@contextlib.contextmanager
def busy_loop(pool: ActorPool[Any]) -> Iterator[None]:
    """Meanwhile the client's loop comes to nothing."""
    caller = caller_of(pool)
    wait_until(lambda: caller.carried.lane is not None and caller.carried.lane.connected and not caller.is_sending)
    busy, free = threading.Event(), threading.Event()

    def hold() -> None:
        busy.set()
        free.wait(TIMEOUT_S)

    pool.portal.loop.call_soon_threadsafe(hold)
    assert busy.wait(TIMEOUT_S)
    try:
        yield
    finally:
        free.set()


def test_a_broadcast_whose_thread_waits_for_it_goes_over_the_lane(shared: Env) -> None:
    actors = Voice(), Voice(), Voice()
    shared.serve("choir", *actors)
    pool = shared.pool("choir", size=3)
    with busy_loop(pool):
        waiting = [in_thread(lambda: pool.broadcast().wait().results())]
        entered(*actors)
        assert [len(message.missing) for message in carried(pool).values()] == [3]
        waiting.append(in_thread(lambda: [each.value for each in pool.broadcast().wait().answers()]))
        wait_until(lambda: len(carried(pool)) == 2)
        waiting.append(in_thread(lambda: pool.broadcast().wait().results(timeout=TIMEOUT_S)))
        waiting.append(in_thread(lambda: [each.value for each in pool.broadcast().wait().answers(timeout=TIMEOUT_S)]))
        wait_until(lambda: len(carried(pool)) == 4)
    for actor in actors:
        actor.opened.set()
    assert [only(each) for each in waiting] == [["went through"] * 3] * 4
    assert not carried(pool)
    assert pool.broadcast().add(1).results() == [2, 2, 2]


def test_futures_of_a_broadcast_that_another_thread_waits_for_can_be_had_and_cancelled(shared: Env) -> None:
    actors = Voice(), Voice(), Voice()
    shared.serve("canon", *actors)
    pool = shared.pool("canon", size=3)
    for is_cancelled in (False, True):
        with busy_loop(pool):
            result = pool.broadcast().wait()
            waiting = in_thread(result.results)
            entered(*actors)
            assert len(carried(pool)) == 1
            futures = result.futures(TIMEOUT_S)
            assert not any(future.done() for future in futures)
        if is_cancelled:
            assert futures[1].cancel()
        for actor in actors:
            actor.opened.set()
        assert futures[0].result(TIMEOUT_S) == futures[2].result(TIMEOUT_S) == "went through"
        assert isinstance(only(waiting), CancelledError) if is_cancelled else only(waiting) == ["went through"] * 3
        wait_until(lambda: not carried(pool))
        for actor in actors:
            actor.opened.clear()


def test_a_broadcast_that_is_carried_ends_as_any_other(shared: Env) -> None:
    actors = Voice(), Voice()
    servers = [shared.serve("ends-of-all", actor) for actor in actors]
    pool = shared.pool("ends-of-all", size=2)
    with pytest.raises(ValueError, match="no voice"):
        pool.broadcast().speak().results()
    assert [type(each.error) for each in pool.broadcast().speak().answers()] == [ValueError] * 2
    assert [list(stream) for stream in pool.broadcast().count(3).results()] == [[0, 1, 2]] * 2
    with pytest.raises(ActorTimeoutError, match=r"ends-of-all\.wait: no answer within 2 s"):
        pool.broadcast(timeout=2.0).wait().results()  # they take it in that time
    entered(*actors)
    for actor in actors:
        actor.opened.set()
    assert pool.broadcast().add(1).results() == [2, 2]
    for actor in actors:
        actor.opened.clear()
    partly = in_thread(lambda: pool.broadcast().wait().answers())
    entered(*actors)
    servers[0].shutdown(timeout=0.01)
    actors[1].opened.set()
    ended = {type(each.error): each.value for each in only(partly)}
    assert ended == {ActorDiedError: None, type(None): "went through"}
    actors[0].opened.set()


def test_a_broadcast_that_is_carried_may_be_asked_again_after_its_time(shared: Env) -> None:
    actors = Voice(), Voice()
    shared.serve("patient-choir", *actors)
    pool = shared.pool("patient-choir", size=2)
    for timeout in (0.05, 0, -1):
        result = pool.broadcast().wait()
        with pytest.raises(ActorTimeoutError, match="not all members have answered"):
            result.results(timeout=timeout)
        entered(*actors)
        wait_until(lambda: not carried(pool))  # its thread has left: the answers are for the loop to read
        assert [type(each.error) for each in result.answers(timeout=0)] == [ActorTimeoutError] * 2
        for actor in actors:
            actor.opened.set()
        assert result.results(timeout=TIMEOUT_S) == ["went through"] * 2
        for actor in actors:
            actor.opened.clear()
    assert pool.broadcast().add(1).results(timeout=TIMEOUT_S) == [2, 2]


def test_broadcasts_stay_in_order_whoever_waits_for_them(shared: Env) -> None:
    shared.serve("mixed-choir", Calculator(), Calculator())
    pool = shared.pool("mixed-choir", size=2)
    for number in range(0, 500, 5):
        pool.broadcast().note(number).results()
        behind = pool.broadcast().note(number + 1)
        futures = [pool.to(member).submit().note(number + 2) for member in pool.members()]
        behind.results()
        last = pool.broadcast().note(number + 3)
        pool.broadcast().note(number + 4).results()
        last.results()
        assert [future.result(TIMEOUT_S) for future in futures] == [None, None]
    assert pool.broadcast().notes().results() == [list(range(500))] * 2


def test_a_broadcast_that_is_not_waited_for_is_sent_also_when_its_client_leaves_at_once(shared: Env) -> None:
    actor = Calculator()
    shared.serve("last-word", actor)
    for number in range(10):
        with Cluster(shared.server.credentials(Role.OPERATOR)) as cluster:
            pool = ActorPool[Any](cluster, "last-word")
            assert pool.call().add(1) == 2
            wait_until(partial(may_be_offered, pool))
            pool.broadcast().note(number)
    wait_until(lambda: actor.seen == list(range(10)))


def test_an_answer_is_sent_while_the_call_after_it_takes_long(shared: Env) -> None:
    actor = Both()
    shared.serve("short-and-long", actor)
    pool = shared.pool("short-and-long")
    for _ in range(3):
        for _ in range(200):  # so that the keeper of the actor's lane, which has to send it, takes long naps
            pool.call().add(1)
        short, long = pool.submit().add(1), pool.submit().wait()
        assert short.result(TIMEOUT_S) == 2
        actor.is_entered()
        assert not long.done()
        actor.opened.set()
        assert long.result(TIMEOUT_S) == "went through"
        actor.opened.clear()


def test_a_lost_lane_ends_a_broadcast_that_is_out(env: Env) -> None:
    actors, proxy = (Voice(), Voice()), env.proxy()
    env.serve("lost-choir", *actors)
    address = replace(env.server.credentials(Role.OPERATOR), url=f"nats://127.0.0.1:{proxy.port}")
    with Cluster(address) as cluster:
        pool: ActorPool[Any] = ActorPool(cluster, "lost-choir")
        pool.wait_for_size(2, TIMEOUT_S)
        out = in_thread(lambda: pool.broadcast().wait().answers())
        entered(*actors)
        env.portal.run(proxy.cut)
        assert [type(each.error) for each in only(out)] == [ConnectionLostError] * 2
        for actor in actors:
            actor.opened.set()
        wait_until(lambda: goes_through(pool))


@each_way
def test_ctrl_c_while_waiting_harms_no_other_call(shared: Env, via: Via) -> None:
    actor = Both()
    shared.serve(f"interrupted-{via.name}", actor)
    pool = shared.pool(f"interrupted-{via.name}")
    target = via.of(pool)
    target.call().add(1)

    def interrupt() -> None:
        actor.is_entered()
        press_ctrl_c()

    interrupted = in_thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        target.call().wait()
    assert only(interrupted) is None
    other = in_thread(lambda: target.call().add(2))
    actor.opened.set()
    assert only(other) == 3
    assert target.call().add(3) == 4


@each_way
def test_ctrl_c_just_before_the_wait_is_seen(shared: Env, via: Via) -> None:
    actor = Both()
    shared.serve(f"just-before-{via.name}", actor)
    pool = shared.pool(f"just-before-{via.name}")
    target = via.of(pool)
    assert target.call().add(1) == 2
    with pytest.raises(KeyboardInterrupt), missed_ctrl_c():
        target.call().wait()
    reader = in_thread(lambda: target.call().add(2))  # who reads now is not the main thread, which waits for its turn
    wait_until_out(pool, 2)
    with pytest.raises(KeyboardInterrupt), missed_ctrl_c():
        target.call().wait()
    actor.opened.set()
    assert only(reader) == 3
    assert target.call().add(3) == 4


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Ctrl-C that comes in the midst of a callback of the collector of garbage is lost, and a warning."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class CtrlC:
    """A handler that raises at most once each time that the block is entered, and never outside of it."""

    def __init__(self) -> None:
        self._armed = False
        self.count = 0

    def __call__(self, *_: object) -> None:
        if self._armed:
            self._armed = False
            self.count += 1
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        self._armed = True
        return self

    def __exit__(self, *_: object) -> None:
        self._armed = False


@pytest.fixture
def ctrl_c() -> Iterator[CtrlC]:
    handler = CtrlC()
    before = signal.signal(signal.SIGINT, handler)
    yield handler
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("no_collector")
def test_ctrl_c_at_any_moment_leaves_a_client_that_works(shared: Env, ctrl_c: CtrlC) -> None:
    shared.serve("any-moment", Calculator())
    pool = shared.pool("any-moment")
    stop = threading.Event()
    wrong: list[Any] = []

    def others() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            with contextlib.suppress(ConnectionLostError):  # the reader was stopped in the middle of a message
                if pool.call(timeout=TIMEOUT_S).add(number) != number + 1:
                    wrong.append(number)

    def interrupts() -> None:
        for _ in range(30):
            time.sleep(0.003)  # any moment of a call is meant
            press_ctrl_c()
        stop.set()

    threads = [threading.Thread(target=others) for _ in range(2)]
    for thread in threads:
        thread.start()
    interrupting = threading.Thread(target=interrupts)
    interrupting.start()
    while not stop.is_set():
        with contextlib.suppress(KeyboardInterrupt, ConnectionLostError), ctrl_c:
            while not stop.is_set():
                pool.call(timeout=TIMEOUT_S).add(1)
    interrupting.join()
    assert ctrl_c.count
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    assert wrong == []
    assert pool.call(timeout=TIMEOUT_S).add(1) == 2


def test_what_is_lent_is_carried_as_well(shared: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    shared.serve("lent", Calculator())
    pool = shared.pool("lent")
    wait_until(lambda: goes_through(pool) and caller_of(pool).carried.free_lane() is not None)
    monkeypatch.setattr(caller_of(pool).arrivals, "put", None)  # nothing goes the other way
    data = bytes(3_000_000)
    assert [pool.call().echo(data) == data for _ in range(5)] == [True] * 5


def test_calls_leave_nothing_to_the_collector(shared: Env) -> None:
    """What they carried would stay until it comes."""
    shared.serve("clean", Calculator())
    pool = shared.pool("clean")
    wait_until(lambda: goes_through(pool))
    gc.collect()
    gc.disable()
    try:
        for _ in range(50):
            pool.call().add(1)
            pool.call().echo(bytes(100_000))
            pool.broadcast().echo(1).results(TIMEOUT_S)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = {type(each).__name__ for each in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left & {"LaneFuture", "ActorFuture", "Call", "Lent"}, left
