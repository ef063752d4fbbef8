"""Pickling that copies nothing large: what is large stays where it is until it is written to where it goes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any, NamedTuple

from fluster_bus.core import codec
from fluster_bus.core.codec import ByValuePickler

# Of a buffer that travels beside the pickle; smaller ones are part of it, as they are of any pickle.
LARGE_BYTES = 32 << 10
_PROTOCOL = pickle.HIGHEST_PROTOCOL
# (last opcode, bytes of the length behind it) after which the pickler writes a large object as it lies in memory.
_NUMBERS = frozenset({type(None), bool, int, float})
_TEXTS = frozenset({bytes, str})
_RAW = ((b"B", 4), (b"X", 4), (b"\x8e", 8), (b"\x8d", 8), (b"\x96", 8))


class Pickled(NamedTuple):
    """A pickle in pieces, and the buffers that travel beside it. Both may be the user's own memory: copy them at once."""

    parts: list[Any]  # bytes, bytearray; the large ones are not copies
    buffers: list[memoryview]

    @property
    def size(self) -> int:
        return sum(map(len, self.parts))

    def joined(self) -> bytes:
        """The pickle in one piece."""
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)


class _Sink:
    __slots__ = ("write",)

    def __init__(self, write: Callable[[object], object]) -> None:
        self.write = write


def _keeper(buffers: list[memoryview]) -> Callable[[PickleBuffer], bool]:
    def keep(buffer: PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < LARGE_BYTES:
            return True  # into the pickle
        buffers.append(view)
        return False

    return keep


class _Writer:
    """A pickler that is used again: to make one takes longer than to pickle a small call."""

    __slots__ = ("buffers", "clear_memo", "dump", "parts")

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.buffers: list[memoryview] = []
        pickler = pickle.Pickler(_Sink(self.parts.append), _PROTOCOL, buffer_callback=_keeper(self.buffers))
        self.dump = pickler.dump
        self.clear_memo = pickler.clear_memo


_idle: list[_Writer] = []  # those that no thread pickles with


def dump(value: Any) -> bytes | Pickled:
    """A pickle of `value`, as `codec.encode` makes it, in pieces when it is large. Raises TypeError."""
    kind = type(value)
    if kind in _NUMBERS or (kind in _TEXTS and len(value) < LARGE_BYTES):  # as most results: they name nothing
        return pickle.dumps(value, _PROTOCOL)
    try:
        pickled = _dump(value)
        mentions = codec.mentions_own_modules if type(pickled) is bytes else _mention_own_modules
        if not mentions(pickled):  # type: ignore[arg-type]  # each is given what it takes
            return pickled
    except Exception:  # noqa: S110 - any failure means the same: cloudpickle is asked, and raises if it can't
        pass
    try:
        return _dump_with(ByValuePickler, value)
    except Exception as error:
        raise codec.cannot_be_pickled(value, error) from error


def _dump(value: Any) -> bytes | Pickled:
    try:
        writer = _idle.pop()
    except IndexError:  # by other threads, or since pickling runs user code that pickles
        writer = _Writer()
    writer.dump(value)  # one that failed is not used again
    writer.clear_memo()
    parts, buffers = writer.parts, writer.buffers
    if len(parts) == 1 and not buffers:
        pickled = parts.pop()
    else:
        pickled = Pickled(parts.copy(), buffers.copy())
        parts.clear()
        buffers.clear()
    _idle.append(writer)
    return pickled  # type: ignore[no-any-return]  # a pickle's only piece is bytes


def _dump_with(pickler: Callable[..., Any], value: Any) -> bytes | Pickled:
    parts: list[Any] = []
    buffers: list[memoryview] = []
    pickler(_Sink(parts.append), protocol=_PROTOCOL, buffer_callback=_keeper(buffers)).dump(value)
    pickled = Pickled(parts, buffers)
    return pickled if buffers or len(parts) > 1 else pickled.joined()


def _mention_own_modules(pickled: Pickled) -> bool:
    before = b""
    for part in pickled.parts:
        if not _is_raw(before, part) and codec.mentions_own_modules(part):
            return True
        before = part
    return False


def _is_raw(before: bytes, part: bytes) -> bool:
    """True for a piece that is some user's bytes or text: however large, it names no module."""
    return any(before[-width - 1 :] == opcode + len(part).to_bytes(8, "little")[:width] for opcode, width in _RAW)
