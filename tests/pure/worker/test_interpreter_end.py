"""What a task's process does in place of an interpreter's end, by parts of Python that are not public."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, os, threading
from concurrent.futures import ThreadPoolExecutor
from fluster_services.worker.task.interpreter_end import end_interpreter

def say(line):
    os.write(1, (line + "\\n").encode())  # at once, where print() writes the end of a line by itself

go = threading.Event()
pool = ThreadPoolExecutor(1)
pool.submit(lambda: (go.wait(), say("the pool's work")))
threading.Thread(target=lambda: (go.wait(), say("a thread"))).start()
atexit.register(lambda: say("atexit"))
threading.Thread(target=go.set).start()
end_interpreter()
say("over")
os._exit(3)
"""


def test_threads_and_pools_are_waited_for_before_what_is_registered_runs() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=60)
    lines = ran.stdout.splitlines()
    assert (ran.returncode, ran.stderr) == (3, "")
    assert sorted(lines[:2]) == ["a thread", "the pool's work"]
    assert lines[2:] == ["atexit", "over"]
