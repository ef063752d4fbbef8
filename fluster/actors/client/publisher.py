"""What a client publishes: calls, and notices beside them: cancellations, and how far streams are read."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeVar

from fluster.actors.client.inboxes import Inboxes
from fluster.actors.protocol import frames, json_frames
from fluster.actors.protocol.calls import Call, Cancel, Send
from fluster.actors.protocol.frames import WireReply
from fluster.actors.protocol.members import Member, share_memory
from fluster.actors.results.reader import ItemsTicket
from fluster.actors.routing.router import Router
from fluster_bus.connection.carrier import Carrier
from fluster_bus.core import subjects
from fluster_bus.core.errors import BusError
from fluster_bus.payloads import payloads
from fluster_bus.storage.objects import ObjectStore

log = logging.getLogger(__name__)

NumberedT = TypeVar("NumberedT", tuple[int, int], tuple[int, int, int, int])

_FRAME_OVERHEAD = 4096  # of a call around its payload, amply


class Publisher:
    """Publishes the calls of one client; answers come to its inboxes."""

    def __init__(
        self,
        bus: Carrier,
        namespace: str,
        store: ObjectStore,
        inboxes: Inboxes,
    ) -> None:
        self._bus = bus
        self._namespace = namespace
        self._store = store
        self._inboxes = inboxes
        self._max_payload = bus.max_payload - _FRAME_OVERHEAD

    async def publish(self, send: Send, members: Sequence[Member]) -> None:
        """Publish a message to `members`. Raises BusError, and NoJsonError for a call that has no form in JSON."""
        first = send.calls[0]
        token = first.method if len(send.calls) == 1 else frames.JOINED
        if send.member is None:
            subject = subjects.actor_all(self._namespace, send.pool, token)
        else:
            subject = subjects.method_of_member(send.member.address, token)
            if send.member.takes_json_only:
                await self._publish_json(subject, send.number, first)
                return
        calls = send.calls if send.member is not None else send.calls[:1]  # a broadcast is one call for all
        wire = [call.to_wire(call.payload) for call in calls]
        if any([type(call.payload) is not bytes or len(call.payload) > self._max_payload for call in calls]):  # noqa: C419 - quicker
            shares_memory = share_memory(members)
            wire = [call.to_wire(await self._carried(call.payload, shares_memory)) for call in calls]
            if all(call.number != send.number for call in send.calls):
                return  # they have ended meanwhile
        await self._bus.publish(subject, frames.encode_calls(wire), reply=f"{self._inboxes.plain}.{send.number}")

    async def _publish_json(self, subject: str, number: int, call: Call) -> None:
        body = json_frames.encode_call(call.payload)
        inbox = await self._inboxes.open_json()
        headers = json_frames.headers_of(frames.plain(call.deadline), call.trace)
        await self._bus.publish(subject, body, reply=f"{inbox}.{number}", headers=headers)

    async def _carried(self, payload: bytes, shares_memory: bool) -> bytes:
        """As it travels: what no message can carry is put into the object store. The calls behind it wait for that."""
        payload = bytes(payload if shares_memory else payloads.spelled_out(payload))
        if len(payload) > self._max_payload:
            payload = await payloads.stored(payload, self._store)
        return payload


class Notices:
    """Cancellations and read credits of one client. They are published on the connection of its calls, after the calls that they concern.

    `withdrawn` and `read` are filled by any thread; all else is for the loop of the connection.
    """

    def __init__(self, bus: Carrier, router: Router, inboxes: Inboxes) -> None:
        self._bus = bus
        self._router = router
        self._inboxes = inboxes
        self.withdrawn: deque[Call] = deque()
        self.read: deque[Call] = deque()  # streams
        self._cancels: list[Cancel] = []

    def on_timeout(self, call: Call) -> None:
        self._cancels += self._router.on_timeout(call)

    def take_withdrawn(self) -> None:
        """End what was withdrawn here; `publish` tells the actors."""
        if not self.withdrawn:
            return
        withdrawn = [self.withdrawn.popleft() for _ in range(len(self.withdrawn))]
        for call in withdrawn:
            if call.timer is not None:
                call.timer.cancel()
        self._cancels += self._router.withdraw(withdrawn)

    def clear(self) -> None:
        """The connection is lost, and what was out has ended."""
        self._cancels.clear()
        self.read.clear()

    async def publish(self) -> None:
        cancels, self._cancels = self._cancels, []
        for cancel in cancels:
            for inbox, calls in self._by_inbox(cancel.member, cancel.calls):
                reply = f"{inbox}.{cancel.number}"
                await self._tell(cancel.member, frames.CANCEL, frames.encode_cancel(calls), reply)
        if self.read:
            await self._publish_read()

    async def _publish_read(self) -> None:
        reads: dict[str, tuple[Member, list[tuple[int, int, int, int]]]] = {}  # {address: of its streams}
        for call in {self.read.popleft() for _ in range(len(self.read))}:
            found, reader = self._router.where(call), call.ticket
            if found is not None and isinstance(reader, ItemsTicket):
                member, position = found
                progress = reader.progress
                of_member = reads.setdefault(member.address, (member, []))[1]
                of_member.append((*position, progress.told_items, progress.told_size))
        for member, of_streams in reads.values():
            for inbox, reads_there in self._by_inbox(member, of_streams):
                await self._tell(member, frames.READ, frames.encode_reads(reads_there), f"{inbox}.0")

    def _by_inbox(self, member: Member, of_calls: list[NumberedT]) -> Iterator[tuple[str, list[NumberedT]]]:
        """Notices about calls, each beginning with the number of its message, by the inbox to which the calls' replies go."""
        if member.takes_json_only:
            yield self._inboxes.json, of_calls
            return
        for inbox, alone in ((self._inboxes.plain, False), (self._inboxes.alone, True)):
            there = [each for each in of_calls if (each[0] < 0) is alone]
            if there:
                yield inbox, there

    async def _tell(self, member: Member, what: str, body: bytes, reply: str) -> None:
        try:
            subject = subjects.method_of_member(member.address, what)
            await self._bus.publish(subject, body, reply=reply)  # not for an answer
        except BusError as error:
            log.info("%s was not told what became of calls: %s", member.endpoint_id, error)

    async def answer(self, to: str, number: int, endpoint_id: str, replies: list[WireReply]) -> None:
        """An actor asks whether its stream still has a reader."""
        if not subjects.is_inbox(to):
            log.warning("refused to answer %s: its reply subject %s is not an inbox", endpoint_id, to)
            return
        wanted = any(self._router.is_wanted(number, endpoint_id, index) for index, _kind, _payload in replies)
        try:
            await self._bus.publish(to, frames.WANTED if wanted else frames.UNWANTED)
        except BusError as error:
            log.debug("%s was not answered: %s", endpoint_id, error)  # it asks again
