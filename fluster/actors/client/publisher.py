"""Messages with calls, as they are put on the bus."""

from __future__ import annotations

from collections.abc import Sequence

from fluster.actors.client.inboxes import Inboxes
from fluster.actors.protocol import frames, json_frames
from fluster.actors.protocol.calls import Call, Send
from fluster.actors.protocol.members import Member, share_memory
from fluster_bus.connection.carrier import Carrier
from fluster_bus.core import subjects
from fluster_bus.payloads import payloads
from fluster_bus.storage.objects import ObjectStore

_FRAME_OVERHEAD = 4096  # of a call around its payload, amply


class Publisher:
    """Publishes those of one client; answers come to its inboxes."""

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
