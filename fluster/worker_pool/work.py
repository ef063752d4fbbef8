"""The items of one `map`, which travel in chunks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from fluster.actors.protocol.failures import decode_failure
from fluster.worker_pool.dispatch import MAX_ITEMS, TAIL_S, Pace
from fluster_bus.core import codec
from fluster_bus.payloads import payloads
from fluster_bus.storage.objects import MAX_OBJECT_BYTES

_MAX_BLOCK = 128 << 10  # bytes, unless one item has more
_MAX_CHUNK = MAX_OBJECT_BYTES // 2  # the same where `chunksize` was given: more could not be carried with the function
_BATCH_MEMORY = 0.7  # a few chunks tell how long the items take


class Block:
    """Some items, pickled together."""

    __slots__ = ("payload", "size", "start", "taken")

    def __init__(self, start: int, size: int, payload: bytes) -> None:
        self.start = start  # the first item's index in the batch
        self.size = size
        self.payload = payload
        self.taken = 0


def blocks_of(items: Sequence[object], start: int, chunksize: int | None) -> Iterator[Block]:
    """The items pickled, `chunksize` together if it is given. Raises TypeError for what cannot be pickled."""
    step = chunksize or MAX_ITEMS
    for first in range(0, len(items), step):
        yield from _pickled(items[first : first + step], start + first, _MAX_BLOCK if chunksize is None else _MAX_CHUNK)


def _pickled(items: Sequence[object], start: int, most: int) -> Iterator[Block]:
    payload = payloads.encode_whole(items)
    if len(payload) > most and len(items) > 1:
        half = len(items) // 2
        yield from _pickled(items[:half], start, most)
        yield from _pickled(items[half:], start + half, most)
    else:
        yield Block(start, len(items), payload)


class Outcome:
    """The results of some consecutive items of a batch. They are read by the thread that asks first."""

    def __init__(
        self,
        start: int,
        stop: int,
        *,
        values: Sequence[bytes] = (),
        failures: dict[int, bytes] | None = None,
        error: BaseException | None = None,
        cancelled: bool = False,
    ) -> None:
        self.start = start
        self.stop = stop
        self.cancelled = cancelled
        self._values: Any = values
        self._failures = failures or {}  # {index in the batch: what it raised}
        self._error = error
        self._lock = threading.Lock()
        self._read = False
        self._unreadable: dict[int, Exception] = {}  # {index: why its value cannot be read here}

    @property
    def is_whole(self) -> bool:
        """True when all items gave a value, as far as they were read."""
        return self._error is None and not self._failures and not self.cancelled and not self._unreadable

    def is_ok(self, index: int) -> bool:
        """True when that item gave a value."""
        return self._error is None and index not in self._failures

    @property
    def failed(self) -> int:
        """How many items did not give a value."""
        return self.stop - self.start if self._error is not None or self.cancelled else len(self._failures)

    def values(self) -> list[Any]:
        """The values of all items; None stands for those that gave none, or none that can be read here."""
        with self._lock:
            if not self._read:
                self._values = self._read_values(self._values)
                self._read = True
        values: list[Any] = self._values
        return values

    def value(self, index: int) -> Any:
        """What that item gave. Raises why it cannot be read here."""
        value = self.values()[index - self.start]
        if index in self._unreadable:
            raise self._unreadable[index]
        return value

    def _read_values(self, parts: Sequence[bytes]) -> list[Any]:
        read = [_read_part(part) for part in parts]
        missing = self.stop - self.start - sum(len(each) for each in read if isinstance(each, list))
        broken = [each for each in read if isinstance(each, Exception)]
        if len(broken) not in (0, missing):
            raise broken[0]  # an earlier version put many values into it: it is not known which is to blame
        values: list[Any] = []
        for each in read:
            if isinstance(each, list):
                values += each
            else:
                self._unreadable[self.start + len(values)] = each
                values.append(None)
        return values

    def error(self, index: int) -> BaseException | None:
        """What that item raised."""
        if self._error is not None:
            return self._error
        failure = self._failures.get(index)
        return None if failure is None else decode_failure(failure)


def _read_part(part: bytes) -> list[Any] | Exception:
    try:
        values: list[Any] = codec.decode(part)
    except Exception as error:
        error.add_note("the function returned, but what it returned cannot be unpickled here")
        return error
    return values


class Slice:
    """Consecutive items of one block: what one call to a worker carries."""

    __slots__ = ("batch", "block", "deaths", "losses", "pace", "size", "start")

    def __init__(self, batch: Batch, block: Block, start: int, size: int, *, losses: int = 0, deaths: int = 0) -> None:
        self.batch = batch
        self.pace = batch.pace
        self.block = block
        self.start = start  # in the block
        self.size = size
        self.losses = losses
        self.deaths = deaths

    def __str__(self) -> str:
        return f"item {self.first} of the batch" if self.size == 1 else f"items {self.first} to {self.stop - 1}"

    @property
    def first(self) -> int:
        """The index in the batch of its first item."""
        return self.block.start + self.start

    @property
    def stop(self) -> int:
        """The index behind its last item."""
        return self.first + self.size

    def parts(self) -> list[Slice]:
        return [self._part(offset, 1) for offset in range(self.size)]

    def rest(self, ran: int) -> Slice:
        """What is left when so many were run."""
        return self._part(ran, self.size - ran)

    def _part(self, offset: int, size: int) -> Slice:
        return Slice(self.batch, self.block, self.start + offset, size, losses=self.losses, deaths=self.deaths)

    def fail(self, error: BaseException) -> int:
        """End its items; they count with the batch."""
        self.batch.on_outcome(Outcome(self.first, self.stop, error=error))
        return 0


class Futures(Protocol):
    """The futures of a batch's items, as far as they were asked for."""

    def begin(self, start: int, size: int) -> int:
        """Begin items; how many of them are wanted, up to the first that was cancelled."""
        ...


class Batch:
    """The items of one `map`: a source that gives slices of its blocks. Lives on the loop."""

    def __init__(
        self,
        function: bytes,
        on_outcome: Callable[[Outcome], object],
        *,
        chunksize: int | None,
        futures: Futures | None = None,
        is_complete: bool,
    ) -> None:
        self.function = function
        self.pace = Pace(_BATCH_MEMORY)
        self.on_outcome = on_outcome
        self.futures = futures
        self.items = 0  # not begun
        self.is_closed = False  # no more is wanted
        self._chunksize = chunksize
        self._is_complete = is_complete  # all its blocks come at once
        self._blocks: deque[Block] = deque()

    def add(self, blocks: Iterable[Block]) -> int:
        """Take blocks in; how many items they have."""
        self._blocks.extend(blocks := list(blocks))
        count = sum(block.size for block in blocks)
        self.items += count
        return count

    def next_size(self, workers: int) -> int:
        if self.is_closed:
            self.cancel()
        if not self._blocks:
            return 0
        block = self._blocks[0]
        left = block.size - block.taken
        if self._chunksize is not None:
            return left
        size = self.pace.chunk()
        if self._is_complete:  # towards the end, all workers have something to do
            size = min(size, max(self._share(workers), self.pace.chunk(TAIL_S)))
        return min(size, left)

    def is_ending(self, workers: int) -> bool:
        return self._is_complete and self._chunksize is None and self._share(workers) < self.pace.chunk()

    def _share(self, workers: int) -> int:
        """Items for each of two slices that each worker has."""
        return -(-self.items // (2 * max(workers, 1)))

    def take(self, size: int) -> Slice | None:
        block = self._blocks[0]
        first = block.taken
        wanted = size if self.futures is None else self.futures.begin(block.start + first, size)
        passed = wanted or 1  # a cancelled one is passed over
        block.taken += passed
        self.items -= passed
        if block.taken == block.size:
            self._blocks.popleft()
        if wanted:
            return Slice(self, block, first, wanted)
        self.on_outcome(Outcome(block.start + first, block.start + first + 1, cancelled=True))
        return None

    def cancel(self) -> None:
        """Take back what has not begun."""
        self._drop(lambda start, stop: Outcome(start, stop, cancelled=True))

    def fail(self, error: BaseException) -> int:
        """End what has not begun; it counts as it is reported."""
        self._drop(lambda start, stop: Outcome(start, stop, error=error))
        return 0

    def _drop(self, outcome: Callable[[int, int], Outcome]) -> None:
        blocks, self._blocks = self._blocks, deque()
        self.items = 0
        self.is_closed = True
        for block in blocks:
            self.on_outcome(outcome(block.start + block.taken, block.start + block.size))
