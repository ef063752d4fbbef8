"""Who leads, by clocks that the test moves: each controller's its own, and none of them right."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster_bus.core.errors import RevisionConflictError
from fluster_bus.messages import Fence, Leader, Namespace
from fluster_bus.storage.leadership import RENEWALS_PER_LEASE, Leadership, LeadershipState
from fluster_bus.storage.tables import Row
from fluster_services.controller.leading import seat as seat_module
from fluster_services.controller.leading.seat import DeposedError, Seat
from tests.waiting import wait_until_async

LEASE_S = 6.0
FOLLOWER, CANDIDATE, LEADER, DEPOSED = (
    LeadershipState.FOLLOWER,
    LeadershipState.CANDIDATE,
    LeadershipState.LEADER,
    LeadershipState.DEPOSED,
)


def _mine(succeeds: str | None = None) -> Leadership:
    return Leadership(instance="mine", lease_s=LEASE_S, succeeds=succeeds)


def _their_write(leadership: Leadership, revision: int, now: float, controller_id: str = "c2") -> None:
    leadership.on_seat(revision, instance="theirs", holder=controller_id, now=now)


# ---- one controller's view --------------------------------------------------------------------------------


def test_nobody_tries_before_it_has_seen_the_seat() -> None:
    assert _mine().state(1e9) is FOLLOWER


@pytest.mark.parametrize("lease_s", [LEASE_S / 2, LEASE_S * 2])
def test_the_lease_that_the_holder_counts_on_is_waited_for(lease_s: float) -> None:
    mine = _mine()
    mine.on_seat(1, instance="theirs", holder="c2", now=100, lease_s=lease_s)
    assert mine.pause_s(100) == lease_s
    assert mine.state(100 + lease_s * 0.99) is FOLLOWER
    assert mine.state(100 + lease_s) is CANDIDATE


def test_a_free_seat_may_be_taken_at_once() -> None:
    mine = _mine()
    mine.on_free(0, now=100)
    assert (mine.state(100), mine.revision) == (CANDIDATE, 0)
    mine.on_written(1, sent_at=100)
    assert (mine.state(101), mine.revision) == (LEADER, 1)


def test_a_leader_that_is_silent_for_its_lease_is_followed() -> None:
    mine = _mine()
    _their_write(mine, 7, now=100)
    assert (mine.state(105.9), mine.pause_s(102)) == (FOLLOWER, 4)
    _their_write(mine, 8, now=105)
    assert (mine.state(110.9), mine.state(111), mine.revision) == (FOLLOWER, CANDIDATE, 8)


def test_what_is_seen_twice_or_late_is_no_sign_of_life() -> None:
    mine = _mine()
    _their_write(mine, 7, now=100)
    _their_write(mine, 7, now=105)
    _their_write(mine, 6, now=105)
    assert mine.state(106) is CANDIDATE


def test_all_have_their_whole_lease_after_an_interruption() -> None:
    mine = _mine()
    _their_write(mine, 7, now=100)
    mine.on_interruption(now=106)
    assert (mine.state(111.9), mine.state(112)) == (FOLLOWER, CANDIDATE)


def test_a_seat_that_is_given_back_may_be_taken_at_once() -> None:
    mine = _mine()
    _their_write(mine, 7, now=100)
    mine.on_free(8, now=101)
    assert (mine.state(101), mine.revision) == (CANDIDATE, 8)


def test_whoever_is_started_in_the_leaders_place_need_not_wait() -> None:
    mine, another = _mine(succeeds="c2"), _mine(succeeds="c3")
    for each in (mine, another):
        _their_write(each, 7, now=100)
    assert (mine.state(100), another.state(100)) == (CANDIDATE, FOLLOWER)


def test_a_leader_is_deposed_by_anothers_write_and_by_the_loss_of_its_own() -> None:
    for depose in (lambda each: _their_write(each, 9, now=103), lambda each: each.on_free(9, now=103)):
        mine = _mine()
        mine.on_free(0, now=100)
        mine.on_written(1, sent_at=100)
        depose(mine)
        assert (mine.state(103), mine.is_sure(103)) == (DEPOSED, False)
        mine.on_written(10, sent_at=104)  # a late acknowledgement does not bring it back
        assert mine.state(104) is DEPOSED


def test_a_write_whose_acknowledgement_was_lost_is_made_again_at_once() -> None:
    mine = _mine()
    mine.on_seat(5, instance="mine", holder="c1", now=100)
    assert (mine.state(100), mine.revision) == (CANDIDATE, 5)
    mine.on_written(6, sent_at=100)
    mine.on_seat(7, instance="mine", holder="c1", now=102)
    assert (mine.state(102), mine.revision) == (LEADER, 7)


def test_a_leader_counts_from_the_last_of_its_writes_also_when_it_hears_of_an_earlier_one_after_it() -> None:
    mine = _mine()
    assert not mine.is_sure(100), "it never wrote"
    mine.on_written(6, sent_at=102)
    mine.on_written(5, sent_at=100)
    assert (mine.state(102), mine.revision) == (LEADER, 6)
    assert (mine.is_sure(107.9), mine.is_sure(108)) == (True, False)


def test_a_leader_writes_several_times_in_a_lease_and_is_not_sure_beyond_it() -> None:
    mine = _mine()
    mine.on_free(0, now=100)
    mine.on_written(1, sent_at=100)
    assert mine.pause_s(100) == LEASE_S / RENEWALS_PER_LEASE
    assert (mine.pause_s(102), mine.is_sure(105.9), mine.is_sure(106)) == (0, True, False)
    assert mine.state(1000) is LEADER, "only another one's write deposes it"


@given(
    offset=st.floats(-1e6, 1e6),
    writes=st.lists(st.tuples(st.floats(0, 20), st.floats(0, 5)), min_size=1, max_size=20),
)
def test_a_leader_is_unsure_before_anybody_else_may_try(offset: float, writes: list[tuple[float, float]]) -> None:
    """Whatever the clocks show: each write is sent, and seen by the other some time later."""
    leader, other = _mine(), Leadership(instance="theirs", lease_s=LEASE_S)
    leader.on_free(0, now=0)
    now = 0.0
    for revision, (pause_s, delay_s) in enumerate(writes, start=1):
        now += pause_s
        if other.state(now + offset) is CANDIDATE:
            break
        leader.on_written(revision, sent_at=now)
        now += delay_s
        other.on_seat(revision, instance="mine", holder="c1", now=now + offset)
    waited = now + other.pause_s(now + offset) + 1e-6
    assert other.state(waited + offset + 1e-3) is CANDIDATE
    assert not leader.is_sure(waited + 1e-3)


# ---- several, that are stopped at any moment ---------------------------------------------------------------

SPACES = [Namespace("a"), Namespace("b")]


@dataclass
class Bucket:
    """A bucket with compare-and-set. Its user may be stopped before and after the server has carried it out."""

    dice: random.Random
    on_stored: Callable[[Any], None]
    revision: int = 0
    row: Row[Any] | None = None
    servers: int = 1  # that keep it

    async def copies(self) -> int:
        return self.servers

    async def be_stopped(self) -> None:
        for _ in range(self.dice.choice((0, 0, 1, 2, 5, 30))):
            await asyncio.sleep(0)

    async def get(self, _key: str) -> Row[Any] | None:
        await self.be_stopped()
        row = self.row
        await self.be_stopped()
        return row

    async def update(self, key: str, value: Any, revision: int) -> int:
        await self.be_stopped()
        if revision != (self.row.revision if self.row is not None else 0):
            await self.be_stopped()
            raise RevisionConflictError(key)
        self.revision += 1
        self.row = Row(key, value, self.revision)
        self.on_stored(value)
        stored = self.revision
        await self.be_stopped()
        return stored


@dataclass
class World:
    """Controllers that take the seat from each other, and what they decide meanwhile."""

    dice: random.Random
    now: int = 0  # by the server
    raised_at: dict[str, int] = field(default_factory=dict)  # {instance: when its last fence was stored}
    leaders: list[tuple[int, str]] = field(default_factory=list)  # since when which instance may decide
    verdicts: list[tuple[int, str]] = field(default_factory=list)
    void: int = 0

    def __post_init__(self) -> None:
        self.seat = Bucket(self.dice, lambda _value: None)
        self.fences = {namespace: Bucket(self.dice, self.on_fence) for namespace in SPACES}

    def on_fence(self, fence: Fence) -> None:
        self.now += 1
        self.raised_at[fence.instance] = self.now

    async def controller(self, number: int) -> None:
        """One that is impatient: its clock runs wild, so it tries for the seat at any time."""
        for _ in range(6):
            clock_s = self.dice.uniform(-1e6, 1e6)

            def clock() -> float:
                nonlocal clock_s
                clock_s += self.dice.choice((0.0, 0.5, 3.0, 10.0))
                return clock_s

            seat = seat_of(f"c{number}", self.seat, self.fences, clock=clock)
            instance = seat.me.instance
            seat.leadership.on_free(0, now=clock())
            try:
                for _ in range(self.dice.randrange(2, 12)):
                    await seat.look()
                    led = seat.leads
                    await seat.step()
                    if seat.leads and not led:
                        self.leaders.append((self.raised_at[instance], instance))
                    if seat.leads:
                        await self.decide(seat, instance)
            except DeposedError:
                continue

    async def decide(self, seat: Seat, instance: str) -> None:
        """Write a verdict, as late as it may come."""
        namespace = self.dice.choice(SPACES)
        guard = seat.guard(namespace)
        await self.seat.be_stopped()
        row = self.fences[namespace].row
        if row is None or row.revision != guard.revision:
            self.void += 1
            return
        self.now += 1
        self.verdicts.append((self.now, instance))

    def check(self) -> None:
        """The controller that began to lead last is the only one whose verdicts were taken from then on."""
        for at, instance in self.verdicts:
            assert max(each for each in self.leaders if each[0] < at)[1] == instance


_NO_BUS: Any = type("NoBus", (), {"spawn": None})()


def seat_of(name: str, leaders: Bucket, fences: Any, *, clock: Callable[[], float], lease_s: float = LEASE_S) -> Seat:
    return Seat(
        _NO_BUS,
        SPACES,
        controller_id=name,
        lease_s=lease_s,
        in_place=False,
        clock=clock,
        leaders=cast("Any", leaders),
        fences=fences,
    )


@pytest.mark.parametrize("seed", range(10))
def test_of_several_controllers_only_the_last_leader_can_decide(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seat_module, "_PAUSE_AFTER_CONFLICT_S", 0)
    verdicts = void = changes = 0
    for history in range(50):
        world = World(random.Random(1000 * seed + history))

        async def run(world: World = world) -> None:
            await asyncio.gather(*(world.controller(number) for number in range(3)))

        asyncio.run(run())
        world.check()
        verdicts, void, changes = verdicts + len(world.verdicts), void + world.void, changes + len(world.leaders)
    assert min(verdicts, void, changes) > 10, "the histories have become dull"


@dataclass
class Halting(Bucket):
    """One that keeps the first who reads it until told."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    may_go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def get(self, key: str) -> Row[Any] | None:
        if not self.reached.is_set():
            self.reached.set()
            await self.may_go_on.wait()
        return await super().get(key)


def test_a_controller_that_was_stopped_before_it_read_the_fences_raises_none() -> None:
    async def run() -> None:
        dice = random.Random(0)
        leaders, fences = Bucket(dice, lambda _value: None), Halting(dice, lambda _value: None)
        stopped, next_ = (
            seat_of(name, leaders, {SPACES[0]: fences}, clock=lambda: 0.0) for name in ("stopped", "next")
        )
        stopped.leadership.on_free(0, now=0)
        stepping = asyncio.create_task(stopped.step())
        await fences.reached.wait()
        assert leaders.row is not None
        next_.leadership.on_free(leaders.row.revision, now=0)
        await next_.step()
        assert next_.leads
        fences.may_go_on.set()
        await stepping
        assert not stopped.leads
        assert fences.row is not None
        assert fences.row.value.controller_id == "next", "its verdicts are taken, and no others"
        await next_.check_fence(SPACES[0])

    asyncio.run(run())


def test_a_machine_that_slept_gives_the_leader_its_whole_lease_and_then_takes_the_seat() -> None:
    async def run() -> None:
        began, slept_s, lease_s = time.monotonic(), 0.0, 0.3
        written: list[float] = []

        def clock() -> float:
            return time.monotonic() - began + slept_s

        leaders = Bucket(random.Random(0), lambda _value: written.append(clock()))
        seat = seat_of("me", leaders, {}, lease_s=lease_s, clock=clock)
        leaders.row, leaders.revision = Row("leader", Leader(controller_id="other", instance="o", since=0.0), 1), 1
        seat.leadership.on_seat(1, instance="o", holder="other", now=clock())
        keeping = asyncio.create_task(seat.keep())
        for _ in range(10):
            await asyncio.sleep(0)  # it waits for the end of the lease now
        slept_s = 1_000.0
        await wait_until_async(lambda: written or keeping.done())
        assert not keeping.done()
        keeping.cancel()
        assert written[0] >= slept_s + 1.9 * lease_s, "it slept through the first, and the leader has another"

    asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize(("is_own", "is_kept_once"), [(True, True), (True, False), (False, True)])
def test_a_leader_that_cannot_write_knows_by_reading_what_one_server_keeps(is_own: bool, is_kept_once: bool) -> None:
    leaders = Bucket(random.Random(0), lambda _value: None, servers=1 if is_kept_once else 3)
    now = 0.0
    seat = seat_of("me", leaders, {}, clock=lambda: now)
    seat.leadership.on_free(0, now=0)

    async def has_led() -> bool:
        nonlocal now
        await seat.step()
        assert seat.leads
        now = 10 * LEASE_S
        holder = seat.me if is_own else seat.me.model_copy(update={"instance": "another"})
        leaders.row = Row("leader", holder, 1)
        try:
            async with asyncio.timeout(2):
                await seat.wait_led_since()
        except TimeoutError:
            return False
        return True

    assert asyncio.run(has_led()) == (is_own and is_kept_once)
