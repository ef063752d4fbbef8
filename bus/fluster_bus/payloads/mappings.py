"""The arenas of other processes, as a receiver reads them."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import threading
import time
from collections import deque
from pathlib import Path

from fluster_bus.core.errors import PayloadLostError
from fluster_bus.payloads.arena import ENTRY, SEALS, SLOTS, TABLE_BYTES, Reference, file_name

_UNUSED_S = 30.0  # after which a mapping is closed: what its sender has freed counts as memory as long as it is open


class Mapping:
    """An arena of another process, and what this one holds of it."""

    def __init__(self, reference: Reference) -> None:
        """Raises PayloadLostError when the arena is gone, or this user may not read it."""
        path, name = Path(f"/proc/{reference.pid}/fd/{reference.fd}"), Path(file_name(reference.arena))
        try:
            if path.readlink() != name:  # before it is opened: by then it may be anything
                raise PayloadLostError(_gone(reference, "it has ended"))
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise PayloadLostError(_gone(reference, error.strerror)) from error
        try:
            found = os.fstat(fd)
            private = found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode) and not found.st_mode & 0o077
            if not private or Path(f"/proc/self/fd/{fd}").readlink() != name:
                raise PayloadLostError(_gone(reference, "what lies there is no arena of this user"))
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS or found.st_size < TABLE_BYTES:
                raise PayloadLostError(_gone(reference, "its size may change"))
            self.memory = mmap.mmap(fd, found.st_size)
        except OSError as error:
            os.close(fd)
            raise PayloadLostError(_gone(reference, error.strerror)) from error
        except BaseException:
            os.close(fd)
            raise
        self._fd: int | None = fd
        self._table = memoryview(self.memory)[:TABLE_BYTES].cast("Q")
        self.holds: dict[int, int] = {}  # {slot: how often}
        self.used_at = time.monotonic()

    def hold(self, reference: Reference) -> None:
        """Keep the span from being freed. Raises PayloadLostError when it is no longer lent."""
        assert self._fd is not None  # noqa: S101 - it is open until `close`
        slot = reference.slot
        if slot >= SLOTS or not TABLE_BYTES <= reference.start <= len(self.memory) - reference.pieces()[1]:
            raise PayloadLostError(_gone(reference, "the reference points outside of the arena"))
        held = self.holds.get(slot, 0)
        try:
            if not held:
                fcntl.lockf(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, slot)
        except OSError as error:  # it is being freed at this moment
            raise PayloadLostError(_gone(reference, _FREED)) from error
        if self._table[slot * ENTRY] != reference.generation:
            if not held:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, slot)
            raise PayloadLostError(_gone(reference, _FREED))
        self._table[slot * ENTRY + 1] = 1
        self.holds[slot] = held + 1

    def let_go(self, slot: int) -> None:
        self.used_at = time.monotonic()
        self.holds[slot] -= 1
        if not self.holds[slot]:
            del self.holds[slot]
            if self._fd is not None:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, slot)

    def close(self) -> bool:
        """Let the memory go; False while something still looks at it."""
        self._table.release()
        try:
            self.memory.close()
        except BufferError:
            self._table = memoryview(self.memory)[:TABLE_BYTES].cast("Q")
            return False
        self._close_file()
        return True

    def abandon(self) -> None:
        """In a forked child, which has not inherited the locks: have it keep no more than it looks at."""
        self._close_file()
        with contextlib.suppress(BufferError):
            self._table.release()
            self.memory.close()

    def _close_file(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


_FREED = "its sender has released it"


def _gone(reference: Reference, why: str | None) -> str:
    size = sum(reference.sizes)
    return f"{size:,} bytes in the memory of process {reference.pid} cannot be read: {why}"


class Mappings:
    """The arenas that this process has open. Each is opened once: the locks are dropped with the first one closed."""

    def __init__(self) -> None:
        self._open: dict[bytes, Mapping] = {}  # {arena: mapping}
        self._let_go: deque[tuple[Mapping, int]] = deque()  # (mapping, slot), by any thread
        self._lock = threading.Lock()

    def hold(self, reference: Reference) -> Mapping:
        """The mapping in which the payload is held until it is `let_go`. Raises PayloadLostError."""
        try:
            with self._lock:
                self._collect()
                mapping = self._open.get(reference.arena)
                if mapping is None:
                    mapping = self._open[reference.arena] = Mapping(reference)
                mapping.used_at = time.monotonic()
                mapping.hold(reference)
                return mapping
        finally:
            self._collect_if_free()

    def abandon(self) -> None:
        for mapping in self._open.values():
            mapping.abandon()

    def let_go(self, mapping: Mapping, slot: int) -> None:
        """Tell the sender, unless a thread is at it: then that one does. It may be this very thread, in the middle of it."""
        self._let_go.append((mapping, slot))
        self._collect_if_free()

    def _collect_if_free(self) -> None:
        while self._let_go and self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    def _collect(self) -> None:
        while self._let_go:
            mapping, slot = self._let_go.popleft()
            mapping.let_go(slot)

    def tidy(self, now: float) -> bool:
        """Close what was not used for a while; False when nothing is open."""
        try:
            with self._lock:
                self._collect()
                for arena, mapping in list(self._open.items()):
                    if not mapping.holds and now - mapping.used_at >= _UNUSED_S and mapping.close():
                        del self._open[arena]
                return bool(self._open)
        finally:
            self._collect_if_free()
