"""What a process asks of Linux by prctl, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fluster_bus.running.fence_clock import boot_id
from fluster_bus.running.prctl import DIES_WITH_OWNER

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prctl is a call of Linux")

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
from fluster_bus.running.prctl import set_process_name
set_process_name("fluster-of-a-long-name")
print(open("/proc/self/comm").read())
"""
_TELL_ORPHANS_PARENT = """
import os
grandparent = os.getpid()
from fluster_bus.running.prctl import become_subreaper
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
