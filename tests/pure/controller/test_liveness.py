"""Who lives, by a clock that the test moves."""

from hypothesis import given
from hypothesis import strategies as st

from fluster_bus.messages import Capacity, WorkerId
from fluster_services.controller.state.liveness import Liveness

W1, W2 = WorkerId("w1"), WorkerId("w2")
SOME, MORE = Capacity(cpu=1), Capacity(cpu=2)


def test_a_silent_worker_is_lost_once() -> None:
    liveness = Liveness(10)
    liveness.on_beat(W1, now=0, free=SOME)
    assert liveness.take_lost(now=9.9) == []
    assert liveness.next_deadline() == 10
    assert liveness.take_lost(now=10) == [W1]
    assert liveness.take_lost(now=11) == []
    assert not liveness.is_alive(W1)
    assert liveness.alive() == []


def test_a_worker_is_lost_only_when_it_missed_its_beats_too() -> None:
    """Time alone may have passed without a look."""
    liveness = Liveness(10, beats=3)
    liveness.on_beat(W1, now=0, free=SOME)
    assert liveness.take_lost(now=100) == []
    assert liveness.take_lost(now=101) == []
    assert liveness.take_lost(now=102) == [W1]
    liveness.on_beat(W1, now=103, free=SOME)
    assert [liveness.take_lost(now=now) for now in (104, 105, 106)] == [[], [], []]
    liveness.on_beat(W1, now=107, free=SOME)
    assert [liveness.take_lost(now=now) for now in (200, 201, 202)] == [[], [], [W1]]
    liveness.on_beat(W1, now=203, free=SOME)
    assert liveness.take_lost(now=204) == []
    liveness.on_interruption(now=210)
    assert [liveness.take_lost(now=now) for now in (221, 222, 223)] == [[], [], [W1]]


def test_a_worker_that_is_heard_again_lives() -> None:
    liveness = Liveness(10)
    liveness.on_beat(W1, now=0, free=SOME)
    liveness.take_lost(now=10)
    assert liveness.on_beat(W1, now=20, free=SOME)
    assert liveness.is_alive(W1)
    assert liveness.take_lost(now=30) == [W1]


def test_a_worker_that_missed_an_offer_says_by_its_next_beat_that_it_is_back() -> None:
    liveness = Liveness(10)
    liveness.on_missed_offer(W1)  # never heard: its first beat tells as it is
    assert liveness.on_beat(W1, now=0, free=SOME)
    assert not liveness.on_beat(W1, now=1, free=SOME)
    liveness.on_missed_offer(W1)
    assert liveness.on_beat(W1, now=2, free=SOME)
    assert not liveness.on_beat(W1, now=3, free=SOME)


def test_a_worker_that_registers_anew_has_its_full_time() -> None:
    """It may be offered tasks before its first beat is heard."""
    liveness = Liveness(10)
    liveness.on_beat(W1, now=0, free=SOME)
    liveness.take_lost(now=10)
    liveness.forget(W1)
    liveness.expect(W1, now=20)
    assert liveness.is_alive(W1)
    assert liveness.take_lost(now=29) == []
    assert liveness.take_lost(now=30) == [W1]


def test_a_worker_known_from_records_has_its_full_time_but_no_more() -> None:
    liveness = Liveness(10)
    liveness.expect(W1, now=5)
    liveness.expect(W1, now=9)
    assert liveness.take_lost(now=14.9) == []
    assert liveness.take_lost(now=15) == [W1]
    liveness.expect(W1, now=16)
    assert not liveness.is_alive(W1)


def test_more_room_is_noticed() -> None:
    liveness = Liveness(10)
    assert liveness.on_beat(W1, now=0, free=SOME)
    assert not liveness.on_beat(W1, now=1, free=SOME)
    assert liveness.on_beat(W1, now=2, free=MORE)
    assert not liveness.on_beat(W1, now=3, free=SOME)
    assert liveness.on_beat(W1, now=4, free=Capacity(cpu=0.5, memory=1))
    assert liveness.free(W1) == Capacity(cpu=0.5, memory=1)
    assert liveness.free(W2) == Capacity()
    assert not liveness.on_beat(W1, now=5, free=Capacity(tasks=0))
    assert liveness.on_beat(W1, now=6, free=Capacity(tasks=1)), "it was full, whatever room it had"
    assert not liveness.on_beat(W1, now=7, free=Capacity(tasks=1))
    assert not liveness.on_beat(W1, now=8, free=Capacity()), "without a bound there is no more than before"
    assert not liveness.on_beat(W1, now=9, free=Capacity(tasks=1))
    gpu = Capacity(device="gpu", devices=1)
    licence = Capacity(resources=(("licence", 1.0),))
    for number, more in enumerate((Capacity(cpu=1), Capacity(memory=1), Capacity(disk=1), gpu, licence)):
        liveness.on_beat(W1, now=10 + number, free=Capacity())
        assert liveness.on_beat(W1, now=10 + number, free=more), more


def test_an_interruption_gives_the_living_their_full_time_again() -> None:
    liveness = Liveness(10)
    liveness.on_beat(W1, now=0, free=SOME)
    liveness.on_beat(W2, now=5, free=SOME)
    assert liveness.take_lost(now=10) == [W1]
    liveness.on_interruption(now=14)
    assert liveness.take_lost(now=23.9) == []
    assert liveness.take_lost(now=24) == [W2]
    assert liveness.silent_for_s(W2, now=24) == 10


@given(
    st.lists(st.tuples(st.sampled_from(["beat", "expect", "interruption", "sweep"]), st.integers(0, 12)), max_size=60)
)
def test_nobody_is_lost_who_was_heard_in_time(history: list[tuple[str, int]]) -> None:
    liveness, now, last, lost = Liveness(10), 0.0, None, False
    for event, wait in history:
        now += wait
        if event == "beat":
            liveness.on_beat(W1, now=now, free=SOME)
            last, lost = now, False
        elif event == "expect":
            liveness.expect(W1, now=now)
            last = now if last is None else last
        elif event == "interruption":
            liveness.on_interruption(now=now)
            last = now if last is not None and not lost else last
        else:
            due = last is not None and not lost and now - last >= 10
            assert liveness.take_lost(now=now) == ([W1] if due else [])
            lost = lost or due
        assert liveness.is_alive(W1) == (last is not None and not lost)


def test_the_forgotten_are_not_missed() -> None:
    liveness = Liveness(10)
    liveness.on_beat(W1, now=0, free=SOME)
    liveness.forget(W1)
    assert liveness.take_lost(now=100) == []
    assert liveness.next_deadline() is None


def test_a_worker_that_needs_longer_to_end_what_it_runs_has_longer() -> None:
    """Its settings are read on its machine, and may differ from the controller's."""
    liveness = Liveness(10)
    liveness.expect(W1, now=0, timeout_s=30)
    liveness.expect(W2, now=0, timeout_s=5)
    liveness.on_beat(W1, now=1, free=SOME)
    assert liveness.next_deadline() == 10
    assert liveness.take_lost(now=10) == [W2]
    assert liveness.take_lost(now=30.9) == []
    assert liveness.take_lost(now=31) == [W1]
    assert (liveness.timeout_s(W1), liveness.timeout_s(W2)) == (30, 10)
