"""Locks of GPUs as files that others can write to as well, and what is left of those who held them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fluster_bus.running.fence_clock import fence_clock
from fluster_services.worker.gpus.holders import Holder, look_for, parse_note, why_not_gone
from fluster_services.worker.gpus.inventory import GpuProcess
from fluster_services.worker.gpus.locks import MAX_NOTE_BYTES, GpuLock, GpuTakenError, find_lock_folder, lock_path
from tests.waiting import wait_until

UUID = "GPU-00000000-1111-2222-3333-444444444444"
_ALONE = {"PATH": os.environ["PATH"]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return lock_path(find_lock_folder(str(tmp_path / "locks")), UUID)


def holder(**changes: object) -> Holder:
    here = Holder.here("ns.job.0.1", since_boot_s=fence_clock(), mark="FLUSTER_TEST_MARK=never")
    return replace(here, **changes)  # type: ignore[arg-type]


def note_of(each: Holder) -> str:
    return each.as_note()


# The file


def test_one_alone_holds_a_lock_until_the_last_copy_of_it_is_closed(path: Path) -> None:
    first, second = GpuLock(path), GpuLock(path)
    first.take(gone="")
    assert second.is_held()
    with pytest.raises(GpuTakenError, match="held"):
        second.take(gone="", patience_s=0.05)
    copy = os.dup(first.fd)
    first.close()
    assert second.is_held()
    os.close(copy)
    second.take(gone="")
    second.close()


def test_a_look_does_not_keep_others_from_taking_it(path: Path) -> None:
    looking, taking = GpuLock(path), GpuLock(path)
    assert not looking.is_held()
    taking.take(gone="", patience_s=0.0)
    looking.close()
    taking.close()


def test_a_note_stays_when_its_holder_dies_and_bars_the_next(path: Path) -> None:
    lock = GpuLock(path)
    lock.take(gone="")
    note = note_of(holder())
    lock.write_note(note)
    lock.close()
    again = GpuLock(path)
    assert again.note() == note
    with pytest.raises(GpuTakenError, match="not known to be gone"):
        again.take(gone="")
    assert not again.is_held()
    again.take(gone=note)
    again.clear_note()
    assert again.note() == ""
    again.close()


def test_a_shorter_note_leaves_nothing_of_a_longer_one(path: Path) -> None:
    lock = GpuLock(path)
    lock.take(gone="")
    lock.write_note(note_of(holder(attempt="n" * 400)))
    lock.write_note(note_of(holder(attempt="n")))
    found = parse_note(lock.note())
    assert found is not None
    assert found.attempt == "n"
    lock.close()


def test_a_file_that_was_removed_meanwhile_is_not_taken(path: Path) -> None:
    first, late = GpuLock(path), GpuLock(path)
    path.unlink()
    other = GpuLock(path)
    other.take(gone="")
    with pytest.raises(GpuTakenError):
        late.take(gone="", patience_s=0.05)
    for each in (first, late, other):
        each.close()


def test_all_users_may_take_a_lock_whatever_the_umask(path: Path) -> None:
    before = os.umask(0o077)
    try:
        GpuLock(path).close()
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o666
    assert path.parent.stat().st_mode & 0o7777 == 0o1777


# Those who mean harm


def _as_link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def _as_hard_link(path: Path, target: Path) -> None:
    path.hardlink_to(target)


def _as_pipe(path: Path, _target: Path) -> None:
    os.mkfifo(path)


def _as_folder(path: Path, _target: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [_as_link, _as_hard_link, _as_pipe, _as_folder])
def test_what_is_no_file_of_its_own_is_refused(path: Path, tmp_path: Path, make: Callable[[Path, Path], None]) -> None:
    target = tmp_path / "precious"
    target.write_text("precious")
    make(path, target)
    with pytest.raises(OSError, match=path.name):
        GpuLock(path)
    assert target.read_text() == "precious"


def test_nothing_is_written_over_what_is_no_note(path: Path) -> None:
    path.write_text("precious")
    lock = GpuLock(path)
    with pytest.raises(GpuTakenError):
        lock.take(gone="")
    lock.take(gone="precious")
    with pytest.raises(OSError, match="other than the note of a lock"):
        lock.write_note(note_of(holder()))
    lock.close()
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[" * 100_000, '{"fluster":1}'], ids=["none", "torn", "list", "deep", "old"]
)
def test_what_is_no_note_is_no_holder(path: Path, text: str) -> None:
    path.write_text(text)
    lock = GpuLock(path)
    assert parse_note(lock.note()) is None
    lock.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("task_pid", "1", id="text"),
        pytest.param("task_pid", True, id="bool"),
        pytest.param("groups", ["/a"] * 100, id="many"),
        pytest.param("attempt", "n" * 3_000, id="long"),
        pytest.param("since_boot_s", None, id="none"),
    ],
)
def test_a_note_with_a_part_that_cannot_be_is_no_holder(path: Path, name: str, value: object) -> None:
    path.write_text(json.dumps({**json.loads(note_of(holder())), name: value}))
    lock = GpuLock(path)
    assert parse_note(lock.note()) is None
    lock.close()


def test_a_long_file_is_not_read_whole(path: Path) -> None:
    path.write_text("x" * (4 * MAX_NOTE_BYTES))
    lock = GpuLock(path)
    assert len(lock.note()) == MAX_NOTE_BYTES
    lock.close()


def test_a_folder_in_which_others_could_replace_a_lock_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(PermissionError, match="chmod 1777"):
        find_lock_folder(str(tmp_path / "open"))
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(NotADirectoryError, match="link"):
        find_lock_folder(str(tmp_path / "link"))


# What is left of a holder


@pytest.fixture
def sleeper() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(**environment: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(["sleep", "1000"], env={**_ALONE, **environment}, start_new_session=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def why(each: Holder, processes: tuple[GpuProcess, ...] | None = None) -> str | None:
    return why_not_gone(each, look_for(each, processes))


def test_a_holder_of_whom_nothing_is_left_is_gone() -> None:
    assert why(holder()) is None
    assert why(holder(task_pid=4_000_000)) is None


def test_a_process_of_its_session_is_the_holder_s(sleeper: Callable[..., subprocess.Popen[bytes]]) -> None:
    process = sleeper()
    left = holder(task_pid=process.pid)
    assert f"process {process.pid}" in (why(left) or "")
    process.kill()
    process.wait()
    assert why(left) is None


def test_a_process_with_its_mark_is_the_holder_s(sleeper: Callable[..., subprocess.Popen[bytes]]) -> None:
    left = holder(mark="FLUSTER_TEST_MARK=this")
    process = sleeper(FLUSTER_TEST_MARK="this")
    wait_until(lambda: f"process {process.pid}" in (why(left) or ""))


def test_a_process_on_the_gpu_that_is_not_older_may_be_the_holder_s(
    sleeper: Callable[..., subprocess.Popen[bytes]],
) -> None:
    older = sleeper()
    left = holder(since_boot_s=fence_clock() + 5.0)  # as if it had begun long after that one
    assert why(left, (GpuProcess(older.pid),)) is None
    left = holder()
    younger = sleeper()
    assert "uses the GPU" in (why(left, (GpuProcess(younger.pid),)) or "")
    assert why(replace(left, uid=left.uid + 1), (GpuProcess(younger.pid),)) is None


def test_a_holder_of_another_boot_is_gone(sleeper: Callable[..., subprocess.Popen[bytes]]) -> None:
    assert why(holder(task_pid=sleeper().pid, boot_id="another")) is None


def test_a_holder_in_another_container_is_gone_once_the_driver_shows_nobody() -> None:
    away = holder(pid_namespace=1)
    assert "another container" in (why(away) or "")
    assert "another container" in (why(away, (GpuProcess(1),)) or "")
    assert why_not_gone(away, replace(look_for(away, ()), is_gpu_idle=True)) is None


@pytest.mark.parametrize(("is_there", "is_gone"), [(True, False), (False, True), (None, False)])
def test_a_container_is_asked_for(is_there: bool | None, is_gone: bool) -> None:
    contained = holder(container="fluster-1", engine="unix:///run/docker.sock")
    found = why_not_gone(contained, look_for(contained, None, lambda _: is_there))
    assert (found is None) is is_gone
    assert is_gone or "container fluster-1" in (found or "")


@pytest.mark.parametrize("group", ["/etc", "/sys/fs/cgroup/../../../etc", "etc", "/proc/self/root/sys/fs/cgroup"])
def test_groups_outside_the_kernel_s_are_not_read(group: str) -> None:
    assert look_for(holder(groups=(group,)), None).group_pids is None


def test_a_group_that_is_gone_is_empty() -> None:
    assert look_for(holder(groups=("/sys/fs/cgroup/memory/fluster-none",)), None).group_pids == ()


def test_a_lock_outlives_the_process_that_passed_it_on(path: Path) -> None:
    lock = GpuLock(path)
    lock.take(gone="")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock.fd])
    lock.close()
    looking = GpuLock(path)
    assert looking.is_held()
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert child.stdin is not None
    child.stdin.close()
    assert not looking.is_held()
    looking.close()
