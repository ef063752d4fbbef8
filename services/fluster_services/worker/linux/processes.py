"""Processes, as the kernel knows them: who descends from whom, who dies with whom; and programs, found and started.

Outside Linux most of it is a no-op.

A fork of a process as large as a keeper takes milliseconds: its page tables are copied, and from then on both pay for each page that
they touch. `posix_spawn` shares the memory until the program is executed, but cannot have the kernel end the program with
its parent; setpriv of util-linux does that on the way (https://man7.org/linux/man-pages/man1/setpriv.1.html).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

_EXECUTING_S = 5.0  # in which a process has executed a program: with a CPU of its own it takes a ten-thousandth of that
_EXECUTING_PAUSE_S = 0.0005
_IS_LINUX = sys.platform.startswith("linux")
_MNT_DETACH = 2
# Loaded at import, so that a freshly forked process does not have to.
_LIBC = ctypes.CDLL(None, use_errno=True) if _IS_LINUX else None
_EXECUTABLE_MAGIC = b"\x7fELF"


def raise_descriptor_limit() -> None:
    """Let this process open as many files as the system lets it; a connection for each attempt is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses to go as far as it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def detach(place: Path) -> None:
    """Unmount what is mounted at `place`: gone at once from all who look, and for good when the last who uses it has left."""
    if _LIBC is not None:
        _LIBC.umount2(os.fsencode(place), _MNT_DETACH)


def close_fds_except(kept: Collection[int]) -> None:
    """Close every file descriptor of this process that is not in `kept`."""
    for name in os.listdir("/proc/self/fd" if _IS_LINUX else "/dev/fd"):  # noqa: PTH208 - it is the names that count
        fd = int(name)
        if fd not in kept:
            try:
                os.close(fd)
            except OSError:  # the descriptor of the listing itself, closed by now
                continue


def be_quiet() -> None:
    """Lead the standard streams of this process nowhere."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for target in (0, 1, 2):
        os.dup2(nothing, target)
    os.close(nothing)


# What template and keeper handle in ways of their own; nothing else is, so that copies need not look at all of them.
KEEPER_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def reset_signals(numbers: Iterable[int], *, is_python: bool = True) -> None:
    """Forget the inherited handlers of these signals, for those that a fresh interpreter has, or for none at all."""
    signal.set_wakeup_fd(-1)
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
    if is_python:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def signal_pipe(*handled: signal.Signals, ignored: Iterable[signal.Signals]) -> int:
    """Return the end of a pipe from which the numbers of `handled` signals can be read as they come, without blocking.

    All signals are unblocked. Only for the main thread of a process.
    """
    read_end, write_end = os.pipe()
    for fd in (read_end, write_end):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in handled:
        signal.signal(number, lambda *_: None)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return read_end


def handled_signals() -> list[int]:
    """Return the signals whose handling is not the default one."""
    return [number for number in signal.valid_signals() if signal.getsignal(number) not in (signal.SIG_DFL, None)]


def descendants(root: int) -> list[int]:
    """Return the processes that descend from `root` at this moment.

    One that forks meanwhile can be missed: to have them all gone, ask again until there are none.
    """
    if not _IS_LINUX:
        return []
    children_of = _children if _kernel_lists_children() else _ChildrenByScan()
    found: list[int] = []
    waiting = [root]
    while waiting:
        children = children_of(waiting.pop())
        found.extend(children)
        waiting.extend(children)
    return found


def _kernel_lists_children() -> bool:
    return Path(f"/proc/self/task/{os.getpid()}/children").exists()


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found.extend(map(int, (thread / "children").read_text().split()))
    except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
        return found
    return found


class _ChildrenByScan:
    """The same where the kernel was built without the children files: one look at every process."""

    def __init__(self) -> None:
        self._by_parent: dict[int, list[int]] = {}  # {parent: [pid]}
        for pid in _all_pids():
            stat = _stat(pid)
            if stat is not None:
                self._by_parent.setdefault(int(stat[1]), []).append(pid)

    def __call__(self, pid: int) -> list[int]:
        return self._by_parent.get(pid, [])


def _all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/<pid>/stat from the state on: [state, ppid, pgrp, session, …]."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()  # the name before it may hold anything, also brackets


def start_ticks(pid: int) -> str | None:
    """Return when the process started, in the kernel's ticks since boot; None when none of that number lives."""
    stat = _stat(pid)
    return None if stat is None or stat[0] in "ZX" else stat[19]


def process_state(pid: int, *, started_by_s: float) -> str | None:
    """Return the kernel's letter for the state of a process that started by then, in seconds since boot; None when it is over."""
    stat = _stat(pid)
    # One that started later is a stranger that was given the same number.
    return None if stat is None or stat[0] in "ZX" or _started_s(stat) > started_by_s + 1 else stat[0]


def started_since_boot_s(pid: int) -> float | None:
    """Return when the process started, in seconds since boot; None when none of that number lives."""
    stat = _stat(pid)
    return None if stat is None or stat[0] in "ZX" else _started_s(stat)


def process_owner(pid: int) -> int | None:
    """Return the user of a process; None when none of that number is there."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None


def process_name(pid: int) -> str | None:
    """What the kernel calls a process, 15 bytes at most; None when it is not seen from here."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").rstrip("\n")
    except OSError:
        return None


def oom_kill_count() -> int | None:
    """Return how many processes the kernel has killed for want of memory since boot."""
    try:
        text = Path("/proc/vmstat").read_text()
    except FileNotFoundError:
        return None
    count = text.partition("\noom_kill ")[2].partition("\n")[0]
    return int(count) if count else None


def leftovers(task_pid: int, task_started_s: float, environment_mark: str) -> list[int]:
    """Return the living processes of a task whose keeper is dead; `task_started_s` is in seconds since boot.

    They are recognized by the task's session, or by `environment_mark` ("NAME=value") in the environment they were executed with.
    """
    if not _IS_LINUX:
        return []
    leader = _stat(task_pid)
    # A leader that started much later is a stranger that was given the same number.
    session_is_ours = leader is None or _started_s(leader) < task_started_s + 1
    mark = os.fsencode(environment_mark)
    found = []
    for pid in _all_pids():
        stat = _stat(pid)
        if stat is None or stat[0] in "ZX" or pid == os.getpid() or _started_s(stat) < task_started_s - 1:
            continue
        # A main process that has only just been forked does not lead its session yet.
        if (session_is_ours and task_pid in (pid, int(stat[3]))) or mark in _environment(pid):
            found.append(pid)
    return found


def _started_s(stat: list[str]) -> float:
    return int(stat[19]) / os.sysconf("SC_CLK_TCK")


def _environment(pid: int) -> list[bytes]:
    deadline = time.monotonic() + _EXECUTING_S
    while True:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # it ended, or belongs to another user and so is none of ours
            return []
        if environment or not _may_have_environment(pid) or time.monotonic() >= deadline:
            return environment.split(b"\0")
        time.sleep(_EXECUTING_PAUSE_S)


def _may_have_environment(pid: int) -> bool:
    """Whether that of a process may be there at the next look: it is between two programs, or has just begun the new one."""
    stat = _stat(pid)
    if stat is None or stat[20] == "0":  # it is over, or has no memory, as the kernel's own
        return False
    start, end = stat[47:49]
    # The kernel fills in the environment's place while it builds the new stack, and where the code begins only after that.
    return start != end or stat[23] == "0"


def spawn(
    command: Sequence[str], environment: Mapping[str, str], *, stdout_fd: int, stderr_fd: int, umask: int
) -> int | None:
    """Return the pid of `command`, run in the working directory as the leader of a session of its own.

    None when it has to be forked and executed instead, which also tells best what is wrong with a command that is none. All descriptors
    of this process but the standard ones must be close-on-exec.
    """
    setpriv = find_setpriv()
    if setpriv is None or not _is_program(command[0], environment):
        return None
    previous = os.umask(umask)
    try:
        return os.posix_spawn(
            setpriv,
            [setpriv, "--pdeathsig", "KILL", "--", *command],
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, stdout_fd, 1),
                (os.POSIX_SPAWN_DUP2, stderr_fd, 2),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=_ignored_signals(),
        )
    except (OSError, ValueError):  # too long, or with a zero byte in it
        return None
    finally:
        os.umask(previous)


@functools.cache
def find_setpriv() -> str | None:
    """Return the path of a setpriv that knows --pdeathsig; other systems and BusyBox have none."""
    path = shutil.which("setpriv", path=os.defpath) if sys.platform.startswith("linux") else None
    return path if path is not None and b"pdeathsig" in Path(path).read_bytes() else None


def _is_program(name: str, environment: Mapping[str, str]) -> bool:
    """Whether that is found, and no script, whose interpreter might be missing."""
    path = shutil.which(name, path=environment.get("PATH", os.defpath))
    if path is None:
        return False
    with Path(path).open("rb") as file:
        return file.read(len(_EXECUTABLE_MAGIC)) == _EXECUTABLE_MAGIC


@functools.cache
def _ignored_signals() -> tuple[int, ...]:
    """Those that a program would inherit as ignored; what is handled becomes the default when it is executed."""
    return tuple(number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN)


def find_program(name: str) -> Path | None:
    """The program next to this Python, else the one on PATH."""
    # Not resolved: in a virtual environment this is a link to a Python that lies elsewhere.
    found = shutil.which(name, path=Path(sys.executable).parent) or shutil.which(name)
    return None if found is None else Path(found).absolute()
