"""When a worker takes itself out, when it comes back, and who is charged for a disk that is full."""

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster_services.config import DiskLimits
from fluster_services.worker.contract.faults import (
    LaunchError,
    WorkerFaultError,
    is_no_room,
    is_scarce,
    is_workers_fault,
)
from fluster_services.worker.presence.health import DiskFiller, DiskUse, Health, MachineCheck, who_filled

GIB = 1 << 30
WELL = MachineCheck("/state", free_bytes=GIB)
LIMITS = DiskLimits()
FULL = MachineCheck("/state", free_bytes=LIMITS.least_free_bytes - 1)


def test_a_full_disk_takes_it_out_until_there_is_clearly_room_again() -> None:
    health = Health(LIMITS)
    health.on_check(WELL, now=0.0)
    assert health.trouble is None
    health.on_check(FULL, now=5.0)
    assert health.trouble == "its disk has no room: less than 64 MiB are left at /state"
    health.on_check(MachineCheck("/state", free_bytes=LIMITS.least_free_bytes + 1), now=10.0)
    assert health.trouble == "its disk has no room: less than 64 MiB are left at /state"
    health.on_check(MachineCheck("/state", free_bytes=2 * LIMITS.least_free_bytes), now=15.0)
    assert health.trouble is None


def test_it_goes_by_the_room_that_its_operator_says() -> None:
    health = Health(DiskLimits(least_free_bytes=GIB))
    for free, trouble in [
        (GIB, None),
        (GIB - 1, "its disk has no room: less than 2 GiB are left at /state"),
        (2 * GIB - 1, "its disk has no room: less than 2 GiB are left at /state"),
        (2 * GIB, None),
    ]:
        check = MachineCheck("/state", free_bytes=free)
        health.on_check(check, now=0.0)
        assert (health.trouble, health.has_no_room(check)) == (trouble, free < 2 * GIB)


@pytest.mark.parametrize(
    ("check", "trouble"),
    [
        (
            MachineCheck("/state", GIB, unwritable="Read-only file system"),
            "its disk cannot be written to at /state: Read-only file system",
        ),
        (MachineCheck("/state", GIB, trouble="its template is gone"), "its template is gone"),
    ],
)
def test_whatever_else_a_look_finds_takes_it_out_too(check: MachineCheck, trouble: str) -> None:
    health = Health(LIMITS)
    health.on_check(check, now=0.0)
    assert health.trouble == trouble
    health.on_check(WELL, now=1.0)
    assert health.trouble is None


def test_a_fault_that_no_look_finds_comes_back_after_longer_and_longer_pauses() -> None:
    health, now, pauses = Health(LIMITS), 1000.0, []
    for _ in range(8):
        health.on_fault("no process can be made", now=now)
        health.on_fault("no process can be made", now=now)  # of another task at the same moment
        began_at = now
        while health.trouble is not None:
            now += health.pause_s(now=now, interval_s=5.0)
            health.on_check(WELL, now=now)
        pauses.append(now - began_at)
    assert pauses == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60])
    now += 200
    health.on_fault("no process can be made", now=now)
    health.on_check(WELL, now=now + 1)
    assert health.trouble is None


@given(st.lists(st.tuples(st.sampled_from(["fault", "well", "full"]), st.floats(0, 100)), max_size=50))
def test_it_never_stays_out_when_looks_find_nothing_for_a_minute(steps: list[tuple[str, float]]) -> None:
    health, now = Health(LIMITS), 0.0
    for step, pause_s in steps:
        now += pause_s
        if step == "fault":
            health.on_fault("something", now=now)
            assert health.trouble is not None
        else:
            health.on_check(WELL if step == "well" else FULL, now=now)
    health.on_check(WELL, now=now + 60)
    assert health.trouble is None


def _caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


NO_ROOM = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "is_fault", "is_room"),
    [
        (NO_ROOM, True, True),
        (_caused(LaunchError("cannot be written"), NO_ROOM), True, True),
        (LaunchError("`uv pip install` failed:\nerror: No space left on device (os error 28)"), True, True),
        (OSError(errno.EAGAIN, "Resource temporarily unavailable"), True, False),
        (WorkerFaultError("no keeper could be started"), True, False),
        (LaunchError("image='x' needs a worker that runs jobs in containers"), False, False),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), False, False),
    ],
)
def test_whose_fault_a_failure_is(error: Exception, is_fault: bool, is_room: bool) -> None:
    assert (is_workers_fault(error), is_no_room(error)) == (is_fault, is_room)


@pytest.mark.parametrize(
    ("free", "total", "expected"),
    [
        (10 * GIB - 1, 100 * GIB, True),
        (10 * GIB, 100 * GIB, False),
        (32 * GIB - 1, 10_000 * GIB, True),
        (32 * GIB, 10_000 * GIB, False),  # what does not fit there is large
        (0, 0, False),  # of a file system that does not say
    ],
)
def test_a_disk_with_less_than_a_tenth_left_may_lack_room_for_what_is_usual(
    free: int, total: int, expected: bool
) -> None:
    assert is_scarce(free=free, total=total) is expected


def test_the_task_that_took_more_than_half_of_what_went_filled_the_disk() -> None:
    well = DiskUse(free=10 * GIB, sizes={"a": 2 * GIB, "b": 0})
    assert who_filled(well, DiskUse(0, {"a": 3 * GIB, "b": 6 * GIB})) == DiskFiller("b", 6 * GIB, 10 * GIB)
    assert who_filled(well, DiskUse(0, {"a": 3 * GIB, "new": 8 * GIB})) == DiskFiller("new", 8 * GIB, 10 * GIB)
    assert who_filled(well, DiskUse(0, {"a": 5 * GIB, "b": 5 * GIB})) is None  # half is not more than half
    assert who_filled(well, DiskUse(0, {"a": 9 * GIB})) == DiskFiller("a", 7 * GIB, 10 * GIB)
    assert who_filled(well, DiskUse(0, {"a": 4 * GIB})) is None  # a program other than a task did
    assert who_filled(well, DiskUse(0, {})) is None
    assert who_filled(well, DiskUse(11 * GIB, {"a": 9 * GIB})) is None  # nothing went
