"""How the streams and buckets of a cluster and of its namespaces are made, and given their room."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import nats.errors
import nats.js.errors
from nats.js.api import (
    StreamConfig,
    StreamInfo,
)

from fluster_bus.connection.connection import store_error
from fluster_bus.core import buckets, server_subjects, subjects
from fluster_bus.core.errors import NoRespondersError, RequestTimeoutError, StorageError, StorageTimeoutError
from fluster_bus.core.stream_bounds import (
    BUDGET_SETTING,
    MIN_BUDGET_BYTES,
    SHARES,
    SYSTEM_BYTES,
    NamespaceBounds,
    budgets,
    shares,
    stream_of,
)
from fluster_bus.running.coroutines import retried
from fluster_bus.storage.replication import (
    NoRoomError,
    Replication,
    TooFewServersError,
    placement_error,
    storage_capacity,
    try_room,
)
from fluster_bus.storage.stream_configs import (
    PER_SUBJECT,
    WantedStream,
    namespace_streams,
    submit_stream,
    system_streams,
)

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_CREATE_TIMEOUT_S = 10.0
_NAME_IN_USE = 10058  # of the server: "stream name already in use with a different configuration"
_ANSWER_S = 2.0  # what was asked while no server of a group led is answered by none
# Each 10 s servers of a group tell each other that they keep streams, and what is set aside for them.
_STATISTICS_S = 12.0
_ANY = Replication()

# ---- making them ----------------------------------------------------------------------------------------


async def ensure_system(bus: Bus, replication: Replication = _ANY, *, patience_s: float = 0.0) -> int:
    """Make what the whole cluster needs, unless it is there, and return how many copies there are of it.

    Where the servers are too few for those that are asked for, others are waited for as long as `patience_s`.
    Raises TooFewServersError, StorageError.
    """

    async def on_servers(replicas: int) -> int:
        plan = await _plan(bus, system_streams(), replicas, replication)
        await plan.carry_out(bus)
        return replicas

    # A server that has just started does not know the others of its group yet.
    return await retried(
        lambda _left_s: _beside_others(lambda: _on_enough(replication, on_servers)),
        on=(TooFewServersError,),
        timeout_s=patience_s,
    )


async def ensure_seat(bus: Bus) -> None:
    """Make the bucket with the leader's seat, unless it is there, for who takes that before there is any other. Raises StorageError."""
    seat = buckets.bucket_stream(buckets.CONTROLLERS_BUCKET)
    wanted = [each for each in system_streams() if each.config.name == seat]

    async def on_servers(replicas: int) -> None:
        await (await _plan(bus, wanted, replicas, _ANY)).carry_out(bus)

    await _on_enough(_ANY, on_servers)


class _MadeMeanwhileError(StorageError):
    """Another controller made the stream since the plan was made, with bounds of its own."""


async def _beside_others(attempt: Callable[[], Awaitable[Answer]], patience_s: float = 0.0) -> Answer:
    """What `attempt()` returns, which is made again from what is there by then while others make the same streams."""
    return await retried(lambda _left_s: attempt(), on=(_MadeMeanwhileError,), timeout_s=_CREATE_TIMEOUT_S + patience_s)


async def _on_enough(
    replication: Replication, attempt: Callable[[int], Awaitable[Answer]], *, patience_s: float = 0.0
) -> Answer:
    """What `attempt(replicas)` returns for the largest number for which there are servers enough within `patience_s`.

    Raises TooFewServersError, StorageError.
    """

    async def tried(replicas: int) -> Answer:
        async def once(left_s: float) -> Answer:
            try:
                return await attempt(replicas)
            except TooFewServersError as error:
                log.debug("%s: asked again for %.0f s, as a server may just have come back", error, max(left_s, 0))
                raise

        return await retried(once, on=(TooFewServersError,), timeout_s=patience_s)

    *first, last = replication.tried
    for replicas in first:
        try:
            return await tried(replicas)
        except (StorageTimeoutError, _MadeMeanwhileError):
            raise  # that says nothing of how many servers there are
        except StorageError as error:
            log.info("streams get fewer copies than %d: %s", replicas, error)
    return await tried(last)


async def ensure_namespace(bus: Bus, namespace: str, bounds: NamespaceBounds | None = None) -> None:
    """As `ensure_namespaces`, for the only namespace, or for one whose budget is given."""
    await ensure_namespaces(bus, (namespace,), bounds)


async def ensure_namespaces(
    bus: Bus,
    namespaces: Sequence[str],
    bounds: NamespaceBounds | None = None,
    replication: Replication = _ANY,
    *,
    beside: int = 0,
) -> dict[str, int]:
    """Make the buckets and streams of all namespaces of a cluster; those that are there get the bounds that they are to have.

    Room is left for as many others as are `beside` them.

    What is there never shrinks below what it holds, unless by a setting of its own. Where the store has not even room for
    the budgets that follow from its size, as others have taken some of it, they are halved. Returns {share: its size} of
    each namespace. Raises TooFewServersError, StorageError.
    """
    found = bounds or NamespaceBounds()
    # Where the system's streams have copies there are servers enough. While one of them comes back, the others know for a
    # moment that it is there, and not yet that it keeps streams.
    patience_s = _STATISTICS_S if await _system_copies(bus) > 1 else 0.0
    return await _beside_others(
        lambda: _on_enough(
            replication,
            lambda replicas: _divide(bus, namespaces, found, replicas, replication, beside=beside),
            patience_s=patience_s,
        ),
        patience_s,
    )


async def delete_namespace(bus: Bus, namespace: str) -> None:
    """Delete the buckets and streams of a namespace, with all that is in them; those that are not there are skipped.

    Raises StorageError.
    """

    async def delete(stream: str) -> None:
        async def ask(left_s: float) -> None:
            async with asyncio.timeout(left_s):
                with suppress(nats.js.errors.NotFoundError):
                    await bus.jetstream.delete_stream(stream)

        await _patiently(ask, f"stream {stream} could not be deleted")

    await _side_by_side(delete(stream_of(share, namespace)) for share in SHARES)


async def bound_submissions(bus: Bus, namespaces: int) -> None:
    """Have each of so many namespaces fill no more than its part of the queue of submissions. Raises StorageError."""
    plan = await _plan(bus, [submit_stream(namespaces)], 1, _ANY)
    await plan.carry_out(bus)


async def used_bytes(bus: Bus, namespace: str) -> int:
    """How much of the store the streams of a namespace take. Raises StorageError."""
    infos = await _side_by_side(_info(bus, stream_of(share, namespace)) for share in SHARES)
    return sum(int(info.state.bytes) for info in infos if info is not None)


async def _divide(
    bus: Bus,
    namespaces: Sequence[str],
    bounds: NamespaceBounds,
    replicas: int,
    replication: Replication,
    *,
    beside: int,
) -> dict[str, int]:
    failure, plan = None, None
    limit = (await storage_capacity(bus, replicas)).limit
    is_untold = limit is None and replicas > 1 and await _is_group(bus)
    for budget in budgets(limit, len(namespaces) + beside, bounds):
        if failure is not None:
            log.info("%s; each namespace gets %.3g GiB now", failure, budget / (1 << 30))
        sizes = shares(budget, bounds.given)
        wanted = [each for name in namespaces for each in namespace_streams(name, sizes, bounds)]
        plan = await _plan(bus, wanted, replicas, replication)
        try:
            (await storage_capacity(bus, replicas)).check(plan.more_bytes)
            if is_untold and plan.room_bytes > 0:
                await try_room(bus, plan.room_bytes, replicas)
            await plan.carry_out(bus, at_once=limit is not None, patience_s=_STATISTICS_S if is_untold else 0)
        except NoRoomError as error:
            failure = error
        else:
            return sizes
    if bounds.budget_bytes is None and plan is not None and not (plan.new or plan.copied):
        # As after the server's limit was made smaller: it changes no stream then, and serves all that are there.
        log.warning("%s: the streams of %s keep the bounds that they have", failure, ", ".join(namespaces))
        return {share: await _size(bus, stream_of(share, namespaces[0])) for share in shares(MIN_BUDGET_BYTES)}
    why = f"{failure}: " if failure is not None else ""
    raise StorageError(
        f"{why}the store has no room for {len(namespaces) + beside} namespaces: give jetstream.max_file_store more, "
        f"{BUDGET_SETTING} less (at least {MIN_BUDGET_BYTES >> 20} MiB), or have fewer of them"
    ) from failure


class _Plan(NamedTuple):
    """What is to be done to the streams."""

    shrinking: list[StreamConfig]
    growing: list[StreamConfig]
    copied: list[StreamConfig]  # or no longer
    new: list[StreamConfig]
    more_bytes: int  # to be set aside, in all
    room_bytes: int  # that each server needs for it, at most

    async def carry_out(self, bus: Bus, *, at_once: bool = True, patience_s: float = 0.0) -> None:
        """Change and make the streams, all `at_once` in half the time. Raises what the first raised that failed.

        For room that servers do not know of yet they are asked again as long as `patience_s`.
        """

        async def change(config: StreamConfig) -> None:
            await _make(config, bus.jetstream.update_stream, patience_s)

        async def make(config: StreamConfig) -> None:
            await _heard(bus, await _make(config, bus.jetstream.add_stream, patience_s))

        await _side_by_side(map(change, self.shrinking))  # they make room for the others
        for each in self.copied:
            # One after the other: while its copies are made, a stream has no leader for a moment.
            await change(each)
            await _led(bus, str(each.name))
        if at_once:
            await _side_by_side((*map(change, self.growing), *map(make, self.new)))
            return
        for each in self.growing:
            await change(each)
        for each in self.new:
            await make(each)


async def _plan(bus: Bus, wanted: Sequence[WantedStream], replicas: int, replication: Replication) -> _Plan:
    present = await _side_by_side(_info(bus, str(each.config.name)) for each in wanted)
    await _side_by_side(_heard(bus, info) for info in present if info is not None)  # another one may just have made it
    plan, more_bytes, room_bytes = _Plan([], [], [], [], 0, 0), 0, 0
    for each, info in zip(wanted, present, strict=True):
        if info is None:
            plan.new.append(each.config.evolve(num_replicas=replicas))
            more_bytes += int(each.config.max_bytes or 0)
            continue
        changes = _changes(each, info)
        if PER_SUBJECT in changes and await _most_of_a_subject(bus, each) > changes[PER_SUBJECT]:
            # A server would drop the oldest of them at once, which were taken for good.
            log.warning("stream %s keeps its %s: a subject has more", each.config.name, PER_SUBJECT)
            del changes[PER_SUBJECT]
        copies = info.config.num_replicas or 1
        if (wanted_copies := replication.wanted(replicas, copies)) != copies:
            changes["num_replicas"] = wanted_copies
        if changes:
            had = max(info.config.max_bytes or 0, 0)  # it is -1 without a bound
            more = changes.get("max_bytes", had) - had
            more_bytes += more
            room_bytes += had + more if changes.get("num_replicas", 0) > copies else more
            changed = plan.copied if "num_replicas" in changes else plan.growing if more > 0 else plan.shrinking
            changed.append(info.config.evolve(**changes))
    room_bytes += sum(int(each.max_bytes or 0) for each in plan.new)
    # What the system's streams took a moment ago may not be known yet.
    return plan._replace(more_bytes=more_bytes, room_bytes=room_bytes + (SYSTEM_BYTES if plan.new else 0))


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
        async with asyncio.timeout(min(left_s, _ANSWER_S)):
            try:
                return await bus.jetstream.stream_info(name)
            except nats.js.errors.NotFoundError:
                return None

    return await _patiently(look, f"stream {name} could not be made")


async def _led(bus: Bus, stream: str) -> None:
    """Return once one of the servers leads the stream."""

    async def look(_left_s: float) -> None:
        info = await _info(bus, stream)
        if info is not None and info.cluster is not None and not info.cluster.leader:
            raise StorageTimeoutError(f"stream {stream} has no leader yet: are most of its servers there?")

    await retried(look, on=(StorageTimeoutError,), timeout_s=_CREATE_TIMEOUT_S)


async def _heard(bus: Bus, info: StreamInfo) -> None:
    """Return once the stream is reached over this connection.

    That it was made may be known earlier: the server with the stream tells others of the group on another connection that it listens.
    """
    if info.cluster is None or not info.config.allow_direct:
        return
    name = str(info.config.name)
    ask = json.dumps({"last_by_subj": name}).encode()  # which no message has: the answer is short

    async def look(left_s: float) -> None:
        await bus.request(server_subjects.direct_get(name), ask, timeout_s=min(left_s, _ANSWER_S))

    try:
        await retried(look, on=(NoRespondersError, RequestTimeoutError), timeout_s=_CREATE_TIMEOUT_S)
    except (NoRespondersError, RequestTimeoutError) as error:
        raise StorageTimeoutError(f"stream {name} does not answer: are most of its servers there?") from error


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


async def _make(
    config: StreamConfig, how: Callable[[StreamConfig], Awaitable[StreamInfo]], room_patience_s: float = 0.0
) -> StreamInfo:
    failed = f"stream {config.name} could not be made"

    async def make(left_s: float) -> StreamInfo:
        try:
            async with asyncio.timeout(left_s):
                return await how(config)
        except nats.js.errors.APIError as error:
            if error.err_code == _NAME_IN_USE:
                raise _MadeMeanwhileError(f"{failed}: {error.description}") from error
            why = placement_error(str(config.name), config.max_bytes, config.num_replicas or 1, error)
            if why is None:
                raise
            raise why from error

    return await retried(lambda _left_s: _patiently(make, failed), on=(NoRoomError,), timeout_s=room_patience_s)


async def _system_copies(bus: Bus) -> int:
    info = await _info(bus, buckets.SUBMIT_STREAM)
    return (info.config.num_replicas or 1) if info is not None else 1


async def _is_group(bus: Bus) -> bool:
    info = await _info(bus, buckets.SUBMIT_STREAM)
    return info is not None and info.cluster is not None
