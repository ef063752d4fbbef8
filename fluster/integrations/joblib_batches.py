"""joblib's batches of calls on their way to a worker and back, with large arrays sent once."""

from __future__ import annotations

import io
import pickle
import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from fluster.cluster import Cluster, Ref
from fluster_bus.core import codec
from fluster_bus.core.codec import ByValuePickler

_KEPT_BYTES = 1 << 30  # of arrays that are put; beyond them the least recently used are put again if need be

Share = Callable[[object], Ref[object] | None]


def encode_batch(batch: object, share: Share) -> bytes:
    """A pickle of the batch, in which a Ref stands for each object that `share` has one for. Raises TypeError.

    What it has none for is part of the pickle, so that arrays can be written to where they arrive, as with joblib's
    own.
    """
    stream = io.BytesIO()
    try:
        _SharingPickler(stream, share).dump(batch)
    except Exception as error:
        raise codec.cannot_be_pickled(batch, error) from error
    return stream.getvalue()


class Batches:
    """What a process knows of the batches that it runs."""

    in_use: ClassVar[bool] = False  # whether it runs any: then it is a worker


class _Interrupted(NamedTuple):
    """A call raised KeyboardInterrupt, which is not a failure of a task that others are to see, but joblib's own way."""

    args: tuple[object, ...]


def run_batch(pickled: bytes) -> bytes:
    """What the batch gives, pickled, at a worker. Raises what one of its calls raises."""
    if not Batches.in_use:
        from fluster.integrations.joblib import register

        Batches.in_use = True
        register()  # its calls may name the backend too
    try:
        return codec.encode(pickle.loads(pickled)())
    except KeyboardInterrupt as interrupt:
        return codec.encode(_Interrupted(interrupt.args))


def decode_results(pickled: bytes) -> object:
    """What `run_batch` gave, at home. Raises KeyboardInterrupt if one of its calls did."""
    results = codec.decode(pickled)
    if isinstance(results, _Interrupted):
        raise KeyboardInterrupt(*results.args)
    return results


def _get(ref: Ref[object]) -> object:
    return ref.get()


class _SharingPickler(ByValuePickler):
    def __init__(self, stream: io.BytesIO, share: Share) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self._share = share

    def reducer_override(self, value: object) -> object:
        ref = self._share(value)
        return (_get, (ref,)) if ref is not None else super().reducer_override(value)


class _Put(NamedTuple):
    array: weakref.ref[object]
    ref: Ref[object]
    size: int  # bytes


class SharedArrays:
    """Large arrays that were put, by their identity: who changes one meanwhile must not expect that to be seen.

    Each is freed, as soon as no task needs it any more, after its array has gone, when there are too many of them, or
    by `clear`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._put: OrderedDict[int, _Put] = OrderedDict()  # {id: array}, the least recently used first
        self._size = 0
        # An array may go in any thread at any time, also where the loop runs that the lock's holder waits for.
        self._gone: deque[tuple[int, weakref.ref[object]]] = deque()

    def of(self, value: Any, least_bytes: int, cluster: Callable[[], Cluster]) -> Ref[Any] | None:
        """The Ref that stands for `value`; None when that is not an array, or a smaller one."""
        if not _is_large_array(value, least_bytes):
            return None
        key = id(value)
        with self._lock:
            self._forget_gone()
            known = self._put.get(key)
            if known is not None and known.array() is value:
                self._put.move_to_end(key)
                return known.ref
            self._forget(key)
            ref = cluster().put(value)
            self._put[key] = _Put(weakref.ref(value, lambda gone: self._gone.append((key, gone))), ref, value.nbytes)
            self._size += value.nbytes
            while self._size > _KEPT_BYTES and len(self._put) > 1:
                self._forget(next(iter(self._put)))
            return ref

    def _forget_gone(self) -> None:
        while self._gone:
            key, array = self._gone.popleft()
            known = self._put.get(key)
            if known is not None and known.array is array:  # else another has its id by now
                self._forget(key)

    def _forget(self, key: int) -> None:
        forgotten = self._put.pop(key, None)
        if forgotten is not None:
            self._size -= forgotten.size

    def clear(self) -> None:
        """Forget them all; tasks that are under way still find theirs."""
        with self._lock:
            self._put.clear()
            self._gone.clear()
            self._size = 0

    def __len__(self) -> int:
        self._forget_gone()
        return len(self._put)


def _is_large_array(value: Any, least_bytes: int) -> bool:
    numpy = sys.modules.get("numpy")  # who has not imported it has no arrays
    return (
        numpy is not None
        and type(value) in (numpy.ndarray, numpy.memmap)
        and value.nbytes >= least_bytes
        and not value.dtype.hasobject
    )
