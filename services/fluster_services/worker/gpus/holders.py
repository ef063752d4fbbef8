"""Who uses a GPU: who held its lock last, and whether that holder is proved to be gone; and programs without a lock.

Decided apart from looking: `why_not_gone` is given what was found. A program that is not of a task holds no lock, so it is
found by the memory that it holds. One look tells little, as what has just ended frees its memory a moment later.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath

from fluster_bus.core.json_types import JsonObject
from fluster_bus.running.fence_clock import boot_id
from fluster_services.worker.gpus.inventory import Gpu, GpuProcess
from fluster_services.worker.gpus.locks import NOTE_BEGIN
from fluster_services.worker.linux.processes import (
    leftovers,
    process_name,
    process_owner,
    process_state,
    started_since_boot_s,
)

_VERSION = 1
_FIRST_NAMESPACE = 0xEFFFFFFC  # of the machine itself: from there all processes are seen
_MAX_GROUPS = 8
_GROUPS_ROOT = PurePosixPath("/sys/fs/cgroup")
_NAMED = 5  # processes, in a text
_TEXT = {"nonce": 64, "attempt": 500, "boot_id": 64, "mark": 2_000, "container": 200, "engine": 500}
_NUMBERS = ("uid", "pid_namespace", "task_pid")
_MAX_NUMBER = 1 << 63
# It becomes a part of a path that an engine is asked for: what could lead elsewhere names no container.
_CONTAINER_NAME = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9_.-]*)?")
MANY_BYTES = 1 << 30
LOOKS = 3  # in a row that find it
_SERVER = "nvidia-cuda-mps"  # its first 15 characters, which the kernel keeps


@dataclass(frozen=True)
class Holder:
    """An attempt that holds a GPU, by what tells whether it is gone."""

    attempt: str  # <ns>.<job>.<task>.<attempt>
    since_boot_s: float  # when it took the lock: nothing of it is older
    mark: str  # NAME=value, in the environment that its processes were executed with
    groups: tuple[str, ...] = ()  # its control groups
    container: str = ""  # its name at the engine
    engine: str = ""
    task_pid: int = 0  # the leader of its session; 0: it had not begun yet
    boot_id: str = ""
    uid: int = -1
    pid_namespace: int = 0
    nonce: str = ""  # no two notes are the same

    @classmethod
    def here(
        cls,
        attempt: str,
        *,
        since_boot_s: float,
        mark: str,
        groups: Sequence[str] = (),
        container: str = "",
        engine: str = "",
    ) -> Holder:
        """One of this process's machine and user."""
        return cls(
            attempt,
            since_boot_s,
            mark,
            tuple(groups),
            container,
            engine,
            boot_id=boot_id(),
            uid=os.getuid(),
            pid_namespace=own_namespace(),
            nonce=secrets.token_hex(8),
        )

    def begun(self, task_pid: int) -> Holder:
        """The same, whose process runs."""
        return replace(self, task_pid=task_pid)

    def as_note(self) -> str:
        """What `parse_note` reads."""
        return NOTE_BEGIN + f"{_VERSION}," + json.dumps(asdict(self))[1:]


def parse_note(text: str) -> Holder | None:
    """The holder that a note names; None for what cannot be one. Any user may have written it."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or not all(
        isinstance(data.get(name), str) and len(data[name]) <= most for name, most in _TEXT.items()
    ):
        return None
    groups, since = data.get("groups"), data.get("since_boot_s")
    if not isinstance(groups, list) or len(groups) > _MAX_GROUPS or not all(isinstance(each, str) for each in groups):
        return None
    if not isinstance(since, int | float) or not 0 <= since < _MAX_NUMBER:
        return None
    if not all(type(data.get(name)) is int and abs(data[name]) < _MAX_NUMBER for name in _NUMBERS):
        return None
    if _CONTAINER_NAME.fullmatch(data["container"]) is None or not _is_of_system(data["mark"]):
        return None
    known: JsonObject = {name: data[name] for name in (*_TEXT, *_NUMBERS)}
    return Holder(**known, since_boot_s=float(since), groups=tuple(groups))


def _is_of_system(text: str) -> bool:
    """Whether an environment can have it."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


@dataclass(frozen=True)
class Traces:
    """What was found of a holder. None: it cannot be seen from here."""

    same_boot: bool = True
    pids: tuple[int, ...] | None = ()  # in its session, or with its mark
    group_pids: tuple[int, ...] | None = None  # in its control groups
    container: bool | None = None  # whether it is there; None as well for a holder without one
    gpu_pids: tuple[int, ...] | None = None  # on the GPU, of those that may be its own
    is_gpu_idle: bool = False  # the driver shows no process on it, and would show all of the machine's


def why_not_gone(holder: Holder, traces: Traces) -> str | None:
    """Why a holder may still use its GPU; None once it is proved to be gone."""
    if not traces.same_boot:
        return None
    for what, pids in (("is left", traces.pids), ("is left", traces.group_pids), ("uses the GPU", traces.gpu_pids)):
        if pids:
            return f"process {_named(pids)} of attempt {holder.attempt} {what}"
    if traces.container:
        return f"container {holder.container} of attempt {holder.attempt} is there"
    if traces.is_gpu_idle or traces.group_pids is not None:  # a process cannot leave its group by itself
        return None
    if holder.container:
        return (
            None
            if traces.container is False
            else f"container {holder.container} of attempt {holder.attempt} is not seen"
        )
    if traces.pids is None:
        return f"attempt {holder.attempt} ran in another container, whose processes are not seen from here"
    return None


def look_for(
    holder: Holder,
    processes: Sequence[GpuProcess] | None,
    has_container: Callable[[Holder], bool | None] = lambda _: None,
) -> Traces:
    """What there is of a holder at this moment; `processes` are those on its GPU, None where the driver does not tell."""
    sees_all = holder.pid_namespace == own_namespace()
    return Traces(
        same_boot=holder.boot_id == boot_id(),
        pids=_own_pids(holder) if sees_all else None,
        group_pids=_group_pids(holder.groups) if sees_all else None,
        container=has_container(holder) if holder.container else None,
        gpu_pids=None if processes is None else tuple(each.pid for each in processes if _may_be_of(holder, each.pid)),
        is_gpu_idle=processes == () and sees_all_processes(),
    )


def own_namespace() -> int:
    """By what processes that see the same processes know each other; 0 where the system does not tell."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116 - of the link's target
    except OSError:
        return 0


def sees_all_processes() -> bool:
    """Whether all processes of the machine are seen from here, as they are not in a container."""
    return own_namespace() == _FIRST_NAMESPACE


def _own_pids(holder: Holder) -> tuple[int, ...]:
    session = holder.task_pid if holder.task_pid > 1 else -1  # 0 is that of the kernel's own
    return tuple(leftovers(session, holder.since_boot_s, holder.mark))


def _group_pids(groups: Sequence[str]) -> tuple[int, ...] | None:
    """What is in control groups; None when there are none. A group that is gone is empty."""
    if not groups:
        return None
    found: list[int] = []
    for group in groups:
        place = PurePosixPath(group)
        if not place.is_relative_to(_GROUPS_ROOT) or ".." in place.parts:
            return None
        try:
            found += map(int, Path(place, "cgroup.procs").read_text().split())
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            return None
    return tuple(found)


def _may_be_of(holder: Holder, pid: int) -> bool:
    """Whether a process on the GPU may be the holder's: of its user, and not older. One that is not seen here is another container's."""
    started = started_since_boot_s(pid)
    if started is None or started < holder.since_boot_s - 1 or process_state(pid, started_by_s=float("inf")) is None:
        return False
    return bool(holder.container) or process_owner(pid) in {None, holder.uid}


def _named(pids: Sequence[int]) -> str:
    return ", ".join(map(str, pids[:_NAMED])) + (" …" if len(pids) > _NAMED else "")


def described(text: str) -> str:
    """The holder that a note names, in words that can be shown."""
    holder = parse_note(text)
    if holder is None:
        return "a holder without a note" if not text else "a holder whose note cannot be read"
    name = re.sub(r"[^A-Za-z0-9_.-]", "?", holder.attempt)
    return f"attempt {name} of user {holder.uid}"


@dataclass(frozen=True)
class Strangers:
    """Processes on a GPU that no task has."""

    pids: tuple[int, ...]
    memory: int  # bytes
    # One is NVIDIA's MPS, in which programs of several users compute: the machine's owner has them share the GPU.
    has_server: bool = False

    @property
    def them(self) -> str:
        """The word for them in a message."""
        return "it" if len(self.pids) == 1 else "them"

    def described(self) -> str:
        """They and what they do, in the words of a message; without a figure that would make it another each time."""
        pids = ", ".join(map(str, self.pids[:_NAMED])) + (" …" if len(self.pids) > _NAMED else "")
        whose = f"process {pids}, which is" if len(self.pids) == 1 else f"processes {pids}, which are"
        return f"{whose} not of a task, {'holds' if len(self.pids) == 1 else 'hold'} more than {MANY_BYTES >> 30} GiB of its memory"


def strangers_on(gpu: Gpu) -> Strangers | None:
    """Who holds much of the memory of a GPU that no task has; None while it is little, or not known."""
    if not gpu.processes:
        return None
    known = [each.memory for each in gpu.processes if each.memory is not None]
    # What a process holds is not told everywhere (WSL, some instances): then all that is used is theirs.
    memory = sum(known) if len(known) == len(gpu.processes) else gpu.memory_used or 0
    if memory <= MANY_BYTES:
        return None
    pids = tuple(sorted(each.pid for each in gpu.processes))
    return Strangers(pids, memory, any((process_name(pid) or "").startswith(_SERVER) for pid in pids))


@dataclass
class StrangerWatch:
    """How often in a row strangers were found on each GPU."""

    _looks: dict[str, int] = field(default_factory=dict)

    def on_look(self, found: Mapping[str, Strangers]) -> dict[str, Strangers]:
        """Those that were found on GPUs, {id: who}, at this look; returns the ones who stay."""
        self._looks = {name: self._looks.get(name, 0) + 1 for name in found}
        return {name: who for name, who in found.items() if self._looks[name] >= LOOKS}
