"""Room given away and given back: nothing twice, nothing lost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster_bus.payloads.arena import PAGE_BYTES, Spans

SIZE = 64 * PAGE_BYTES


@given(st.lists(st.integers(0, 20 * PAGE_BYTES) | st.integers(-30, -1), max_size=60))
def test_what_is_taken_is_nobody_elses_until_it_is_given_back(steps: list[int]) -> None:
    """A step takes that many bytes, or gives one of those back that are taken."""
    spans = Spans(SIZE)
    taken: dict[int, int] = {}  # {start: size}
    for step in steps:
        if step >= 0:
            start = spans.take(step)
            if start is None:
                assert all(end - begin < step for begin, end in spans.free())
                continue
            assert start % PAGE_BYTES == 0
            assert 0 <= start <= SIZE - step
            assert start not in taken
            taken[start] = step
        elif taken:
            start = sorted(taken)[step % len(taken)]
            spans.give_back(start, taken.pop(start))
        edges = sorted([(start, _end(start, size)) for start, size in taken.items()] + spans.free())
        assert edges[0][0] == 0
        assert edges[-1][1] == SIZE
        assert all(before[1] == after[0] for before, after in itertools.pairwise(edges))
        assert all(before[1] < after[0] for before, after in itertools.pairwise(spans.free()))


def _end(start: int, size: int) -> int:
    return start + max(-(-size // PAGE_BYTES), 1) * PAGE_BYTES


def test_the_lowest_that_fits_is_taken() -> None:
    spans = Spans(SIZE)
    starts = [spans.take(2 * PAGE_BYTES) for _ in range(4)]
    assert starts == [0, 2 * PAGE_BYTES, 4 * PAGE_BYTES, 6 * PAGE_BYTES]
    spans.give_back(2 * PAGE_BYTES, 2 * PAGE_BYTES)
    assert spans.take(3 * PAGE_BYTES) == 8 * PAGE_BYTES
    assert spans.take(PAGE_BYTES) == 2 * PAGE_BYTES


def test_what_is_free_cannot_be_given_back() -> None:
    spans = Spans(SIZE)
    start = spans.take(PAGE_BYTES)
    assert start is not None
    spans.give_back(start, PAGE_BYTES)
    with pytest.raises(AssertionError, match="is free already"):
        spans.give_back(start, PAGE_BYTES)


def test_there_may_be_no_room_at_all() -> None:
    assert Spans(PAGE_BYTES - 1).take(0) is None
