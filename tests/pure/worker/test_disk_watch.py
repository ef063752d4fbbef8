"""When a task has more on disk than it asked for, and what its end is called then."""

import time
from pathlib import Path

import pytest

from fluster_bus.messages import JobStatus
from fluster_services.worker.contract.attempt_records import ExitRecord, LaunchSpec
from fluster_services.worker.contract.outcome import outcome
from fluster_services.worker.keeper.bounds import INTERVAL_S, DiskWatch, why_over
from fluster_services.worker.linux.scratch import IMAGE_FILE
from fluster_services.worker.linux.timers import Timers

MIB = 1 << 20


@pytest.mark.parametrize(("size", "limit"), [(1 << 40, None), (1 << 40, 0), (16 * MIB, 16 * MIB), (0, 1)])
def test_who_asked_for_none_or_keeps_to_it_goes_on(size: int, limit: int | None) -> None:
    assert why_over(size, limit) is None


def looked_at(folder: Path, spec: LaunchSpec) -> list[str]:
    """What is said of a folder in one look."""
    timers, told = Timers(), list[str]()
    DiskWatch(timers, folder, spec, told.append)
    timers.fire(time.monotonic() + INTERVAL_S)
    while (at := timers.first_at()) is not None and at < time.monotonic() + INTERVAL_S / 2:  # it measures on
        timers.fire(at)
    return told


def test_a_folder_with_many_files_is_measured_bit_by_bit_and_told_once(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"folder {number % 7}").mkdir(exist_ok=True)
        (tmp_path / f"folder {number % 7}" / f"{number}").write_bytes(bytes(4096))
    (tmp_path / "another name").hardlink_to(tmp_path / "folder 0" / "0")
    assert looked_at(tmp_path, LaunchSpec("key", ["true"], disk=2 * MIB)) == []
    (told,) = looked_at(tmp_path, LaunchSpec("key", ["true"], disk=MIB))
    assert told.startswith("over its disk limit of 1 MiB: its own folder has 1.")


def test_who_asked_for_no_disk_is_not_looked_at(tmp_path: Path) -> None:
    timers = Timers()
    DiskWatch(timers, tmp_path, LaunchSpec("key", ["true"]), pytest.fail)
    assert timers.first_at() is None


def test_a_file_system_of_its_own_holds_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / IMAGE_FILE).write_bytes(bytes(2 * MIB))
    assert looked_at(tmp_path, LaunchSpec("key", ["true"], disk=MIB, scratch="work")) == []
    assert looked_at(tmp_path, LaunchSpec("key", ["true"], disk=MIB)) != []


def test_who_has_more_has_failed() -> None:
    why = why_over(20 * MIB, 16 * MIB)
    assert why == "over its disk limit of 16 MiB: its own folder has 20 MiB"
    ended = outcome(ExitRecord(exit_code=None, signal=15, reason="over_disk", kill_reason=why))
    assert (ended.state, ended.reason, ended.is_own_end) == (JobStatus.FAILED, f"stopped: {why}", False)


def test_who_fails_with_a_full_disk_of_its_own_is_told_so() -> None:
    ended = outcome(ExitRecord(exit_code=1, signal=None, reason="exited", disk_limit=16 * MIB))
    assert (ended.state, ended.reason) == (JobStatus.FAILED, "exit code 1; its disk of 16 MiB was full")
