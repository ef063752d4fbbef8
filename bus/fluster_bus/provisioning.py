"""How the streams and buckets of a cluster and of its namespaces are made, and given their room."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import nats.errors
import nats.js.errors
from nats.js.api import (
    StreamConfig,
    StreamInfo,
)

from fluster_bus import subjects
from fluster_bus.errors import BusError, StorageError
from fluster_bus.retries import retried
from fluster_bus.store_errors import store_error
from fluster_bus.stream_bounds import (
    BUDGET_SETTING,
    MIN_BUDGET_BYTES,
    NamespaceBounds,
    budgets,
    shares,
    stream_of,
)
from fluster_bus.stream_configs import PER_SUBJECT, WantedStream, namespace_streams, system_streams

if TYPE_CHECKING:
    from fluster_bus.bus import Bus

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_CREATE_TIMEOUT_S = 10.0
_NO_ROOM = (10_047, 10_002)  # of the server, and of the account


class _NoRoomError(StorageError):
    """The server has not so much to set aside."""


# ---- making them ----------------------------------------------------------------------------------------


async def ensure_system(bus: Bus) -> None:
    """Make what the whole cluster needs, unless it is there. Raises StorageError."""
    plan = await _plan(bus, system_streams())
    await plan.carry_out(bus)


async def ensure_namespace(bus: Bus, namespace: str, bounds: NamespaceBounds | None = None) -> None:
    """As `ensure_namespaces`, for the only namespace, or for one whose budget is given."""
    await ensure_namespaces(bus, (namespace,), bounds)


async def ensure_namespaces(
    bus: Bus, namespaces: Sequence[str], bounds: NamespaceBounds | None = None
) -> dict[str, int]:
    """Make the buckets and streams of all namespaces of a cluster; those that are there get the bounds that they are to have.

    What is there never shrinks below what it holds, unless by a setting of its own. Where the store has not even room for
    the budgets that follow from its size, as others have taken some of it, they are halved. Returns {share: its size} of
    each namespace. Raises StorageError.
    """
    bounds = bounds or NamespaceBounds()
    failure, plan = None, None
    limit = (await _store(bus)).limit
    for budget in budgets(limit, len(namespaces), bounds):
        if failure is not None:
            log.info("%s; each namespace gets %.3g GiB now", failure, budget / (1 << 30))
        sizes = shares(budget, bounds.given)
        plan = await _plan(bus, [each for name in namespaces for each in namespace_streams(name, sizes, bounds)])
        try:
            plan.check_room(await _store(bus))
            await plan.carry_out(bus, at_once=limit is not None)
        except _NoRoomError as error:
            failure = error
        else:
            return sizes
    if bounds.budget_bytes is None and plan is not None and not plan.new:
        # As after the server's limit was made smaller: it changes no stream then, and serves all that are there.
        log.warning("%s: the streams of %s keep the bounds that they have", failure, ", ".join(namespaces))
        return {share: await _size(bus, stream_of(share, namespaces[0])) for share in shares(MIN_BUDGET_BYTES)}
    why = f"{failure}: " if failure is not None else ""
    raise StorageError(
        f"{why}the store has no room for {len(namespaces)} namespaces: give jetstream.max_file_store more, "
        f"{BUDGET_SETTING} less (at least {MIN_BUDGET_BYTES >> 20} MiB), or have fewer of them"
    ) from failure


class _Store(NamedTuple):
    """What the server lets all streams set aside, None where it does not tell, and what is set aside."""

    limit: int | None
    reserved: int


async def _store(bus: Bus) -> _Store:
    async def ask(left_s: float) -> _Store:
        told = json.loads((await bus.request(subjects.JETSTREAM_INFO, timeout_s=left_s)).data)
        limit = int(told["limits"]["max_storage"])
        return _Store(limit if limit >= 0 else None, int(told.get("reserved_storage", 0)))

    try:
        return await retried(ask, on=(BusError, KeyError), timeout_s=_CREATE_TIMEOUT_S)
    except KeyError as error:
        raise StorageError("the server does not tell of its store: is JetStream enabled there?") from error


class _Plan(NamedTuple):
    """What is to be done to the streams."""

    shrinking: list[StreamConfig]
    growing: list[StreamConfig]
    new: list[StreamConfig]
    more_bytes: int  # to be set aside, in all

    def check_room(self, store: _Store) -> None:
        """Raise _NoRoomError where it would not fit.

        A server that makes several at once would take too much, and change none of them from then on.
        """
        if store.limit is not None and self.more_bytes > max(store.limit - store.reserved, 0):
            raise _NoRoomError(
                f"the server's store has {store.limit - store.reserved:,} bytes left to set aside, and not {self.more_bytes:,}"
            )

    async def carry_out(self, bus: Bus, *, at_once: bool = True) -> None:
        """Change and make the streams, all `at_once` in half the time. Raises what the first raised that failed."""
        change, make = bus.jetstream.update_stream, bus.jetstream.add_stream
        await _side_by_side(_make(each, change) for each in self.shrinking)  # they make room for the others
        if at_once:
            await _side_by_side(
                (*(_make(each, change) for each in self.growing), *(_make(each, make) for each in self.new))
            )
            return
        for each in self.growing:
            await _make(each, change)
        for each in self.new:
            await _make(each, make)


async def _plan(bus: Bus, wanted: Sequence[WantedStream]) -> _Plan:
    present = await _side_by_side(_info(bus, str(each.config.name)) for each in wanted)
    plan, more_bytes = _Plan([], [], [], 0), 0
    for each, info in zip(wanted, present, strict=True):
        if info is None:
            plan.new.append(each.config)
            more_bytes += int(each.config.max_bytes or 0)
            continue
        changes = _changes(each, info)
        if PER_SUBJECT in changes and await _most_of_a_subject(bus, each) > changes[PER_SUBJECT]:
            # A server would drop the oldest of them at once, which were taken for good.
            log.warning("stream %s keeps its %s: a subject has more", each.config.name, PER_SUBJECT)
            del changes[PER_SUBJECT]
        if changes:
            had = max(info.config.max_bytes or 0, 0)  # it is -1 without a bound
            more = changes.get("max_bytes", had) - had
            more_bytes += more
            (plan.growing if more > 0 else plan.shrinking).append(info.config.evolve(**changes))
    return plan._replace(more_bytes=more_bytes)


async def _patiently(ask: Callable[[float], Awaitable[Answer]], failed: str) -> Answer:
    try:
        # Around a restart of the server a stream's creation now and then fails with 10049 or 503.
        return await retried(ask, on=(nats.errors.Error, TimeoutError), timeout_s=_CREATE_TIMEOUT_S)
    except (nats.errors.Error, TimeoutError) as error:
        raise store_error(failed, error) from error


async def _side_by_side(calls: Iterable[Awaitable[Answer]]) -> list[Answer]:
    """All at once: a cluster's start waits for it. Raises what the first raised that failed."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


async def _info(bus: Bus, name: str) -> StreamInfo | None:
    async def look(left_s: float) -> StreamInfo | None:
        async with asyncio.timeout(left_s):
            try:
                return await bus.jetstream.stream_info(name)
            except nats.js.errors.NotFoundError:
                return None

    return await _patiently(look, f"stream {name} could not be made")


async def _size(bus: Bus, stream: str) -> int:
    info = await _info(bus, stream)
    return int(info.config.max_bytes or 0) if info is not None else 0


async def _most_of_a_subject(bus: Bus, wanted: WantedStream) -> int:
    """How many messages the subject has that has most in a stream."""
    name = str(wanted.config.name)

    async def look(left_s: float) -> StreamInfo:
        async with asyncio.timeout(left_s):
            return await bus.jetstream.stream_info(name, subjects_filter=subjects.ANY_TAIL)

    info = await _patiently(look, f"stream {name} could not be looked at")
    return max((info.state.subjects or {}).values(), default=0)


def _changes(wanted: WantedStream, info: StreamInfo) -> dict[str, Any]:
    """What is to be changed in a stream that is there."""
    config, present = wanted.config, info.config
    changes: dict[str, Any] = {
        field: value for field, value in wanted.given.items() if value is not None and getattr(present, field) != value
    }
    if config.allow_atomic and not present.allow_atomic:  # a version without verdicts in batches made it
        changes["allow_atomic"] = True
    if config.discard != present.discard:
        changes["discard"] = config.discard
    size, used = int(config.max_bytes or 0), int(info.state.bytes)
    if not wanted.is_sized and used > size:
        log.warning("stream %s holds %s bytes and keeps them, above its share of %s", config.name, used, size)
        size = used
    if present.max_bytes != size:
        changes["max_bytes"] = size
    return changes


async def _make(config: StreamConfig, how: Callable[[StreamConfig], Awaitable[object]]) -> None:
    async def make(left_s: float) -> None:
        try:
            async with asyncio.timeout(left_s):
                await how(config)
        except nats.js.errors.APIError as error:
            if error.err_code not in _NO_ROOM:
                raise
            raise _NoRoomError(
                f"stream {config.name} could not be made: the server's store has not {config.max_bytes:,} bytes to set aside"
            ) from error

    await _patiently(make, f"stream {config.name} could not be made")
