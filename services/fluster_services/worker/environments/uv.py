"""Runs uv: in an environment of its own, gone when the worker is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fluster_bus.running.linux_calls import DIES_WITH_OWNER
from fluster_services.worker.contract.attempt_records import INHERITED_VARIABLES
from fluster_services.worker.contract.faults import MAX_LINE_BYTES, BuildError, BuildOutput, without_codes
from fluster_services.worker.contract.spool import LineCutter
from fluster_services.worker.linux.processes import find_program

_READ_BYTES = 64 << 10
_ASKED_S = 10.0

# What chooses the environment that uv works on: that is said in each command.
_NOT_INHERITED = frozenset({"VIRTUAL_ENV", "UV_PYTHON", "UV_SYSTEM_PYTHON", "UV_PROJECT_ENVIRONMENT", "UV_NO_PROJECT"})

# What runs between fork and exec: has uv die with the worker, where the system can do that.
_LAUNCHER = f"""{DIES_WITH_OWNER}
if sys.platform == "linux":
    # Requirements are a tenant's words, and building a package runs its code: a file without end is not read into all of the memory.
    import resource
    most = max(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4, 4 << 30)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
os.execv(arguments[0], arguments)
"""


def find_uv() -> Path:
    """The uv next to this Python, else the one on PATH. Raises BuildError with the remedy."""
    found = find_program("uv")
    if found is None:
        raise BuildError(
            "this worker has no uv, which makes the environments of jobs: install it there "
            f"(`{sys.executable} -m pip install uv`) and start the worker again"
        )
    return found


def find_uv_cache() -> Path | None:
    """The folder in which uv keeps packages; None when it does not say. Blocks."""
    try:
        told = subprocess.run(
            [find_uv(), "cache", "dir"],
            capture_output=True,
            text=True,
            check=True,
            env=_environment(),
            timeout=_ASKED_S,
        )
    except (BuildError, OSError, subprocess.SubprocessError):
        return None
    return Path(without_codes(told.stdout.strip())) if told.stdout.strip() else None


async def run_uv(arguments: Sequence[str], *, folder: Path, variables: Mapping[str, str], output: BuildOutput) -> None:
    """Run `uv …` in `folder` and add what it says to `output`. Raises BuildError; cancelled, it ends uv first."""
    uv = str(find_uv())
    shown = f"uv {' '.join(arguments)}"
    output.begin(shown)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-I", "-S", "-c", _LAUNCHER, str(os.getpid()), uv, *arguments),
        cwd=folder,
        env={**_environment(), **variables},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        await _collect(process, output)
        await process.wait()
    finally:
        _end_group(process.pid)
        await process.wait()
    if process.returncode != 0:
        raise BuildError(f"`{shown}` failed:\n{output.last_words()}", output)


async def _collect(process: asyncio.subprocess.Process, output: BuildOutput) -> None:
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    cutter = LineCutter(MAX_LINE_BYTES)
    while data := await process.stdout.read(_READ_BYTES):
        for text, _is_partial in cutter.feed(data):
            output.add(text.decode(errors="replace"))
    for text, _is_partial in cutter.finish():
        output.add(text.decode(errors="replace"))


def _end_group(leader: int) -> None:
    """End uv and what it has started, such as the build of a package, if any of it is left."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # all of it ended; macOS says the latter of zombies
        return


def _environment() -> dict[str, str]:
    """What uv gets of the worker's own: packages are built by their authors' code, and the worker has credentials."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if (name in INHERITED_VARIABLES or name.startswith(("LC_", "UV_"))) and name not in _NOT_INHERITED
    }
    return {
        "PATH": os.defpath,
        **inherited,
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_NO_PROGRESS": "1",
        "NO_COLOR": "1",
    }
