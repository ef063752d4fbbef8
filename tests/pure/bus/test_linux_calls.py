"""What a process asks of Linux by prctl, each in a process of its own; and timers of the kernel's."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

import pytest

from fluster_bus.running.fence_clock import boot_id, fence_clock
from fluster_bus.running.linux_calls import CLOCK_BOOTTIME, DIES_WITH_OWNER, TimerFd

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="they are calls of Linux")

_TELL_SIGNAL = (
    DIES_WITH_OWNER
    + """
import ctypes
told = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(told))  # PR_GET_PDEATHSIG
print(told.value, *arguments)
"""
)
_TELL_NAME = """
from fluster_bus.running.linux_calls import set_process_name
set_process_name("fluster-of-a-long-name")
print(open("/proc/self/comm").read())
"""
_TELL_ORPHANS_PARENT = """
import os
grandparent = os.getpid()
from fluster_bus.running.linux_calls import become_subreaper
become_subreaper()
read, write = os.pipe()
child = os.fork()
if child == 0:
    if os.fork() == 0:
        os.read(read, 1)  # until its parent has ended
        print(os.getppid() == grandparent, flush=True)
    os._exit(0)
os.waitpid(child, 0)
os.write(write, b"x")
os.wait()
"""


def _run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_what_is_launched_dies_with_its_owner_and_has_the_other_arguments() -> None:
    assert _run(_TELL_SIGNAL, str(os.getpid()), "a", "b").stdout == "9 a b\n"


def test_what_is_launched_when_its_owner_has_ended_ends_at_once() -> None:
    launched = _run(_TELL_SIGNAL, "1", "a")
    assert (launched.returncode, launched.stdout, launched.stderr) == (1, "", "its owner is gone\n")


def test_a_process_is_shown_by_its_name_of_at_most_15_bytes() -> None:
    assert _run(_TELL_NAME).stdout.strip() == "fluster-of-a-lo"


def test_a_subreaper_becomes_the_parent_of_orphans() -> None:
    assert _run(_TELL_ORPHANS_PARENT).stdout == "True\n"


def test_every_process_reads_the_same_boot() -> None:
    told = _run("from fluster_bus.running.fence_clock import boot_id; print(boot_id())").stdout.strip()
    assert len(told) == 36
    assert told == boot_id()


def _is_readable(timer: TimerFd, within_s: float) -> bool:
    return bool(select.select([timer], [], [], within_s)[0])


@pytest.mark.parametrize("at_s", [0.0, 1.0])
def test_a_timer_whose_moment_is_past_has_come_at_once_and_once(at_s: float) -> None:
    timer = TimerFd(time.CLOCK_MONOTONIC)
    assert not timer.take()
    timer.set_at(at_s)
    assert _is_readable(timer, 60.0)
    assert timer.take()
    assert not timer.take()
    assert not _is_readable(timer, 0.0)
    timer.close()


def test_a_timer_comes_at_its_moment_by_its_clock() -> None:
    timer = TimerFd(CLOCK_BOOTTIME)
    at = fence_clock() + 0.02
    timer.set_at(at)
    assert _is_readable(timer, 60.0)
    assert fence_clock() >= at
    timer.close()


def test_a_timer_can_be_set_again_and_again_and_be_stopped() -> None:
    timer = TimerFd(time.CLOCK_MONOTONIC)
    set_soon, set_late, stop = timer.setter(0.01), timer.setter(3600.0), timer.setter(0)
    set_soon()
    set_late()
    stop()
    set_soon()
    begun = time.monotonic()
    assert _is_readable(timer, 60.0)
    assert time.monotonic() - begun < 60.0
    set_late()
    assert not _is_readable(timer, 0.0)  # what had come counts no longer
    timer.set_at(0.0)
    timer.set_at(None)
    assert not _is_readable(timer, 0.0)
    timer.close()


def test_a_clock_that_has_no_timers_is_told() -> None:
    with pytest.raises(OSError, match="timerfd_create: Invalid argument"):
        TimerFd(99)
