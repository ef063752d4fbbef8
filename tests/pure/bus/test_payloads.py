"""What calls carry, large or small: what goes in comes out, and nothing large is copied on the way that need not be."""

from __future__ import annotations

import array
import asyncio
import hashlib
import pickle
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster_bus.core import codec
from fluster_bus.core.errors import InvalidMessageError
from fluster_bus.payloads import payloads, pickles
from fluster_bus.payloads.pickles import LARGE_BYTES, Pickled


class Block:
    """As arrays do it: its memory travels beside the pickle."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __reduce_ex__(self, protocol: Any) -> tuple[type[Block], tuple[Any]]:
        assert protocol == pickle.HIGHEST_PROTOCOL
        return Block, (pickle.PickleBuffer(self.data),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Block) and bytes(self.data) == bytes(other.data)

    def __hash__(self) -> int:
        return hash(bytes(self.data))


SIZES = st.sampled_from([0, 1, 100, LARGE_BYTES - 1, LARGE_BYTES, 65_535, 65_536, 65_537, 200_000])
LEAVES = (
    st.integers()
    | SIZES.map(bytes)
    | SIZES.map(bytearray)
    | SIZES.map(lambda size: "ä" * size)
    | SIZES.map(lambda size: Block(bytearray(size)))
    | SIZES.map(lambda size: Block(b"x" * size))
    | SIZES.map(lambda size: list(range(size // 10)))
)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))


@given(VALUES)
def test_values_of_any_size_come_back(value: object) -> None:
    in_one_piece = payloads.encode_for(value, "_INBOX.x.1")
    assert type(in_one_piece) is bytes
    assert payloads.decode(in_one_piece) == value
    payload = payloads.encode(value)
    assert payloads.decode(payload) == value
    assert payloads.decode(payloads.held(payload)) == value
    assert payloads.decode(pickle.loads(pickle.dumps(payload))) == value
    assert payloads.spelled_out(payload) == in_one_piece


@given(st.integers() | st.text(max_size=50) | st.lists(st.binary(max_size=50)))
def test_small_payloads_are_plain_pickles(value: object) -> None:
    assert payloads.encode(value) == pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def test_large_bytes_are_not_copied_to_be_pickled() -> None:
    data, more = bytes(1 << 20), bytearray(1 << 20)
    pickled = pickles.dump([data, more, Block(more)])
    assert isinstance(pickled, Pickled)
    assert any(part is data for part in pickled.parts)
    assert any(part is more for part in pickled.parts)
    (beside,) = pickled.buffers
    assert beside.obj is more
    assert pickled.size < (2 << 20) + 1_000


def test_buffers_come_as_views_of_the_payload() -> None:
    payload = payloads.encode_for(Block(array.array("d", range(10_000))), "")
    block = payloads.decode(payload)
    assert block.data.readonly
    assert block.data.obj is payload
    assert memoryview(block.data).cast("d")[9_999] == 9_999


@pytest.mark.parametrize("filler", [b"", bytes(1 << 20), bytearray(b"__main__" * 100_000)])
def test_what_a_script_defines_is_taken_along_beside_large_data(filler: bytes | bytearray) -> None:
    def local() -> int:
        return 5

    local.__module__ = "__main__"
    function, same = payloads.decode(payloads.encode([local, filler]))
    assert (function(), same) == (5, filler)


def test_the_name_of_the_main_module_in_large_data_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloudpickle.Pickler", None)
    for text in (b"__main__" * 100_000, bytearray(b"__main__" * 100_000), "__main__" * 100_000):
        assert payloads.decode(payloads.encode([1, text])) == [1, text]


def test_pickling_may_pickle() -> None:
    class Nested:
        def __reduce__(self) -> tuple[Any, tuple[Any]]:
            return bytes, (payloads.encode([b"x" * 100_000]),)

    assert payloads.decode(payloads.decode(payloads.encode(Nested()))) == [b"x" * 100_000]


def test_what_cannot_be_pickled_is_named_and_leaves_nothing_behind() -> None:
    for _ in range(2):
        with pytest.raises(TypeError, match="lock"):
            payloads.encode([bytes(100_000), Block(bytes(100_000)), threading.Lock()])
        assert payloads.encode(3) == codec.encode(3)


def test_what_was_pickled_is_not_kept_alive() -> None:
    gone = threading.Event()

    class Told(bytearray):
        def __del__(self) -> None:
            gone.set()

    block = Told(100_000)
    payloads.encode([Block(block)])
    del block
    assert gone.is_set()


@pytest.mark.parametrize("cut", [1, 4, 12, 30, 20_000])
def test_what_is_cut_off_is_refused(cut: int) -> None:
    payload = payloads.encode_for(Block(bytes(40_000)), "")
    with pytest.raises(InvalidMessageError, match=r"cut off|says that it has"):
        payloads.decode(payload[:cut])


def test_a_stored_payload_is_told_from_others() -> None:
    assert not payloads.is_stored(payloads.encode(1))
    assert not payloads.is_stored(b"")
    assert payloads.is_stored(b"\x03" + bytes(32))
    with pytest.raises(InvalidMessageError, match="not fetched"):
        payloads.decode(b"\x03" + bytes(32))


class _Objects:
    """What a tenant has put into the object store."""

    def __init__(self, *payloads_: bytes) -> None:
        self.held = {hashlib.sha256(each).hexdigest(): each for each in payloads_}

    async def get(self, name: str) -> bytes:
        return self.held[name]


async def _fetched(inner: bytes) -> bytes:
    reference = b"\x03" + hashlib.sha256(inner).digest()
    return await payloads.fetched(reference, _Objects(inner))  # type: ignore[arg-type]


def test_an_object_that_names_another_is_refused() -> None:
    plain = codec.encode([1, 2, 3])
    assert asyncio.run(_fetched(plain)) == plain
    with pytest.raises(InvalidMessageError, match="names another"):
        asyncio.run(_fetched(b"\x03" + bytes(32)))
    with pytest.raises(InvalidMessageError, match="names no object"):
        asyncio.run(payloads.fetched(b"\x03" + bytes(31), _Objects()))  # type: ignore[arg-type]
