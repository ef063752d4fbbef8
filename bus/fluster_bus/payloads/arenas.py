"""Payloads in memory that processes of one machine share: this process's own arena, and its views of others'.

One of each for the whole process, since memory is bounded for the whole process, whatever it is connected to.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import pickle
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from fluster_bus.core.errors import InvalidMessageError, PayloadLostError
from fluster_bus.messages import parse_size
from fluster_bus.payloads.arena import Arena, Lent, Reference, Span
from fluster_bus.payloads.mappings import Mapping, Mappings
from fluster_bus.payloads.pickles import Pickled
from fluster_bus.running.fence_clock import boot_id

log = logging.getLogger(__name__)

SIZE_VARIABLE = "FLUSTER_ARENA_BYTES"  # how much memory a process lends at most; 0: none, and it takes none from others
_MAX_BYTES, _SHARE_OF_MEMORY = 1 << 30, 4  # by default: the lesser of 1 GiB and a fourth of the machine's memory
_TICK_S = 5.0
_CGROUPS = Path("/sys/fs/cgroup")


class Held(bytes):
    """A reference that arrived, and whose payload stays for as long as this object lives."""

    hold: Hold


class Hold:
    """Keeps a payload in its sender's arena, or in this process's own."""

    __slots__ = ("__weakref__", "_mappings", "_owner", "_span", "memory", "reference")

    def __init__(self, reference: Reference) -> None:
        """Raises PayloadLostError."""
        self._owner: Mapping | Arena | None = None  # for `__del__`, when there is nothing to hold
        self._span: Span | None = None
        self._mappings = _here.mappings
        self.reference = reference
        owner, self._span = _here.hold(reference)
        self.memory = owner.memory
        self._owner = owner

    def __del__(self) -> None:
        if isinstance(self._owner, Arena) and self._span is not None:
            self._owner.let_go(self._span)
        elif isinstance(self._owner, Mapping):
            self._mappings.let_go(self._owner, self.reference.slot)

    def read(self) -> Any:
        """The value. Arrays in it look at the shared memory, and keep it for as long as they live."""
        offsets, size = self.reference.pieces()
        start = self.reference.start
        if len(offsets) == 1:
            with memoryview(self.memory) as memory, memory[start : start + size] as stream:
                return pickle.loads(stream)
        exporter = (ctypes.c_char * size).from_buffer(self.memory, start)
        # On the exporter: a view that is handed to pickle is let go of at once, those that are made of it are not.
        weakref.finalize(exporter, _nothing, self).atexit = False
        whole = pickle.PickleBuffer(exporter).raw().toreadonly()
        stream, *buffers = [whole[at : at + n] for at, n in zip(offsets, self.reference.sizes, strict=True)]
        return pickle.loads(stream, buffers=buffers)


def _nothing(_hold: Hold) -> None:
    """What is left to do when the last view is gone: to forget the hold."""


class ProcessMemory:
    """What a process lends and holds."""

    def __init__(self) -> None:
        self.mappings = Mappings()
        self._arena: Arena | None = None
        self.is_tidying = False
        self._lock = threading.Lock()

    @functools.cached_property  # at the first use: a forked task has an environment, and maybe a user, of its own
    def size(self) -> int:
        return lendable_bytes()

    @functools.cached_property
    def place(self) -> str | None:
        return measured_place() if self.size else None

    def lend(self, pickled: Pickled, *, until_taken: bool) -> Lent | None:
        if self.place is None:
            return None
        try:
            lent = self.own().lend(pickled, until_taken=until_taken)
        except OSError as error:  # no descriptors left, or no memory
            log.warning("this process lends no memory: %s", error)
            return None
        self._keep_tidy()
        return lent

    def own(self) -> Arena:
        """What it lends from, made at the first use."""
        if self._arena is None:
            with self._lock:
                if self._arena is None:
                    self._arena = Arena(self.size)
        return self._arena

    def hold(self, reference: Reference) -> tuple[Mapping | Arena, Span | None]:
        if self.place is None:
            raise PayloadLostError(f"this process takes no shared memory: {SIZE_VARIABLE} is 0, or the system has none")
        own = self._arena
        if own is not None and reference.arena == own.id:
            span = own.hold(reference)
            if span is None:
                raise PayloadLostError("this process was to read what it no longer lends")
            return own, span
        mapping = self.mappings.hold(reference)
        self._keep_tidy()
        return mapping, None

    def untaken(self) -> int:
        return self._arena.untaken() if self._arena is not None else 0

    def _keep_tidy(self) -> None:
        if self._start_tidying():
            threading.Thread(target=self._tidy, name="fluster-arenas", daemon=True).start()

    def _start_tidying(self) -> bool:
        if self.is_tidying:
            return False
        with self._lock:
            begun, self.is_tidying = self.is_tidying, True
            return not begun

    def _tidy(self) -> None:
        while True:
            time.sleep(_TICK_S)
            if not self.tidy(time.monotonic()):
                self.is_tidying = False  # before looking once more: a thread that lends from here on sees it
                if not (self.tidy(time.monotonic()) and self._start_tidying()):
                    return

    def tidy(self, now: float) -> bool:
        """Free what is unused; False when there is nothing left to look after."""
        lends = self._arena is not None and self._arena.tidy(now)
        return self.mappings.tidy(now) or lends

    def abandon(self) -> None:
        if self._arena is not None:
            self._arena.abandon()
        self.mappings.abandon()


def lendable_bytes() -> int:
    """How much memory a process lends at most, by its environment or the machine's memory."""
    told = os.environ.get(SIZE_VARIABLE)
    if told is not None:
        return parse_size(told)
    if sys.platform != "linux":
        return 0
    return min(_MAX_BYTES, _memory() // _SHARE_OF_MEMORY)


def _memory() -> int:
    """What this process may use: the machine's memory, or less where its cgroup, or one above, has a limit."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no cgroups of version 2
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        own = _CGROUPS / next((line for line in lines if line.startswith("0::/")), "0::/").removeprefix("0::/")
        for group in (own, *own.parents):
            limit = group / "memory.max"
            if limit.exists() and (told := limit.read_text(encoding="ascii").strip()) != "max":
                memory = min(memory, int(told))
    return memory


def measured_place() -> str | None:
    """Names those processes that can open each other's arenas: of one boot, one view of processes, and one user."""
    try:
        spaces = [Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("pid", "user")]
        if Path("/proc/self/fd").stat().st_uid != os.geteuid():
            return None  # the system hides it from its own user
        # The kernel asks for the same rights at least, too.
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        rights = [line for line in status.splitlines() if line.startswith("CapPrm")]
    except OSError:
        return None
    boot = boot_id()
    if not boot:
        return None  # then two machines would have the same name
    whole = f"{boot} {spaces} {os.geteuid()} {rights}"
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


_here = ProcessMemory()


def here() -> ProcessMemory:
    """What this process lends and holds."""
    return _here


def place() -> str | None:
    """Where this process can share memory: with those that say the same. None when it shares none."""
    return _here.place


def lend(pickled: Pickled, *, until_taken: bool = False) -> Lent | None:
    """A reference to a copy of `pickled` that processes at the same `place` can read; None when there is no room.

    The copy lasts as long as the reference, and until the last receiver has let it go. With `until_taken` it lasts
    beyond the reference, until some receiver has had it, for a minute at most.
    """
    return _here.lend(pickled, until_taken=until_taken)


def held(reference: bytes) -> bytes:
    """A reference that arrived, and holds its payload from now on; as it is when there is nothing to hold."""
    try:
        hold = Hold(Reference.decode(reference))
    except (PayloadLostError, InvalidMessageError):
        return reference  # its reader gets the error
    found = Held(reference)
    found.hold = hold
    return found


def read(reference: bytes) -> Any:
    """What lies where a reference points. Raises PayloadLostError, InvalidMessageError."""
    hold = reference.hold if isinstance(reference, Held) else Hold(Reference.decode(reference))
    return hold.read()


def spelled_out(lent: Lent) -> Pickled:
    """What this process lends, for those who cannot open its arena. Good as long as `lent` is."""
    reference = lent.span.reference
    memory = memoryview(lent.arena.memory)[reference.start :]
    offsets, _end = reference.pieces()
    stream, *buffers = [memory[at : at + n] for at, n in zip(offsets, reference.sizes, strict=True)]
    return Pickled([stream], buffers)


def untaken() -> int:
    """How many payloads that this process passed on wait for a receiver to take them."""
    return _here.untaken()


def _start_anew() -> None:
    global _here
    left, _here = _here, ProcessMemory()  # what was lent and is held stays with the parent
    left.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)
