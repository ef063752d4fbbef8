"""Submitted jobs on their way from the stream to the controller that records them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig

from fluster_bus.connection.connection import store_error
from fluster_bus.core import buckets, server_subjects, subjects
from fluster_bus.core.errors import DisconnectedError
from fluster_bus.messages.requests import StoredRequest
from fluster_bus.running.coroutines import retried
from fluster_bus.storage.submitting import forget_request, read_request

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus
    from fluster_bus.core.delivery import Delivery

log = logging.getLogger(__name__)

_ACK_WAIT_S = 3  # then the server delivers again
_IDLE_HEARTBEAT_S = 5.0  # which the server wants to be set together with the bound on bytes
_STALLED_HEADER = "Nats-Consumer-Stalled"
_MAX_OUT = 1_000  # delivered and not yet acknowledged
_ENSURE_TIMEOUT_S = 10.0
_ACK, _TERM = b"+ACK", b"+TERM"
_PARSER = Client()  # nats-py parses an acknowledgement's subject only in a message that has a client


@dataclass(frozen=True)
class Submission:
    """A submitted message. `sequence` is its place in the order of submission."""

    subject: str
    size: int  # of the request, in bytes, as its message has or says it
    sequence: int
    _bus: Bus
    _ack_subject: str
    _data: bytes | None = None

    async def request(self, message: bytes) -> bytes:
        """The JSON of the request: the message itself, or what that says is stored. Raises as `read_request`."""
        stored = StoredRequest.in_place_of_request(message)
        return message if stored is None else await read_request(self._bus, self.namespace, stored)

    async def forget_request(self, message: bytes) -> None:
        """Have what the message says is stored removed: it is recorded or refused. Raises BusError."""
        stored = StoredRequest.in_place_of_request(message)
        if stored is not None:
            await forget_request(self._bus, self.namespace, stored)

    async def message(self) -> bytes:
        """What was submitted, from the stream if it is not held here. Raises StorageError when it is no longer there."""
        if self._data is not None:
            return self._data
        try:
            stored = await self._bus.jetstream.get_msg(buckets.SUBMIT_STREAM, self.sequence)
        except (nats.errors.Error, TimeoutError) as error:
            raise store_error(f"submission {self.sequence} could not be read", error) from error
        return stored.data or b""

    def without_data(self) -> Submission:
        """The same, holding nothing: its data is read again when it is needed."""
        return replace(self, _data=None)

    @property
    def namespace(self) -> str:
        """Raises InvalidNameError: a user that may send to all namespaces may have made one up."""
        return subjects.namespace_of(self.subject)

    async def done(self) -> None:
        """It is recorded: the stream forgets it. Returns when the server has confirmed."""
        await self._bus.request(self._ack_subject, _ACK)

    async def refuse(self) -> None:
        """It can never be recorded: the stream forgets it, and says so in an advisory."""
        await self._bus.publish(self._ack_subject, _TERM)


async def submissions(bus: Bus) -> AsyncGenerator[Submission]:
    """Submitted jobs in order, until the caller stops; one that is not acknowledged in 3 s comes again, unless it waits here.

    How many bytes are on their way the server bounds (2 MiB to 32 MiB) by asking how far this reader is.

    There is one reader, the newest: it takes over at once what another has and did not acknowledge, also from one that was
    stopped and still seems to listen. The stream pushes, so nothing is left asking when a reader goes or the server restarts.
    """
    # Bounded by _MAX_OUT; a text is where to say how far it is.
    arrived: asyncio.Queue[Submission | str] = asyncio.Queue()
    waiting: set[int] = set()
    where = subjects.submit_delivery(bus.inbox())

    def on_delivery(delivery: Delivery) -> None:
        if server_subjects.is_ack(delivery.reply):  # then its headers are its writer's word
            sequence = Msg(_PARSER, reply=delivery.reply).metadata.sequence.stream
            if sequence not in waiting:
                waiting.add(sequence)
                stored = StoredRequest.in_place_of_request(delivery.data)
                size = len(delivery.data) if stored is None else stored.size
                arrived.put_nowait(Submission(delivery.subject, size, sequence, bus, delivery.reply, delivery.data))
        elif asked := _asked_how_far(delivery):
            arrived.put_nowait(asked)
        elif delivery.status is None:
            # Services answer to whatever inbox they are given, and this is one.
            log.warning("%s: passed over what is not a submission: %r", bus.name, delivery.data[:100])

    subscription = await bus.subscribe(where, on_delivery)
    try:
        await _make_consumer(bus, where)
        while True:
            next_ = await arrived.get()
            if isinstance(next_, str):
                with contextlib.suppress(DisconnectedError):  # then it asks again
                    await bus.publish(next_)
                continue
            waiting.discard(next_.sequence)
            yield next_
            del next_  # while the next one is waited for, nothing holds what it has
    finally:
        await subscription.unsubscribe()  # what is on its way comes again, to the next reader


def _asked_how_far(delivery: Delivery) -> str | None:
    """Where the server wants to hear that everything before this has been taken; None when it does not ask."""
    if delivery.status is None:
        return None
    for subject in (delivery.reply, (delivery.headers or {}).get(_STALLED_HEADER, "")):
        if server_subjects.is_flow(subject):
            return subject
    return None


@dataclass(frozen=True)
class SubmissionProgress:
    """How far submissions were handled: everything before `settled` was recorded or refused, `last` is the newest."""

    settled: int
    last: int


async def submission_progress(bus: Bus) -> SubmissionProgress:
    """What the stream tells now. Raises StorageError."""
    try:
        state = (await bus.jetstream.stream_info(buckets.SUBMIT_STREAM)).state
    except (nats.errors.Error, TimeoutError) as error:
        raise store_error("the stream of submitted jobs could not be asked", error) from error
    return SubmissionProgress(settled=int(state.first_seq), last=int(state.last_seq))


async def is_waiting(bus: Bus, sequence: int) -> bool:
    """Whether what was submitted under that sequence is neither recorded nor refused yet. Raises StorageError."""
    try:
        await bus.jetstream.get_msg(buckets.SUBMIT_STREAM, sequence)
    except nats.js.errors.NotFoundError:
        return False
    except (nats.errors.Error, TimeoutError) as error:
        raise store_error(f"submission {sequence} could not be read", error) from error
    return True


async def first_unsettled(bus: Bus) -> int:
    """The sequence before which everything was recorded or refused. Raises StorageError."""
    return (await submission_progress(bus)).settled


async def _make_consumer(bus: Bus, where: str) -> None:
    config = ConsumerConfig(
        durable_name=buckets.SUBMIT_CONSUMER,
        deliver_subject=where,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=_ACK_WAIT_S,
        max_ack_pending=_MAX_OUT,
        flow_control=True,
        idle_heartbeat=_IDLE_HEARTBEAT_S,
    )

    async def make(left_s: float) -> None:
        async with asyncio.timeout(left_s):
            # Made anew: the server does not change where one delivers as long as a client listens there.
            with contextlib.suppress(nats.js.errors.NotFoundError):
                await bus.jetstream.delete_consumer(buckets.SUBMIT_STREAM, buckets.SUBMIT_CONSUMER)
            await bus.jetstream.add_consumer(buckets.SUBMIT_STREAM, config)

    try:
        await retried(make, on=(nats.errors.Error, TimeoutError), timeout_s=_ENSURE_TIMEOUT_S)
    except (nats.errors.Error, TimeoutError) as error:
        raise store_error("the consumer of submitted jobs could not be made", error) from error
