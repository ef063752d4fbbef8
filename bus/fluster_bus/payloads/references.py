"""How a message tells where in the memory of its sender a payload lies."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple, Self

from fluster_bus.core.errors import InvalidMessageError

LENT = b"\x01"  # the first byte
_ALIGNMENT = 64  # of each piece, as arrays like it
_FIXED = struct.Struct("<cII16sIQQI")
_MAX_BYTES = 1 << 47  # there is no more memory that a process could name
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
