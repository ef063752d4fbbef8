"""References to shared memory: they come back as they were sent, and nothing else is taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster_bus.core.errors import InvalidMessageError
from fluster_bus.payloads.arena import LENT, Reference

NUMBERS = st.integers(0, (1 << 31) - 1)
SIZES = st.lists(st.integers(0, 1 << 40), min_size=1, max_size=5)


REFERENCES = st.builds(
    Reference,
    pid=st.integers(1, (1 << 31) - 1),
    fd=NUMBERS,
    arena=st.binary(min_size=16, max_size=16),
    slot=NUMBERS,
    generation=st.integers(1, 1 << 63),
    start=st.integers(0, 1 << 40),
    sizes=SIZES.map(tuple),
)


@given(REFERENCES)
def test_a_reference_comes_back(reference: Reference) -> None:
    data = reference.encode()
    assert data[:1] == LENT
    assert Reference.decode(data) == reference
    for cut in range(1, len(data)):
        with pytest.raises(InvalidMessageError, match="not a reference"):
            Reference.decode(data[:cut])
    with pytest.raises(InvalidMessageError):
        Reference.decode(data + b"x")


@given(st.binary(max_size=100))
def test_anything_else_is_refused_or_harmless(data: bytes) -> None:
    try:
        reference = Reference.decode(LENT + data)
    except InvalidMessageError:
        return
    assert reference.pid > 0
    assert reference.sizes


@pytest.mark.parametrize(
    "wrong",
    [
        {"pid": 0},
        {"pid": 1 << 31},
        {"fd": 1 << 31},
        {"generation": 0},
        {"start": 1 << 60},
        {"sizes": ()},
        {"sizes": (1 << 63, 1 << 63)},
    ],
)
def test_impossible_references_are_refused(wrong: dict[str, object]) -> None:
    good = Reference(1, 3, bytes(16), 0, 1, 65_536, (10,))
    assert Reference.decode(good.encode()) == good
    with pytest.raises(InvalidMessageError, match="not a reference"):
        Reference.decode(good._replace(**wrong).encode())  # type: ignore[arg-type]
