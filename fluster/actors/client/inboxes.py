"""Where a client's answers come to, and how they are read there."""

from __future__ import annotations

import logging
from collections.abc import Callable

from fluster.actors.protocol import frames, json_frames
from fluster.actors.protocol.failures import decode_failure
from fluster.actors.protocol.frames import WireReply
from fluster.actors.protocol.members import Member
from fluster_bus.connection.carrier import Carrier
from fluster_bus.core import codec, subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import InvalidMessageError
from fluster_bus.payloads import payloads

log = logging.getLogger(__name__)

_NO_RESPONDERS = "503"


class Inboxes:
    """The inboxes of one client. An answer is known by the number of the message that it is for.

    Nothing is read of what comes with another number: jobs of the namespace may send it here, and to unpickle is to run code.
    `recipient` says to whom a message went, `expects` whether it was sent and may be answered yet. `on_replies` and
    `on_question` are given the endpoint that answers and what it says; the latter, first, where to answer whether the stream
    is still read.
    """

    def __init__(
        self,
        bus: Carrier,
        namespace: str,
        recipient: Callable[[int], Member | None],
        *,
        expects: Callable[[int], bool],
        on_replies: Callable[[int, str, list[WireReply]], object],
        on_question: Callable[[str, int, str, list[WireReply]], object],
        on_no_responders: Callable[[int], object],
        on_refused: Callable[[int, Exception], object],
    ) -> None:
        self._bus, self._namespace = bus, namespace
        self._recipient, self._expects = recipient, expects
        self._on_replies, self._on_question = on_replies, on_question
        self._on_no_responders, self._on_refused = on_no_responders, on_refused
        self.plain = payloads.inbox_here(bus.inbox(namespace))
        self.alone = ""  # of calls that were sent alone; their messages have negative numbers
        self.json = ""  # of actors that take JSON only: what comes there is never unpickled

    async def open(self) -> None:
        await self._bus.subscribe(f"{self.plain}.{subjects.ANY_TOKEN}", self.on_delivery)

    def open_alone(self) -> str:
        """The inbox for calls that are sent alone; who sends them reads it."""
        self.alone = payloads.inbox_here(self._bus.inbox(self._namespace))
        return self.alone

    async def open_json(self) -> str:
        """The inbox for actors that take JSON only, which is heard from now on."""
        if not self.json:
            inbox = self._bus.inbox(self._namespace)
            await self._bus.subscribe(f"{inbox}.{subjects.ANY_TOKEN}", self._on_json_delivery)
            self.json = inbox
        return self.json

    def on_delivery(self, delivery: Delivery) -> None:
        """Something that came to the plain inbox, or to that of calls that were sent alone."""
        number = subjects.reply_number(delivery.subject)
        if delivery.headers is not None and delivery.status == _NO_RESPONDERS:
            self._on_no_responders(number)
            return
        member = self._recipient(number)
        if not self._expects(number) or (member is not None and member.takes_json_only):
            if delivery.reply:  # an actor asks whether its stream is still read
                self._on_question(delivery.reply, number, "", [])
            return
        try:
            endpoint_id, replies = frames.decode_replies(delivery.data)
        except InvalidMessageError as error:
            if not codec.is_pickle(delivery.data):
                self._on_refused(number, _refusal(delivery.data))
                return
            log.warning("an answer was dropped: %s", error)
            return
        for _index, kind, payload in replies:
            if kind == frames.ITEMS or (kind is True and payloads.is_lent(payload)):
                # Also what is no longer waited for: so its sender knows that it is dropped.
                replies = [_held(reply) for reply in replies]
                break
        if delivery.reply:
            self._on_question(delivery.reply, number, endpoint_id, replies)
            return
        self._on_replies(number, endpoint_id, replies)

    def _on_json_delivery(self, delivery: Delivery) -> None:
        number = subjects.reply_number(delivery.subject)
        if delivery.headers is not None and delivery.status == _NO_RESPONDERS:
            self._on_no_responders(number)
            return
        member = self._recipient(number)
        if member is None or not member.takes_json_only:
            return  # it is no longer waited for, or belongs to another caller, which must not be answered from here
        try:
            ok, payload = json_frames.decode_reply(delivery.data)
        except InvalidMessageError as error:
            self._on_refused(number, error)
            return
        self._on_replies(number, member.endpoint_id, [(0, ok, payload)])


def _refusal(data: bytes) -> Exception:
    """What an actor says, in JSON, of a message that it does not read."""
    try:
        ok, payload = json_frames.decode_reply(data)
    except InvalidMessageError as error:
        return error
    return InvalidMessageError("an actor answered in JSON to a call that was none") if ok else decode_failure(payload)


def _held(reply: WireReply) -> WireReply:
    index, kind, payload = reply
    if kind == frames.ITEMS:
        first, items = payload
        payload = first, [payloads.held(item) for item in items]
    elif kind is True:
        payload = payloads.held(payload)
    return index, kind, payload
