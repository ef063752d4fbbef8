from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from fluster_bus.direct.waiting import EAGER_VARIABLE, Eagerness

LOOK_S = 2e-6


class Time:
    """Each look takes a moment."""

    def __init__(self) -> None:
        self.now = 0.0
        self.looks = 0

    def __call__(self) -> float:
        return self.now

    def found_after(self, looks: int | None, *, disturbed_at: int | None = None) -> Callable[[], list[str]]:
        self.looks = 0

        def found() -> list[str]:
            self.looks += 1
            self.now += 1e-3 if self.looks == disturbed_at else LOOK_S
            return ["it"] if looks is not None and self.looks > looks else []

        return found


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def eagerness(time: Time) -> Eagerness:
    return Eagerness(300e-6, time)


def rests(eagerness: Eagerness, time: Time) -> int:
    """How many waits sleep at once, before one looks, in vain."""
    count = 0
    while True:
        eagerness.look(time.found_after(None))
        if time.looks:
            return count
        count += 1


@pytest.mark.parametrize("looks", [0, 1, 100])
def test_what_comes_soon_is_found(eagerness: Eagerness, time: Time, looks: int) -> None:
    for _ in range(3):
        assert eagerness.look(time.found_after(looks)) == ["it"]
        assert time.looks == looks + 1


def test_what_takes_long_is_left_to_sleep(eagerness: Eagerness, time: Time) -> None:
    assert eagerness.look(time.found_after(10_000)) == []
    assert 100 < time.looks < 200


def test_it_rests_the_longer_the_less_it_finds(eagerness: Eagerness, time: Time) -> None:
    assert [rests(eagerness, time) for _ in range(9)] == [0, 1, 3, 7, 15, 31, 63, 63, 63]


def test_one_that_is_found_ends_all_rests(eagerness: Eagerness, time: Time) -> None:
    for _ in range(4):
        rests(eagerness, time)
    for _ in range(15):
        assert eagerness.look(time.found_after(0)) == []  # it rests
    assert eagerness.look(time.found_after(5)) == ["it"]
    assert [rests(eagerness, time) for _ in range(3)] == [0, 1, 3]


def test_it_stops_when_others_want_the_core(eagerness: Eagerness, time: Time) -> None:
    assert eagerness.look(time.found_after(50, disturbed_at=5)) == []
    assert time.looks == 5
    assert rests(eagerness, time) == 1


def test_the_environment_says_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1}, raising=False)
    monkeypatch.delenv(EAGER_VARIABLE, raising=False)
    assert Eagerness.of_this_process().for_s == pytest.approx(300e-6)
    monkeypatch.setenv(EAGER_VARIABLE, "50")
    assert Eagerness.of_this_process().for_s == pytest.approx(50e-6)
    monkeypatch.setenv(EAGER_VARIABLE, "0")
    assert Eagerness.of_this_process().look(lambda: ["it"]) == []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3}, raising=False)
    monkeypatch.setenv(EAGER_VARIABLE, "50")
    assert Eagerness.of_this_process().for_s == 0


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf", "2000000"])
def test_what_is_no_time_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(EAGER_VARIABLE, text)
    with pytest.raises(ValueError, match=f"{EAGER_VARIABLE}='{text}': give microseconds"):
        Eagerness.of_this_process()
