"""The locks of a task's GPUs, from before it begins until its last process has ended."""

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from fluster_services.worker.contract.outcome import outcome
from fluster_services.worker.gpus.holders import look_for, parse_note, why_not_gone
from fluster_services.worker.gpus.locks import GpuLock, find_lock_folder, lock_path
from tests.system.runtime_site import PATIENCE_S, Site, end_of, texts, wait_for_line
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

# A grandchild of which neither session nor environment tell whose it is.
_ESCAPED = "setsid env -i PATH=$PATH sh -c 'echo $$; exec sleep 1000' &"


@pytest.fixture
def locks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = find_lock_folder(str(tmp_path_factory.mktemp("gpus") / "locks"))
    return lock_path(folder, "GPU-1"), lock_path(folder, "GPU-2")


def state_of(path: Path) -> tuple[bool, str]:
    lock = GpuLock(path)
    try:
        return lock.is_held(), lock.note()
    finally:
        lock.close()


def free(*paths: Path) -> dict[str, str]:
    return {str(path): "" for path in paths}


async def test_a_task_holds_all_of_its_gpus_until_it_has_ended(site: Site, locks: tuple[Path, Path]) -> None:
    task = await site.command("sh", "-c", "echo ready; exec sleep 1000", gpu_locks=free(*locks))
    await wait_for_line(task, "ready")
    for path in locks:
        is_held, note = state_of(path)
        holder = parse_note(note)
        assert is_held
        assert holder is not None
        assert (holder.attempt, holder.task_pid, holder.uid) == ("ns.job.0.1", task.pid, os.getuid())
        assert "process" in (why_not_gone(holder, look_for(holder, None)) or "")
    task.kill(0, "over")
    assert (await end_of(task)).reason == "killed"
    assert [state_of(path) for path in locks] == [(False, ""), (False, "")]
    await task.forget()


async def test_a_callable_holds_them_too_and_so_does_the_next_of_its_keeper(
    site: Site, locks: tuple[Path, Path]
) -> None:
    def held() -> None:
        found = [str(each.resolve()) for each in Path("/proc/self/fd").iterdir()]
        print([each for each in found if "fluster-gpu" in each], flush=True)

    for attempt, path in enumerate(locks, 1):
        task = await site.call(held, key=f"ns.job.0.{attempt}", gpu_locks=free(path))
        await wait_for_line(task, f"['{path}']")
        assert (await end_of(task)).exit_code == 0
        assert state_of(path) == (False, "")
        await task.forget()


async def test_a_gpu_that_another_holds_is_not_taken_and_that_is_no_fault_of_the_task(
    site: Site, locks: tuple[Path, Path], tmp_path: Path
) -> None:
    first = await site.command("sh", "-c", "echo ready; exec sleep 1000", gpu_locks=free(locks[1]))
    await wait_for_line(first, "ready")
    ran = tmp_path / "ran"
    second = await site.command("touch", str(ran), key="ns.job.1.1", gpu_locks=free(*locks))
    ended = outcome(await end_of(second))
    assert (ended.is_gpu_taken, ended.is_spared, ended.is_workers_fault) == (True, True, False)
    assert "attempt ns.job.0.1 of user" in ended.reason
    assert "GPU-2" in ended.reason
    assert not ran.exists()
    assert state_of(locks[0]) == (False, "")  # what it had taken by then is free again
    await second.forget()
    first.kill(0, "over")
    await end_of(first)
    third = await site.command("touch", str(ran), key="ns.job.1.2", gpu_locks=free(*locks))
    assert (await end_of(third)).exit_code == 0
    assert ran.exists()
    for each in (first, third):
        await each.forget()


async def test_a_grandchild_that_outlives_keeper_and_task_keeps_the_gpu(site: Site, locks: tuple[Path, Path]) -> None:
    task = await site.command("sh", "-c", f"{_ESCAPED} wait", gpu_locks=free(locks[0]))
    await wait_for_line(task, "")
    escaped = psutil.Process(int(texts(task)[0]))
    try:
        assert task.pid is not None
        keeper = psutil.Process(task.pid).parent()
        assert keeper is not None
        keeper.kill()
        assert (await end_of(task)).reason == "keeper_died"
        await task.forget()
        assert escaped.is_running()
        assert state_of(locks[0])[0]
        next_one = await site.command("true", key="ns.job.0.2", gpu_locks=free(locks[0]))
        assert (await end_of(next_one)).reason == "gpu_taken"
        await next_one.forget()
    finally:
        escaped.send_signal(signal.SIGKILL)
    await wait_until_async(lambda: not state_of(locks[0])[0], PATIENCE_S)
    # It was held by a task that left a note: that this task is gone must be proved first.
    note = state_of(locks[0])[1]
    holder = parse_note(note)
    assert holder is not None
    assert why_not_gone(holder, look_for(holder, ())) is None
    unproved = await site.command("true", key="ns.job.0.3", gpu_locks=free(locks[0]))
    assert (await end_of(unproved)).reason == "gpu_taken"
    proved = await site.command("true", key="ns.job.0.4", gpu_locks={str(locks[0]): note})
    assert (await end_of(proved)).exit_code == 0
    for each in (unproved, proved):
        await each.forget()


async def test_programs_of_a_task_need_not_keep_the_lock(site: Site, locks: tuple[Path, Path]) -> None:
    program = "import subprocess; subprocess.run(['sh', '-c', 'ls -l /proc/self/fd'], check=True)"
    task = await site.command(sys.executable, "-c", program, gpu_locks=free(locks[0]))
    assert (await end_of(task)).exit_code == 0
    assert not any("fluster-gpu" in text for text in texts(task))  # as Python's subprocess has it
    await task.forget()


async def test_what_is_no_lock_fails_the_start_and_not_the_worker(site: Site, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    place = lock_path(find_lock_folder(str(tmp_path / "locks")), "GPU-1")
    place.symlink_to(precious)
    task = await site.command("true", gpu_locks=free(place))
    assert (await end_of(task)).reason == "gpu_taken"
    assert precious.read_text() == "precious"
    await task.forget()
