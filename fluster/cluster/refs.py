"""Objects that are put once, and used by as many calls and jobs as one likes."""

from __future__ import annotations

import asyncio
import secrets
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar, cast

from fluster_bus.core import subjects
from fluster_bus.core.delivery import Delivery, error_headers
from fluster_bus.core.errors import BusError, InvalidMessageError, NoRespondersError, PayloadLostError, ServiceError
from fluster_bus.core.stream_bounds import PAYLOADS
from fluster_bus.payloads import payloads
from fluster_bus.storage.objects import ObjectStore

if TYPE_CHECKING:
    from fluster_bus.connection.carrier import Carrier

T = TypeVar("T")

_KEPT_BYTES = 1 << 30  # of what was fetched, by each client; beyond them the least recently used go
_FETCH_TIMEOUT_S = 120.0  # the process that put it may have to store it first
_FRAME_OVERHEAD = 4096


class _Wire(NamedTuple):
    """A Ref as it travels."""

    ref_id: str
    address: str  # where the process that put it answers
    payload: bytes  # the object if it is small, or where it lies in memory that may be shared; else nothing


class Fetches(Protocol):
    """Fetches objects of Refs: a Cluster."""

    def get(self, ref: Ref[T], /) -> T: ...


class Ref(Generic[T]):
    """What `cluster.put` gives. Passed to an actor's method or a job's callable as an argument, it arrives as the
    object.

    Inside of another argument it arrives as a Ref, whose `get` gives the object. It is good as long as it lives in the
    process that put it, or a call with it is under way.
    """

    in_use: ClassVar[bool] = False  # whether any has arrived in this process

    def __init__(self, wire: _Wire, payload: bytes, own: weakref.finalize[..., Ref[T]] | None = None) -> None:
        self._wire = wire
        self._payload = payload  # empty: it has to be fetched
        self._own = own

    def __repr__(self) -> str:
        return f"<Ref {self._wire.ref_id}>"

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        self._check_good()
        payloads.keep_alive(self)
        return _arrived, tuple(self._wire)

    def get(self, cluster: Fetches | None = None) -> T:
        """The object, anew each time; large arrays in it are read-only.

        It is fetched through `cluster` where its memory cannot be shared, `current_cluster()` unless given; on an event
        loop write `await cluster.get(ref)`. Raises PayloadLostError when it was freed, or who put it has ended.
        """
        self._check_good()
        if self._payload:
            value: T = payloads.decode(self._payload)
            return value
        if cluster is None:
            from fluster.cluster.local import current_cluster

            cluster = current_cluster()
        return cluster.get(self)

    def free(self) -> None:
        """Let the object go, in the process that put it; who has it already keeps it. Nothing happens the second time.

        Raises RuntimeError in any other process.
        """
        if self._own is None:
            raise RuntimeError(f"{self} was put by another process: free it there")
        self._own()
        self._payload = b""

    def _check_good(self) -> None:
        if self._own is not None and not self._own.alive:
            raise PayloadLostError(f"{self} was freed: put the object again")


def _arrived(*wire: Any) -> Ref[Any]:
    Ref.in_use = True
    return Ref(_Wire(*wire), payloads.held_or_nothing(wire[2]))


def resolved(
    args: Sequence[Any], kwargs: Mapping[str, Any], cluster: Fetches | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the objects in the place of Refs. Raises as `Ref.get` does."""

    def object_of(given: object) -> object:
        return cast("Ref[object]", given).get(cluster) if isinstance(given, Ref) else given

    return tuple(map(object_of, args)), {name: object_of(each) for name, each in kwargs.items()}


class Refs:
    """The Refs of one client: those that it put, and what it fetched of others'."""

    def __init__(self, bus: Carrier, namespace: str) -> None:
        self._bus = bus
        self._namespace = namespace
        self._store = ObjectStore(bus, namespace, PAYLOADS)
        self._put: dict[str, bytes] = {}  # {id: payload}
        self._address = ""
        self._listening = asyncio.Lock()
        self._fetching: dict[str, asyncio.Task[bytes]] = {}
        self._fetched: OrderedDict[str, bytes] = OrderedDict()  # {id: payload}, the least recently used first

    async def put(self, value: T) -> Ref[T]:
        payload = await asyncio.to_thread(payloads.encode, value)
        async with self._listening:
            if not self._address:
                address = self._bus.inbox(self._namespace)
                await self._bus.subscribe(f"{address}.{subjects.ANY_TOKEN}", self._on_request)
                await self._bus.flush()  # every holder of a Ref, by whatever way it came, must find an owner there
                self._address = address
        ref_id = secrets.token_hex(8)
        self._put[ref_id] = payload
        ref: Ref[T] = Ref(_Wire(ref_id, self._address, payloads.small_or_lent(payload)), payload)
        # Any thread's collector of garbage may call it: a dict's pop is one step.
        own: weakref.finalize[..., Ref[T]] = weakref.finalize(ref, self._put.pop, ref_id, None)
        own.atexit = False  # all is gone by then
        ref._own = own  # noqa: SLF001
        return ref

    async def get(self, ref: Ref[T]) -> T:
        ref._check_good()  # noqa: SLF001
        payload = ref._payload or await self._fetch(ref._wire)  # noqa: SLF001
        value: T = await asyncio.to_thread(payloads.decode, payload)
        return value

    # ---- what others put --------------------------------------------------------------------------------

    async def _fetch(self, wire: _Wire) -> bytes:
        """The payload: once for all who want it here, and again only if newer ones took its room."""
        found = self._fetched.get(wire.ref_id)
        if found is not None:
            self._fetched.move_to_end(wire.ref_id)
            return found
        fetching = self._fetching.get(wire.ref_id)
        if fetching is None:
            fetching = self._fetching[wire.ref_id] = asyncio.create_task(self.ask(wire), name=f"ref {wire.ref_id}")
            fetching.add_done_callback(lambda _done: self._fetching.pop(wire.ref_id, None))
        payload = await asyncio.shield(fetching)
        self._keep(wire.ref_id, payload)
        return payload

    async def ask(self, wire: _Wire) -> bytes:
        if not subjects.is_inbox(wire.address):
            raise InvalidMessageError(f"a Ref says that {wire.address!r} answers for it, which is not an inbox")
        try:
            answer = await self._bus.request(f"{wire.address}.{wire.ref_id}", timeout_s=_FETCH_TIMEOUT_S)
        except NoRespondersError as error:
            raise PayloadLostError(f"the object of ref {wire.ref_id} is gone: the process that put it ended") from error
        except ServiceError as error:
            raise PayloadLostError(str(error)) from error
        return await payloads.fetched(answer.data, self._store) if payloads.is_stored(answer.data) else answer.data

    def _keep(self, ref_id: str, payload: bytes) -> None:
        self._fetched[ref_id] = payload
        room = _KEPT_BYTES - sum(map(len, self._fetched.values()))
        while room < 0:
            _oldest, dropped = self._fetched.popitem(last=False)
            room += len(dropped)

    # ---- what this client put ---------------------------------------------------------------------------

    def _on_request(self, delivery: Delivery) -> None:
        if subjects.is_inbox(delivery.reply):
            self._bus.spawn(self._answer(delivery), "ref")

    async def _answer(self, delivery: Delivery) -> None:
        ref_id = subjects.last_token(delivery.subject)
        payload = self._put.get(ref_id)
        if payload is None:
            lost = error_headers(PayloadLostError.__name__, f"the object of ref {ref_id} was freed by who put it")
            await self._bus.publish(delivery.reply, headers=lost)
            return
        whole = bytes(payloads.spelled_out(payload))
        try:
            if len(whole) > self._bus.max_payload - _FRAME_OVERHEAD:
                whole = await payloads.stored(whole, self._store)
        except BusError as error:
            text = f"the object of ref {ref_id} cannot be stored: {error}"
            await self._bus.publish(delivery.reply, headers=error_headers(type(error).__name__, text))
            return
        await self._bus.publish(delivery.reply, whole)
