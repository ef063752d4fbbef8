"""Those who do the work of actor_work.py: Fluster, and the peers that are here. Each in processes of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.actor_work import ALL_THERE, MIB, REPLIED, Figures
from benchmarks.hyperqueue_jobs import PEERS_VARIABLE

FLUSTER = "Fluster"
_ROOT = Path(__file__).parents[1]
_SETTLE_S = 1.5  # in which those who have just started take, and give back, what they will
_WORK_TIMEOUT_S, _END_TIMEOUT_S = 300, 30
# Ray listens on the machine's outward addresses whatever its options say: it gets a network that has none.
_APART = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


@dataclass(frozen=True)
class Side:
    name: str
    work: tuple[str, ...]  # a command that tells figures
    start: tuple[str, ...]  # one that says when the first actor has replied, and when all are there

    def worked(self) -> Figures:
        """What its figures are this time. Raises RuntimeError with what it wrote."""
        done = subprocess.run(
            self.work,
            cwd=_ROOT,
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=_WORK_TIMEOUT_S,
            check=False,
        )
        figures = done.stdout.strip().splitlines()[-1:]
        if done.returncode != 0 or not figures:
            raise RuntimeError(f"{' '.join(self.work)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        found: Figures = json.loads(figures[0])
        return found

    def started(self) -> Figures:
        """Seconds from the start of the process to its first reply, and MiB of all below it, shared ones divided (PSS)."""
        began = time.perf_counter()
        with _running(self.start) as process:
            _wait_said(process, REPLIED)
            taken_s = time.perf_counter() - began
            _wait_said(process, ALL_THERE)
            time.sleep(_SETTLE_S)
            below = psutil.Process(process.pid).children(recursive=True)
            memory: int = sum(each.memory_full_info().pss for each in below)
        return {"first_reply_s": taken_s, "memory_mib": memory / MIB}


@contextlib.contextmanager
def _running(command: tuple[str, ...]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command,
        cwd=_ROOT,
        env=_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
        process.communicate(timeout=_END_TIMEOUT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _wait_said(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == word:
            return
    raise RuntimeError(f"{process.args!r} ended before it said {word!r}")


def _environment() -> dict[str, str]:
    """Bytecode is kept, as on a user's machine: the first round writes it."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def fluster() -> Side:
    python = (sys.executable, "-m")
    return Side(FLUSTER, (*python, "benchmarks.fluster_actors"), (*python, "benchmarks.first_reply"))


def peers() -> list[Side]:
    """Those who are here; a loud word for each that is not."""
    found = []
    for name, package, prefix in (("xoscar", "xoscar uvloop", ()), ("Ray", "ray", _APART)):
        interpreter = Path(os.environ.get(PEERS_VARIABLE, "")) / f"venv-{name.lower()}" / "bin" / "python"
        if not (PEERS_VARIABLE in os.environ and interpreter.exists()):
            folder = f"DIR/venv-{name.lower()}"
            say_missing(
                name, f"which is not here: `python3 -m venv {folder}`, `{folder}/bin/pip install numpy {package}`"
            )
        elif prefix and not can_be_apart():
            say_missing(name, "which listens to the outside: run this where `unshare --net` is allowed")
        else:
            script = (*prefix, str(interpreter), "-m", f"benchmarks.{name.lower()}_actors")
            found.append(Side(name, (*script, "work"), (*script, "start")))
    return found


def can_be_apart() -> bool:
    """Whether a process may have a network of its own here."""
    return shutil.which("ip") is not None and subprocess.run([*_APART, "true"], check=False).returncode == 0


def say_missing(name: str, why: str) -> None:
    """Say that not all were compared."""
    sys.stderr.write(f"*** NOT COMPARED with {name}, {why}, then --peers DIR ***\n")
