"""How calls fail, and when: full mailboxes, what cannot be pickled."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from fluster.actors import AsyncActorPool, actor
from fluster.cluster import AsyncCluster
from fluster.errors import ActorNotFoundError, ActorTimeoutError, MailboxFullError, RemoteError
from fluster_bus.core.roles import Role
from tests.component.actor_env import TIMEOUT_S, Env, Gate
from tests.insides import caller_of
from tests.waiting import wait_until


@actor(mailbox_calls=3)
class Narrow(Gate):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def note(self, what: Any) -> None:
        self.seen.append(what)


class LockedError(Exception):
    """Cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Locked:
    def fail(self) -> None:
        raise LockedError("it holds a lock")


def test_an_exception_that_cannot_be_pickled_is_caught_by_its_own_class(shared: Env) -> None:
    shared.serve("locked", Locked())
    with pytest.raises(LockedError, match="it holds a lock") as caught:
        shared.pool("locked").call().fail()
    assert isinstance(caught.value, RemoteError)
    assert caught.value.type_name.endswith("LockedError")
    assert "in fail" in caught.value.traceback


def test_calls_wait_for_room_where_that_is_asked_for(shared: Env) -> None:
    narrow = Narrow()
    shared.serve("waits", narrow)
    pool = shared.pool("waits")
    first = pool.submit().wait()
    narrow.is_entered()
    notes = [pool.submit(wait=True).note(number) for number in range(500)]
    with pytest.raises(MailboxFullError):
        pool.call().note("at once")
    assert not any(note.done() for note in notes)
    narrow.opened.set()
    assert first.result(TIMEOUT_S) == "went through"
    for note in notes:
        note.result(TIMEOUT_S)
    assert sorted(narrow.seen) == list(range(500))


def test_the_room_that_other_clients_take_is_found_once_it_is_free(shared: Env) -> None:
    narrow = Narrow()
    shared.serve("others", narrow)
    theirs, ours = shared.pool("others"), shared.pool("others")
    filling = [theirs.submit().wait() for _ in range(3)]
    narrow.is_entered()
    with pytest.raises(MailboxFullError):
        theirs.call().note("at once")
    waits = ours.submit(wait=True).note("ours")
    with pytest.raises(MailboxFullError):
        ours.call().note("at once")
    narrow.opened.set()
    waits.result(TIMEOUT_S)
    assert [future.result(TIMEOUT_S) for future in filling] == ["went through"] * 3
    assert narrow.seen == ["ours"]


def test_a_call_waits_for_room_no_longer_than_its_deadline(shared: Env) -> None:
    narrow = Narrow()
    shared.serve("impatient", narrow)
    pool = shared.pool("impatient")
    filling = [pool.submit().wait() for _ in range(3)]
    narrow.is_entered()
    with pytest.raises(ActorTimeoutError):
        pool.call(wait=True, timeout=0.1).note("late")
    narrow.opened.set()
    assert [future.result(TIMEOUT_S) for future in filling] == ["went through"] * 3
    assert pool.call().note("then") is None
    assert narrow.seen == ["then"]


def test_a_call_that_waits_for_room_goes_to_whoever_has_some(shared: Env) -> None:
    narrow, free = Narrow(), Narrow()
    shared.serve("either", narrow)
    shared.serve("either", free)
    free.opened.set()
    pool = shared.pool("either", size=2)
    filling = [pool.submit().wait() for _ in range(6)]
    for future in filling[1::2]:
        future.result(TIMEOUT_S)
    for number in range(10):
        pool.call(wait=True, timeout=TIMEOUT_S).note(number)
    assert sorted(free.seen) == list(range(10))
    narrow.opened.set()
    for future in filling:
        future.result(TIMEOUT_S)


def test_a_pool_that_is_shut_down_ends_the_calls_that_wait_for_room(shared: Env) -> None:
    narrow = Narrow()
    shared.serve("shut", narrow)
    pool = shared.pool("shut")
    filling = [pool.submit().wait() for _ in range(3)]
    narrow.is_entered()
    waits = [pool.submit(wait=True).note(number) for number in range(5)]
    with pytest.raises(MailboxFullError):
        pool.call().note("at once")
    pool.shutdown()
    for future in (*waits, *filling):
        with pytest.raises(ActorNotFoundError, match="was shut down"):
            future.result(TIMEOUT_S)
    narrow.opened.set()


@pytest.mark.anyio
async def test_the_awaited_pool_waits_for_room_as_well(shared: Env) -> None:
    narrow = Narrow()
    narrow.opened.set()
    shared.serve("awaited-room", narrow)
    shared.pool("awaited-room")
    async with await AsyncCluster.connect(shared.server.credentials(Role.OPERATOR)) as cluster:
        pool: AsyncActorPool[Any] = AsyncActorPool(cluster, "awaited-room")
        for future in [pool.submit(wait=True).note(number) for number in range(100)]:
            await future
        with pytest.raises(TypeError, match="a broadcast does not wait for room"):
            pool.broadcast(wait=True).note(1)
    assert sorted(narrow.seen) == list(range(100))


@actor(mailbox_calls=1)
class Strait(Gate):
    def take(self, _payload: bytes) -> str:
        return self.wait()


def test_what_one_client_has_out_is_bounded_with_what_waits_for_room(
    shared: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fluster.actors.client.caller._MAX_BYTES_OUT", 1_000)
    strait = Strait()
    shared.serve("strait", strait)
    pool = shared.pool("strait")
    payload = bytes(400)
    futures = [pool.submit(wait=True).take(payload)]
    strait.is_entered()
    futures.append(pool.submit(wait=True).take(payload))  # is in the mailbox
    futures.append(pool.submit(wait=True).take(payload))  # waits for room in it
    router = caller_of(pool).router
    wait_until(lambda: (router.bytes_out > 800, router.bytes_turned_away > 400) == (True, True))
    with pytest.raises(MailboxFullError, match="of this client's calls are not answered yet"):
        pool.submit(wait=True).take(b"").result(TIMEOUT_S)
    strait.opened.set()
    assert [future.result(TIMEOUT_S) for future in futures] == ["went through"] * 3
    assert pool.submit(wait=True).take(b"").result(TIMEOUT_S) == "went through"
