"""What a worker has given away: never more than there is, and all of it comes back."""

from hypothesis import given
from hypothesis import strategies as st

from fluster_bus.messages import Capacity, Heartbeat, Namespace, ResourceConfig, WorkerId
from fluster_bus.messages.parts.resources import GIB
from fluster_services.capacity import classes_covered, fits, needed
from fluster_services.worker.attempts.ledger import Ledger

TOTAL = Capacity(
    cpu=4, memory=1000, disk=100, device="gpu", variant="h100", devices=2, resources=(("license", 3.0), ("slot", 0.5))
)

needs = st.builds(
    Capacity,
    cpu=st.integers(0, 5000).map(lambda milli: milli / 1000),
    memory=st.integers(0, 1100),
    disk=st.integers(0, 110),
    device=st.just("gpu"),
    variant=st.sampled_from(["h100", "any", "a100"]),
    devices=st.integers(0, 3),
    resources=st.dictionaries(
        st.sampled_from(["license", "slot", "other"]),
        st.integers(1, 35_000).map(lambda each: each / 10_000),
        max_size=2,
    ),
)
steps = st.lists(st.tuples(st.sampled_from(["reserve", "release", "hold"]), st.sampled_from("abcdef"), needs))


@given(steps)
def test_books_of_random_days(history: list[tuple[str, str, Capacity]]) -> None:
    ledger, has = Ledger(TOTAL), dict[str, Capacity]()
    for step, attempt, need in history:
        before = ledger.free
        if step == "reserve":
            if ledger.reserve(attempt, need):
                assert attempt not in has
                assert fits(need, before)
                has[attempt] = need
            else:
                assert ledger.free == before
        elif step == "release":
            assert ledger.release(attempt) == (has.pop(attempt, None) is not None)
        elif attempt not in has:
            ledger.hold(attempt, need)
            has[attempt] = need
        assert (attempt in ledger) == (attempt in has)
        assert ledger.free.cpu == max(0, round(TOTAL.cpu - sum(each.cpu for each in has.values()), 3))
        assert ledger.free.memory == max(0, TOTAL.memory - sum(each.memory for each in has.values()))
        for name in ("license", "slot", "other"):
            taken = sum(dict(each.resources).get(name, 0) for each in has.values())
            left = max(0, round(dict(TOTAL.resources).get(name, 0) - taken, 4))
            assert dict(ledger.free.resources).get(name, 0) == left
        assert Capacity.from_json(ledger.free.to_json()) == ledger.free
        assert ledger.free.devices == max(0, TOTAL.devices - sum(each.devices for each in has.values()))
    for attempt in list(has):
        ledger.release(attempt)
    assert ledger.free == TOTAL


def test_a_worker_that_adopts_more_than_it_has_can_still_say_so() -> None:
    """It came back with less capacity than it had: it is full, and its heartbeats are valid."""
    ledger = Ledger(Capacity(cpu=1, memory=100))
    ledger.hold("a", Capacity(cpu=4, memory=400))
    beat = Heartbeat(worker_id=WorkerId("w"), free=ledger.free)
    assert Heartbeat.from_json(beat.to_json()).free == Capacity(cpu=0, memory=0)
    assert not ledger.reserve("b", Capacity(cpu=0.001))
    ledger.release("a")
    assert ledger.free == ledger.total


def test_it_has_no_more_tasks_at_once_than_it_may_however_small_they_are() -> None:
    ledger = Ledger(Capacity(cpu=4, memory=GIB, tasks=2, namespaces=(Namespace("default"),)))
    need = needed(ResourceConfig.with_cpu(0, memory=0))
    assert ledger.reserve("a", need)
    assert classes_covered(ledger.free)
    assert ledger.reserve("b", need)
    assert not ledger.reserve("c", need)
    assert ledger.why_full(need) == "no room: it has 2 tasks, and may have 2 at once"
    assert classes_covered(ledger.free) == frozenset()
    ledger.hold("adopted", need)
    assert Heartbeat.from_json(Heartbeat(worker_id=WorkerId("w"), free=ledger.free).to_json()).free.tasks == 0
    ledger.release("adopted")
    ledger.release("a")
    assert ledger.reserve("c", need)


def test_an_attempt_has_one_reservation() -> None:
    ledger = Ledger(TOTAL)
    assert ledger.reserve("a", Capacity(cpu=1))
    assert not ledger.reserve("a", Capacity(cpu=1))
    assert ledger.free.cpu == 3


def test_room_that_is_kept_is_that_attempts_alone() -> None:
    ledger, need = Ledger(Capacity(cpu=4, device="gpu", variant="h100", devices=2)), Capacity(cpu=3)
    assert ledger.reserve("kept", need)
    assert not ledger.reserve("other", need)
    assert not ledger.reserve("first", Capacity(cpu=5), instead_of="kept")
    assert "kept" in ledger, "what did not get its room has not lost it"
    assert ledger.reserve("first", need, instead_of="kept")
    assert (list(ledger.attempts()), ledger.free.cpu) == (["first"], 1)
    assert not ledger.reserve("first", need, instead_of="kept")
    assert ledger.reserve("second", Capacity(cpu=1), instead_of="kept"), "nothing need be kept"
    assert not ledger.release("kept")


def test_each_attempt_has_devices_of_its_own() -> None:
    ledger = Ledger(Capacity(cpu=8, device="gpu", variant="h100", devices=4), ("2", "3", "5", "7"))
    one, two = Capacity(device="gpu", variant="h100", devices=1), Capacity(device="gpu", variant="h100", devices=2)
    assert ledger.reserve("a", one)
    assert ledger.reserve("b", two)
    assert ledger.reserve("none", Capacity(cpu=1))
    assert [ledger.devices(name) for name in ("a", "b", "none", "c")] == [("2",), ("3", "5"), (), ()]
    ledger.release("a")
    ledger.hold("adopted", one, ("7",))
    assert ledger.reserve("c", one)
    assert ledger.devices("c") == ("2",)
    assert not ledger.reserve("d", one)
    for name in ("b", "c", "adopted"):
        ledger.release(name)
    assert ledger.reserve("all", two.model_copy(update={"devices": 4}))
    assert ledger.devices("all") == ("2", "3", "5", "7")
