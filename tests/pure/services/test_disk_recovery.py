"""When a server whose disk was full is started anew."""

from fluster_services.supervisor import DiskRecovery


def test_one_that_always_has_room_is_left_alone() -> None:
    recovery = DiskRecovery()
    assert not any(recovery.observe(free) for free in (1 << 40, 33 << 20, 20 << 20, 9 << 20, 33 << 20, 1 << 40))


def test_one_that_had_none_is_started_anew_once_there_is_enough() -> None:
    recovery = DiskRecovery()
    assert not any(recovery.observe(free) for free in (1 << 40, 0, 31 << 20, 1 << 20))
    assert [recovery.observe(free) for free in (32 << 20, 1 << 40)] == [True, False]
    assert [recovery.observe(free) for free in (7 << 20, 1 << 40)] == [False, True]
