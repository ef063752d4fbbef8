"""When a connection counts as dead, and that one's own delays do not count."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster_bus.direct.pulse import SERVER_PINGS, PingTiming, Pulse

TIMING = PingTiming(5.0, 2)


def test_two_pings_in_silence_and_it_is_dead() -> None:
    pulse = Pulse(TIMING, 0.0)
    assert not pulse.is_dead(5.0, heard=True)  # the ping goes out
    assert not pulse.is_dead(10.0, heard=False)
    assert pulse.is_dead(15.0, heard=False)
    assert pulse.silent_s == 10.0


@given(st.lists(st.tuples(st.floats(0.0, 60.0), st.booleans()), max_size=50))
def test_only_looks_in_time_count(looks: list[tuple[float, bool]]) -> None:
    pulse, silent = Pulse(TIMING, 0.0), 0
    for late_s, heard in looks:
        if heard:
            silent = 0
        elif late_s <= TIMING.interval_s:
            silent += 1
        assert pulse.is_dead(pulse.due + late_s, heard=heard) == (silent >= TIMING.unanswered)


def test_the_server_bears_longer_silence_than_a_held_lock() -> None:
    words = dict(line.split(": ") for line in SERVER_PINGS.splitlines())
    assert float(words["ping_interval"].strip('"s')) * int(words["ping_max"]) >= 30


@pytest.mark.parametrize(("interval", "unanswered"), [("0", "2"), ("no", "2"), ("5", "0"), ("5", "1.5"), ("nan", "2")])
def test_settings_that_cannot_be_used_are_told(monkeypatch: pytest.MonkeyPatch, interval: str, unanswered: str) -> None:
    monkeypatch.setenv("FLUSTER_PING_INTERVAL_S", interval)
    monkeypatch.setenv("FLUSTER_PINGS_UNANSWERED", unanswered)
    with pytest.raises(ValueError, match=r"FLUSTER_PING_INTERVAL_S.*give seconds"):
        PingTiming.of_this_process()


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PingTiming.of_this_process() == PingTiming(5.0, 2)
    monkeypatch.setenv("FLUSTER_PING_INTERVAL_S", "1.5")
    monkeypatch.setenv("FLUSTER_PINGS_UNANSWERED", "4")
    assert PingTiming.of_this_process() == PingTiming(1.5, 4)
