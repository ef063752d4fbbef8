from __future__ import annotations

import time

from fluster_bus.direct.waiting import PollInterval, Turns
from tests.waiting import wait_until


def test_intervals_get_longer_while_others_take_turns_and_are_short_again_at_once() -> None:
    interval = PollInterval(0.005, 0.04)
    assert [interval.next_s(0.001) for _ in range(5)] == [0.01, 0.02, 0.04, 0.04, 0.04]
    assert interval.shorten()  # it may be in a long one
    assert interval.next_s(0.001) == 0.005
    assert not interval.shorten()
    assert interval.next_s(0.001) == 0.005
    assert interval.next_s(0.001) == 0.01
    assert interval.next_s(0.012) == 0.005  # the turn was not given back meanwhile


def test_a_turn_is_unchanged_until_it_is_given_back() -> None:
    turns = Turns()
    began = time.monotonic()
    assert turns.ask(print)
    wait_until(lambda: turns.unchanged_s() > 0.01)
    turns.leave(print)
    turns.leave(print)  # by who does not have it: nothing changes
    assert turns.unchanged_s() < time.monotonic() - began - 0.009
