"""What calls carry: a pickle, as long as it is small; else what tells where it lies.

The first byte tells the form:

    0x80  the pickle itself
    0x01  where it lies in memory of the sender's that processes of its machine can read (arenas.py)
    0x02  the pickle and the buffers beside it, one after the other (no copy is made of the buffers when it is read)
    0x03  the SHA-256 of one of the two above, among the objects of the namespace: for what no message can carry

All of them are `bytes`, so that code which passes a payload on need not know.
"""

from __future__ import annotations

import pickle
import struct
import threading
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

from fluster_bus.core.errors import InvalidMessageError
from fluster_bus.payloads import arenas, pickles
from fluster_bus.payloads.arena import LENT, Lent, Reference, layout
from fluster_bus.payloads.pickles import LARGE_BYTES, Pickled
from fluster_bus.storage.objects import ObjectStore

_PICKLE, _LENT, _JOINED, _STORED = 0x80, 0x01, 0x02, 0x03
_COUNT = struct.Struct("<BI")  # form, number of pieces; their sizes follow
_SHA256_BYTES = 32
_PLACE = "place-"


def encode(value: Any) -> bytes:
    """The payload of `value`. Raises TypeError, naming what cannot be pickled.

    What is large is lent to its readers, for as long as the payload lives: it has to be `spelled_out` for receivers
    elsewhere.
    """
    pickled = pickles.dump(value)
    if isinstance(pickled, bytes):
        if len(pickled) < LARGE_BYTES:
            return _keeping(pickled) if KeepingBytes.in_use else pickled
        pickled = Pickled([pickled], [])
    payload = arenas.lend(pickled) or joined(pickled)
    return _keeping(payload) if KeepingBytes.in_use else payload


class KeepingBytes(bytes):
    """A payload that keeps alive what it only names."""

    in_use: ClassVar[bool] = False  # whether there was any: small calls need not look further
    kept: list[object]

    def __reduce__(self) -> tuple[type[bytes], tuple[bytes]]:
        return bytes, (bytes(self),)


class _Named(threading.local):
    """What was named by what this thread is pickling."""

    def __init__(self) -> None:
        self.things: list[weakref.ref[object]] = []  # weak: what is pickled otherwise keeps nothing alive


_named = _Named()


def keep_alive(thing: object) -> None:
    """For `__reduce__`: have `thing` live as long as the payload into which it is being pickled."""
    KeepingBytes.in_use = True
    _named.things.append(weakref.ref(thing))


def _keeping(payload: bytes) -> bytes:
    named, _named.things = _named.things, []
    things = [thing for each in named if (thing := each()) is not None]
    if not things:
        return payload
    kept = payload if isinstance(payload, Lent) else KeepingBytes(payload)
    kept.kept = things
    return kept


def encode_whole(value: object) -> bytes:
    """The payload of `value` that holds everything itself, for any reader. Raises as `encode` does."""
    pickled = pickles.dump(value)
    payload = pickled if isinstance(pickled, bytes) else joined(pickled)
    return _keeping(payload) if KeepingBytes.in_use else payload


class Encoded(bytes):
    """Bytes that travel as they are: what reads them knows what they mean."""


def encode_for(value: object, inbox: str) -> bytes:
    """The payload of `value` for the owner of that `inbox`. Raises as `encode` does.

    What is lent stays until the receiver has taken it, for a minute at most, however soon the payload goes.
    """
    if type(value) is Encoded:
        return bytes(value)
    pickled = pickles.dump(value)
    if isinstance(pickled, bytes):
        if len(pickled) < LARGE_BYTES:
            return pickled
        pickled = Pickled([pickled], [])
    place = arenas.place()
    lent = arenas.lend(pickled, until_taken=True) if place is not None and f".{_PLACE}{place}." in inbox else None
    return lent or joined(pickled)


def inbox_here(inbox: str) -> str:
    """An inbox of that name, and of one that tells with whom this process can share memory."""
    place = arenas.place()
    return inbox if place is None else f"{inbox}.{_PLACE}{place}"


def decode(payload: bytes) -> Any:
    """What `encode` was given; large arrays are read-only. Only for bytes from a sender that may run code here.

    Raises PayloadLostError when its sender lends it no more, and InvalidMessageError for one that is stored: `fetched`
    has it.
    """
    form = payload[0]
    if form == _PICKLE:
        return pickle.loads(payload)
    if form == _LENT:
        return arenas.read(payload)
    if form == _JOINED:
        stream, *buffers = _pieces(payload)
        return pickle.loads(stream, buffers=buffers)
    if form == _STORED:
        raise InvalidMessageError("a payload that lies among the objects of the namespace was not fetched")
    return pickle.loads(payload)


# ---- in memory that is shared ---------------------------------------------------------------------------


def is_lent(payload: bytes) -> bool:
    """True for one that arrived and is to be `held`."""
    return payload[:1] == LENT


def size_of(payload: bytes) -> int:
    """How many bytes a payload has, wherever they lie."""
    return sum(Reference.decode(payload).sizes) if is_lent(payload) else len(payload)


def held(payload: bytes) -> bytes:
    """A payload that arrived: what its sender lends is held from now on, for as long as the answer lives."""
    return arenas.held(payload) if payload[:1] == LENT else payload


def is_lost(payload: bytes) -> bool:
    """True for one that was to be `held`, and could not be: its sender has ended, or lends it no more."""
    return is_lent(payload) and not isinstance(payload, arenas.Held)


def held_or_nothing(payload: bytes) -> bytes:
    """As `held`; empty when it cannot be held here."""
    found = held(payload)
    return b"" if is_lost(found) else found


def small_or_lent(payload: bytes) -> bytes:
    """What can be sent to many: the payload itself or a reference to it; empty when it is too large for that."""
    return bytes(payload) if isinstance(payload, Lent) or len(payload) < LARGE_BYTES else b""


def spelled_out(payload: bytes) -> bytes:
    """The payload for receivers elsewhere."""
    return joined(arenas.spelled_out(payload)) if isinstance(payload, Lent) else payload


# ---- in one piece ---------------------------------------------------------------------------------------


def joined(pickled: Pickled) -> bytes:
    """The payload that holds everything itself."""
    if not pickled.buffers:
        return bytes(pickled.joined())
    sizes = [pickled.size, *(buffer.nbytes for buffer in pickled.buffers)]
    head = _COUNT.pack(_JOINED, len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)
    offsets, _end = layout(sizes, len(head))
    pieces: list[Any] = [head]
    end = len(head)
    for offset, size, piece in zip(offsets, sizes, (pickled.parts, *([each] for each in pickled.buffers)), strict=True):
        pieces += [bytes(offset - end), *piece]
        end = offset + size
    return b"".join(pieces)


def _pieces(payload: bytes) -> Iterator[memoryview]:
    try:
        _form, count = _COUNT.unpack_from(payload)
        sizes = struct.unpack_from(f"<{count}Q", payload, _COUNT.size)
    except struct.error as error:
        raise InvalidMessageError(f"a payload of {len(payload):,} bytes is cut off: {error}") from error
    offsets, end = layout(sizes, _COUNT.size + 8 * count)
    if end != len(payload):
        raise InvalidMessageError(f"a payload of {len(payload):,} bytes says that it has {end:,}")
    view = memoryview(payload)
    return (view[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True))


# ---- among the objects ----------------------------------------------------------------------------------


def is_stored(payload: bytes) -> bool:
    """True for a payload that must be `fetched` before it can be decoded."""
    return payload[:1] == b"\x03"


async def stored(payload: bytes, store: ObjectStore) -> bytes:
    """What to send instead of a payload that no message can carry. Raises ObjectTooLargeError, StorageError, BusError."""
    return bytes((_STORED,)) + bytes.fromhex(await store.put(payload))


async def fetched(payload: bytes, store: ObjectStore) -> bytes:
    """The payload that was `stored`. Raises ObjectNotFoundError, ObjectCorruptError, StorageError, BusError."""
    if len(payload) != 1 + _SHA256_BYTES:
        raise InvalidMessageError(f"{payload[:100].hex()} names no object: its SHA-256 has {_SHA256_BYTES} bytes")
    found = await store.get(payload[1:].hex())
    if is_stored(found):
        raise InvalidMessageError(f"object {payload[1:].hex()} names another, and is none itself")
    return found
