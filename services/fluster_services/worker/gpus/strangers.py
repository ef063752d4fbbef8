"""Programs that use a GPU which no task has: how much of its memory they hold, and for how long they have been seen to.

Such a program holds no lock, so it is found by its memory. One look tells little, as what has just
ended frees its memory a moment later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fluster_services.worker.gpus.inventory import Gpu
from fluster_services.worker.linux.processes import process_name

MANY_BYTES = 1 << 30
LOOKS = 3  # in a row that find it
_SERVER = "nvidia-cuda-mps"  # its first 15 characters, which the kernel keeps
_NAMED = 5  # processes, in a text


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
