"""How many lines of one writer are shown."""

from __future__ import annotations

from fluster.cluster.jobs.screen import LineQuota


def test_the_first_lines_of_a_second_are_shown_and_the_others_counted() -> None:
    quota = LineQuota(3)
    assert [quota.admit(10.0 + 0.1 * number) for number in range(5)] == [True, True, True, False, False]
    assert quota.owes
    assert quota.settle(10.9) == 0  # more may be left out before the second is over
    assert quota.settle(11.0) == 2
    assert not quota.owes
    assert quota.settle(12.0) == 0


def test_each_second_has_its_own_lines() -> None:
    quota = LineQuota(2)
    assert [quota.admit(at) for at in (0.0, 0.5, 0.9, 1.0, 1.1, 1.2)] == [True, True, False, True, True, False]


def test_a_slow_writer_is_shown_whole() -> None:
    quota = LineQuota(100)
    assert all(quota.admit(0.01 * number) for number in range(1_000))
    assert not quota.owes
