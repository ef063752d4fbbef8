"""Where the processes of a task are in their Python code, as py-spy reads it from their memory.

It does not stop them for that: a process that hangs in the kernel, as on a file system that is gone, would make it wait, and
be left stopped when it is ended. So a process that is busy may be read at a bad moment; it is read again then.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fluster_bus.core.errors import ServiceError
from fluster_bus.messages.stacks import ProcessStack, StackFrame, ThreadStack
from fluster_services.worker.contract.runtime import RunningTask
from fluster_services.worker.engine import asked, container_pid
from fluster_services.worker.linux.processes import descendants, find_program

_PROCESSES = 16  # of a task; the first ones
_THREADS = 64  # of a process
_FRAMES = 2_000  # of a task, in which no more than so many are of one thread:
_FRAMES_OF_A_THREAD = 100
_CHARACTERS = 300  # of a name, path or command
_OUTPUT_BYTES = 16 << 20
_TRIES = 3
_TIMEOUT_S = 10.0  # for all of a task's processes
_AT_ONCE = 4  # tasks
_CALLABLE = "the job's callable"
_DENIED = ("permission denied", "operation not permitted", "os error 1)", "os error 13)")


class ReplyBudget:
    """What of a reply's room is left, and whether something found none."""

    def __init__(self) -> None:
        self.frames = _FRAMES
        self.is_exceeded = False

    def take(self, found: list[Any], most: int) -> list[Any]:
        self.is_exceeded |= len(found) > most
        return found[:most]


def parsed(output: bytes, budget: ReplyBudget) -> tuple[ThreadStack, ...]:
    """The threads that py-spy has told as JSON, the main one first. Raises ValueError, KeyError, TypeError for anything else."""
    threads: list[ThreadStack] = []
    told = sorted(json.loads(output), key=lambda thread: thread["thread_name"] != "MainThread")
    for thread in budget.take(told, _THREADS):
        frames = budget.take(thread["frames"], min(_FRAMES_OF_A_THREAD, budget.frames))
        budget.frames -= len(frames)
        threads.append(
            ThreadStack(
                name=_short(thread["thread_name"] or ""),
                is_active=bool(thread["active"]),
                holds_gil=bool(thread["owns_gil"]),
                frames=tuple(
                    StackFrame(
                        function=_short(frame["name"]), file=_short(frame["filename"]), line=max(0, int(frame["line"]))
                    )
                    for frame in frames
                ),
            )
        )
    return tuple(threads)


def problem_of(words: str) -> str:
    """What py-spy's error means, and what can be done about it."""
    first = _short(next((line for line in words.splitlines() if line.strip()), "it said nothing"))
    if not any(word in words.lower() for word in _DENIED):
        return f"no Python was found in it: {first}"
    if sys.platform == "darwin":
        return "macOS lets only root read other processes: run the worker as root to see stacks"
    return (
        "the kernel does not let its worker read it: run the worker as root with the capability SYS_PTRACE, or as the task's user "
        f"where `sysctl kernel.yama.ptrace_scope` is 0 ({first})"
    )


class Stacks:
    """Reads the stacks of this worker's tasks, of a few at a time."""

    def __init__(self) -> None:
        self._reading = 0

    async def read(self, running: RunningTask) -> tuple[list[ProcessStack], bool]:
        """Those of the task's processes, and whether some of it was left out. Raises ServiceError when none can be read here."""
        program = find_program("py-spy")
        if program is None:
            raise ServiceError(
                "StackError",
                "its worker has no py-spy, which reads the stacks of processes: install it there "
                f"(`{sys.executable} -m pip install py-spy`; it comes with fluster[local])",
            )
        if self._reading >= _AT_ONCE:
            raise ServiceError("StackError", f"its worker reads the stacks of {_AT_ONCE} tasks already: try again")
        self._reading += 1
        try:
            budget = ReplyBudget()
            pids = budget.take(await _pids(running), _PROCESSES)
            deadline = asyncio.get_running_loop().time() + _TIMEOUT_S
            found = [await _read(program, pid, deadline, budget) for pid in pids]
            return _named(found, is_callable=running.spec.command is None), budget.is_exceeded
        finally:
            self._reading -= 1


def _named(found: list[ProcessStack], *, is_callable: bool) -> list[ProcessStack]:
    """The process of a callable is a copy of one of Fluster's, and has that one's command line, as its own copies have."""
    copied = found[0].command if found and is_callable else None
    return [each.model_copy(update={"command": _CALLABLE}) if each.command == copied else each for each in found]


async def _pids(running: RunningTask) -> list[int]:
    container = running.spec.container
    main = running.pid if container is None else await asked(container_pid, container)
    return [] if main is None else [main, *await asyncio.to_thread(descendants, main)]


async def _read(program: Path, pid: int, deadline: float, budget: ReplyBudget) -> ProcessStack:
    about = ProcessStack(pid=pid, command=await asyncio.to_thread(_command, pid))
    problem = ""
    try:
        async with asyncio.timeout_at(deadline):
            for _ in range(_TRIES):
                output, words = await _run(program, pid)
                try:
                    return about.model_copy(update={"threads": parsed(output, budget)})
                except (ValueError, KeyError, TypeError):
                    problem = problem_of(words)
    except TimeoutError:
        problem = f"the stacks of this task could not be read within {_TIMEOUT_S:g} s"
    return about.model_copy(update={"problem": problem})


async def _run(program: Path, pid: int) -> tuple[bytes, str]:
    process = await asyncio.create_subprocess_exec(
        str(program),
        *("dump", "--json", "--full-filenames", "--nonblocking", "--pid", str(pid)),
        env={"NO_COLOR": "1"},  # the worker has credentials in its own
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None  # noqa: S101 - they are pipes
    assert process.stderr is not None  # noqa: S101
    try:
        output, words = await asyncio.gather(_bounded(process.stdout), _bounded(process.stderr))
        return output, words.decode(errors="replace")
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _bounded(stream: asyncio.StreamReader) -> bytes:
    """All that comes; nothing if that is more than can be used."""
    found = bytearray()
    while data := await stream.read(1 << 16):
        found += data
        if len(found) > _OUTPUT_BYTES:
            return b""
    return bytes(found)


def _command(pid: int) -> str:
    try:
        words: Iterable[bytes] = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:  # it has ended, or this is another system than Linux
        return ""
    return _short(b" ".join(words).decode(errors="replace").strip())


def _short(text: str) -> str:
    return text if len(text) <= _CHARACTERS else f"{text[: _CHARACTERS - 1]}…"
