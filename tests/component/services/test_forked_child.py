"""A forked child ends by itself, whatever it meets with."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import atexit, os, sys
from fluster_services.forking import run_and_exit

atexit.register(lambda: print("the end of", os.getpid() == parent, flush=True))
parent = os.getpid()
pid = os.fork()
if pid == 0:
    try:
        run_and_exit(lambda: {body})
    finally:
        print("climbed out", flush=True)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.mark.parametrize(
    ("body", "status", "last_words"),
    [
        ("None", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no room here')", 1, "no room here"),
        ("{}['gone']", 1, "KeyError: 'gone'"),
        ("(_ for _ in ()).throw(KeyboardInterrupt)", 1, "KeyboardInterrupt"),
    ],
)
def test_it_ends_with_the_status_and_the_words_that_it_leaves_with(body: str, status: int, last_words: str) -> None:
    program = _PROGRAM.replace("{body}", body)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"{status}\nthe end of True\n"
    assert done.stderr.strip().rpartition("\n")[2] == last_words
