"""A machine's GPUs without any: a library in C in place of NVIDIA's, and a file that says how they are."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests import optional

_SOURCE = Path(__file__).with_name("stand_in_nvml.c")
_FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
_NAME = "libnvidia-ml.so.1"
STATE_VARIABLE = "FLUSTER_STAND_IN_NVML"
GIB = 1 << 30


def build(folder: Path) -> Path:
    """Build the library there, unless it is; the folder is for LD_LIBRARY_PATH."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        optional.skip("gcc", "the stand-in for NVIDIA's library is C: install gcc")
    library = folder / _NAME
    if not library.exists():
        subprocess.run([compiler, *_FLAGS, f"-Wl,-soname,{_NAME}", "-o", str(library), str(_SOURCE)], check=True)
    return folder


@dataclass(frozen=True)
class FakeInstance:
    """A part of a divided GPU."""

    uuid: str
    name: str = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    memory: int = 5 * GIB
    place: int | None = None


@dataclass(frozen=True)
class FakeGpu:
    """A GPU of the stand-in; what is None the driver does not tell."""

    number: int
    name: str = "NVIDIA H100 80GB HBM3"
    memory: int | None = 80 * GIB
    reserved: int = 600 << 20
    used: int = 0
    utilization: int | None = 0
    temperature: int | None = 31
    milliwatts: int | None = 71_250
    ecc: int | None = 0
    mig: int | None = 0
    instances: Sequence[FakeInstance] = ()
    processes: Sequence[tuple[str, int, int]] = ()  # (c or g, pid, bytes)
    fails: dict[str, int] = field(default_factory=dict)  # {call, `handle` or `*`: NVML's error}
    hangs: Sequence[str] = ()
    bus_id: str = ""

    def __post_init__(self) -> None:
        if not self.bus_id:
            object.__setattr__(self, "bus_id", f"00000000:{16 + self.number:02X}:00.0")

    @property
    def uuid(self) -> str:
        return f"GPU-{self.number:08x}-1111-2222-3333-444444444444"

    def lines(self) -> list[str]:
        said = [f"device {self.uuid} {self.bus_id}", f"name {self.name}"]
        if self.memory is not None:
            said.append(f"memory {self.memory} {self.reserved} {self.used}")
        for word, value in (("temperature", self.temperature), ("power", self.milliwatts), ("ecc", self.ecc)):
            said += [] if value is None else [f"{word} {value}"]
        said += [] if self.utilization is None else [f"utilization {self.utilization} 0"]
        said += [] if self.mig is None else [f"mig {self.mig} 7"]
        said += [f"process {kind} {pid} {size}" for kind, pid, size in self.processes]
        said += [f"fails {call} {code}" for call, code in self.fails.items()]
        said += [f"hangs {call}" for call in self.hangs]
        for each in self.instances:
            said += [f"instance {each.uuid}", f"name {each.name}", f"memory {each.memory} 0 0"]
            said += [] if each.place is None else [f"place {each.place}"]
        return said


class StandIn:
    """What the library tells: `show` changes it for all processes that have these `variables`."""

    def __init__(self, library_folder: Path, state: Path) -> None:
        self._state = state
        self.variables = {"LD_LIBRARY_PATH": str(library_folder), STATE_VARIABLE: str(state)}
        self.show()

    def show(self, *gpus: FakeGpu, init: int = 0, nearness: Sequence[tuple[int, int, int, int]] = ()) -> None:
        """These GPUs are there now; `nearness` are (index, index, level, NVLink)."""
        lines = [f"init {init}", *(f"nearness {a} {b} {level} {link}" for a, b, level, link in nearness)]
        lines += [line for gpu in gpus for line in gpu.lines()]
        new = self._state.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n")
        new.replace(self._state)  # whole, whenever it is read
