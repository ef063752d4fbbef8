"""What happens to what is there when keep_shared() is called. It is for good, so each test does it in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

_LOOK_AT_ALL = """
import asyncio, email.message, gc, http.client, os, sys, unittest
from fluster_services.immortal_objects import keep_shared

def copied_kib():
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))

everything = gc.get_objects()
if "kept" in sys.argv:
    keep_shared()
pid = os.fork()
if pid == 0:
    before = copied_kib()
    for each in everything:
        pass
    gc.collect()
    os.write(1, b"%d" % (copied_kib() - before))
    os._exit(0)
os.waitpid(pid, 0)
"""

_END = """
import gc, os
from fluster_services.immortal_objects import keep_shared

def generate():
    try:
        yield
    finally:
        print("generator")

class Ending:
    def __del__(self):
        print("object")

generator, ending, (read, write) = generate(), Ending(), os.pipe()
next(generator)
os.set_blocking(read, False)
file = os.fdopen(write, "w")
keep_shared()
del generator, ending, file
print("file" if os.read(read, 1) == b"" else "")
"""


def _run(script: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "ignore::ResourceWarning", "-c", script, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=60, text=True).stdout


@pytest.mark.skipif(sys.platform != "linux", reason="it is Linux that tells which pages a process shares")
@pytest.mark.skipif(sys.version_info < (3, 12), reason="objects are immortal since Python 3.12")
def test_a_forked_process_looks_at_everything_and_copies_nothing() -> None:
    usual, kept = int(_run(_LOOK_AT_ALL)), int(_run(_LOOK_AT_ALL, "kept"))
    assert usual > 4_000
    assert kept < usual / 8


def test_what_does_something_when_it_ends_still_ends() -> None:
    assert _run(_END).split() == ["generator", "object", "file"]
