"""Memory of this process that others on its machine may read: an arena, out of which spans are lent to receivers.

The arena is a file without a name (memfd): it is gone when the last process that has it open is, however that ends.
Receivers open it by way of /proc, which lets the same user do that and no other.

How a span is used is shown by locks on the file, one byte for each slot of the table. A receiver holds a shared lock as
long as it has a view of the span; the kernel drops it when the receiver dies. The sender frees a span once it has no use
for it, and only under an exclusive lock: then the slot's generation is cleared, and a receiver that comes too
late finds that. What is passed on without an answer, as results are, is lent until some receiver has taken it.

Locks of this kind (POSIX) belong to a process, so a forked child does not keep its parent's, and they do not count
within the process: what it holds of its own arena is counted beside them. They are dropped when the process closes *any*
descriptor of the file, so each file is opened once.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import secrets
import struct
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from fluster_bus.core.errors import InvalidMessageError
from fluster_bus.payloads.pickles import Pickled

LENT = b"\x01"  # the first byte
_ALIGNMENT = 64  # of each piece, as arrays like it
_FIXED = struct.Struct("<cII16sIQQI")
_MAX_BYTES = 1 << 47  # a process on x86-64 can address no more
_MAX_NUMBER = (1 << 31) - 1


class Reference(NamedTuple):
    """A pickle, and the buffers beside it, in a process's arena."""

    pid: int
    fd: int  # of the arena, in that process
    arena: bytes  # its name, 16 random bytes
    slot: int  # of the table by which sender and receivers know how it is used
    generation: int  # what the slot says as long as the payload is there
    start: int
    sizes: tuple[int, ...]  # of the pickle, and of each buffer

    def encode(self) -> bytes:
        fixed = _FIXED.pack(LENT, *self[:6], len(self.sizes))
        return fixed + struct.pack(f"<{len(self.sizes)}Q", *self.sizes)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The reference in a message. Raises InvalidMessageError."""
        try:
            mark, pid, fd, arena, slot, generation, start, count = _FIXED.unpack_from(data)
            sizes = struct.unpack(f"<{count}Q", data[_FIXED.size :]) if 8 * count == len(data) - _FIXED.size else ()
        except struct.error as error:
            raise InvalidMessageError(f"{data[:100].hex()} is not a reference to a payload: {error}") from error
        possible = 0 < pid <= _MAX_NUMBER and fd <= _MAX_NUMBER and generation > 0 and start < _MAX_BYTES
        if mark != LENT or not sizes or not possible or sum(sizes) > _MAX_BYTES:
            raise InvalidMessageError(f"{data[:100].hex()} is not a reference to a payload")
        return cls(pid, fd, arena, slot, generation, start, sizes)

    def pieces(self) -> tuple[list[int], int]:
        """Where each piece begins, counted from `start`, and where the last ends."""
        return layout(self.sizes)


def layout(sizes: Sequence[int], start: int = 0) -> tuple[list[int], int]:
    """Where each piece begins when they lie behind each other from `start` on, and where the last ends."""
    offsets = []
    end = start
    for size in sizes:
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        offsets.append(begin)
        end = begin + size
    return offsets, end


PAGE_BYTES = 4096


class Spans:
    """The room from 0 to `size`, in whole pages. The lowest piece that fits is given away: what was touched is used again."""

    def __init__(self, size: int) -> None:
        self.size = size // PAGE_BYTES * PAGE_BYTES
        self._free: list[tuple[int, int]] = (
            [(0, self.size)] if self.size else []
        )  # (start, end), in order, never adjacent

    def take(self, size: int) -> int | None:
        """Where there are `size` bytes, at the start of a page; None when they are nowhere in one piece."""
        wanted = _whole_pages(size)
        for place, (start, end) in enumerate(self._free):
            if end - start >= wanted:
                if end - start == wanted:
                    del self._free[place]
                else:
                    self._free[place] = (start + wanted, end)
                return start
        return None

    def give_back(self, start: int, size: int) -> None:
        """Have what `take(size)` gave at `start` be free again."""
        end = start + _whole_pages(size)
        place = bisect_left(self._free, (start, end))
        before = self._free[place - 1] if place else None
        after = self._free[place] if place < len(self._free) else None
        if (before and before[1] > start) or (after and after[0] < end) or start < 0 or end > self.size:
            raise AssertionError(f"{start}-{end} is given back, and is free already: {before}, {after}")
        if before and before[1] == start:
            start, place = before[0], place - 1
            del self._free[place]
        if after and after[0] == end:
            end = after[1]
            del self._free[place]
        self._free.insert(place, (start, end))

    def free(self) -> list[tuple[int, int]]:
        """The free pieces as (start, end), in order."""
        return list(self._free)


def _whole_pages(size: int) -> int:
    return max(-(-size // PAGE_BYTES), 1) * PAGE_BYTES


SLOTS = 4096
ENTRY = 2  # numbers of a slot: its generation (0: not lent), and 1 once a receiver has taken it
TABLE_BYTES = SLOTS * ENTRY * 8
# Systems without it have no arenas either.
# A process that has the arena mapped can rely on its size.
SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)
UNTAKEN_S = 60.0  # how long what was sent waits for its receiver
_COOL_S = 10.0  # after which unused pages go back to the system
_LOOKED_AT = 4  # of the spans that were not free the last time, at each new one


def file_name(arena: bytes) -> str:
    """What /proc calls the file of an arena."""
    return f"/memfd:fluster-{arena.hex()} (deleted)"


@dataclass(eq=False, slots=True)
class Span:
    """A payload in the arena."""

    reference: Reference
    size: int
    until_taken: bool  # it is lent on when its sender lets go of it, until a receiver has taken it
    over_at: float = 0.0
    holds: int = 0  # by this process


class Lent(bytes):
    """The reference to a span, as it travels. The span is lent for as long as this object lives."""

    arena: Arena
    span: Span
    kept: object = None  # lives as long as it does

    @classmethod
    def of(cls, arena: Arena, span: Span) -> Self:
        lent = cls(span.reference.encode())
        lent.arena, lent.span = arena, span
        return lent

    def __del__(self) -> None:
        # No lock: it may be taken by this very thread, in the middle of which garbage is collected.
        self.arena.over.append(self.span)

    def __reduce__(self) -> tuple[type[bytes], tuple[bytes]]:
        return bytes, (bytes(self),)


class Arena:
    """The memory that this process lends."""

    def __init__(self, size: int) -> None:
        self.id = secrets.token_bytes(16)
        self.fd = os.memfd_create(f"fluster-{self.id.hex()}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(self.fd, 0o600)
        self._spans = Spans(size)
        os.ftruncate(self.fd, TABLE_BYTES + self._spans.size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
        self.memory = mmap.mmap(self.fd, TABLE_BYTES + self._spans.size)
        self._table = memoryview(self.memory)[:TABLE_BYTES].cast("Q")
        self._slots = list(range(SLOTS))
        self._generations = itertools.count(1)
        self.over: deque[Span] = deque()  # those that their sender has released, by any thread
        self._let_go: deque[Span] = deque()  # what this process holds no more, by any thread
        self._lent: dict[int, Span] = {}  # {slot: span}
        self._waiting: deque[Span] = deque()  # those that are over and were not free yet
        self._touched = 0  # nothing behind it has been written
        self._last_lent = 0.0
        self._lock = threading.Lock()

    def abandon(self) -> None:
        """In a forked child: have it keep no memory of its parent's."""
        self._table.release()
        with contextlib.suppress(BufferError):  # the child still looks at it
            self.memory.close()
        os.close(self.fd)

    # ---- lending ----------------------------------------------------------------------------------------

    def lend(self, pickled: Pickled, *, until_taken: bool = False) -> Lent | None:
        """A copy of `pickled` for others to read; None when there is no room."""
        sizes = (pickled.size, *(buffer.nbytes for buffer in pickled.buffers))
        offsets, size = layout(sizes)
        span = self._take(sizes, size, until_taken=until_taken)
        if span is None:
            return None
        lent = Lent.of(self, span)
        start = span.reference.start
        with memoryview(self.memory) as memory:
            position = start
            for part in pickled.parts:
                memory[position : position + len(part)] = part
                position += len(part)
            for buffer, offset in zip(pickled.buffers, offsets[1:], strict=True):
                memory[start + offset : start + offset + buffer.nbytes] = buffer
        return lent

    def _take(self, sizes: tuple[int, ...], size: int, *, until_taken: bool) -> Span | None:
        with self._lock:
            now = self._last_lent = time.monotonic()
            self._collect()
            self._free_some(now, _LOOKED_AT)
            start = self._spans.take(size) if self._slots else None
            if start is None:
                self._free_some(now, len(self._waiting))
                start = self._spans.take(size) if self._slots else None
            if start is None:
                return None
            self._touched = max(self._touched, start + size)
            slot, generation = self._slots.pop(), next(self._generations)
            reference = Reference(os.getpid(), self.fd, self.id, slot, generation, TABLE_BYTES + start, sizes)
            span = self._lent[slot] = Span(reference, size, until_taken)
            self._table[slot * ENTRY + 1] = 0
            self._table[slot * ENTRY] = generation
            return span

    # ---- what this process holds itself -----------------------------------------------------------------

    def hold(self, reference: Reference) -> Span | None:
        """The span, which stays until it is `let_go`; None when it is no longer lent."""
        with self._lock:
            span = self._lent.get(reference.slot)
            if span is None or span.reference != reference:
                return None
            span.holds += 1
            self._table[reference.slot * ENTRY + 1] = 1
            return span

    def let_go(self, span: Span) -> None:
        self._let_go.append(span)  # no lock, as for what is over

    # ---- freeing ----------------------------------------------------------------------------------------

    def _collect(self) -> None:
        while self._let_go:
            self._let_go.popleft().holds -= 1
        while self.over:
            span = self.over.popleft()
            span.over_at = time.monotonic()
            self._waiting.append(span)

    def _free_some(self, now: float, count: int) -> None:
        """Look at that many of the spans that are over."""
        for _ in range(min(count, len(self._waiting))):
            span = self._waiting.popleft()
            if not self._try_free(span, now):
                self._waiting.append(span)

    def _try_free(self, span: Span, now: float) -> bool:
        slot = span.reference.slot
        if span.holds:
            return False
        if span.until_taken and not self._table[slot * ENTRY + 1] and now - span.over_at < UNTAKEN_S:
            return False
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
        except OSError:  # held
            return False
        self._table[slot * ENTRY] = 0
        fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, slot)
        del self._lent[slot]
        self._slots.append(slot)
        self._spans.give_back(span.reference.start - TABLE_BYTES, span.size)
        return True

    def tidy(self, now: float) -> bool:
        """Free what is over, and after a while the pages; False when there is nothing left to look after."""
        with self._lock:
            self._collect()
            self._free_some(now, len(self._waiting))
            if now - self._last_lent >= _COOL_S:
                self._cool()
            return bool(self._lent or self._touched)

    def lent(self) -> tuple[Span, ...]:
        """What is lent now, or was and has not been found free yet."""
        with self._lock:
            return tuple(self._lent.values())

    def _cool(self) -> None:
        for start, end in self._spans.free():
            if start < self._touched:
                self.memory.madvise(mmap.MADV_REMOVE, TABLE_BYTES + start, min(end, self._touched) - start)
        ends = (span.reference.start - TABLE_BYTES + span.size for span in self._lent.values())
        self._touched = max(ends, default=0)

    def untaken(self) -> int:
        """How many payloads wait for their receivers, of those that were passed on."""
        with self._lock:
            self._collect()
            return sum(span.until_taken and not self._table[span.reference.slot * ENTRY + 1] for span in self._waiting)
