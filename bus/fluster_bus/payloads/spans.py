"""Room that is given away in pieces and given back: which piece goes where, without touching any memory."""

from __future__ import annotations

from bisect import bisect_left

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
