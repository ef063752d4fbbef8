"""One connection to the bus, made comfortable: requests that fail at once when no service listens, services, streams."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, TypeVar

import nats.errors
from nats.js import JetStreamContext

from fluster_bus.connection.connection import DEFAULT_TIMEOUT_S, PENDING_BYTES, PENDING_MESSAGES, Connection
from fluster_bus.connection.replies import checked
from fluster_bus.connection.serving import Answer, RequestQueue, Service
from fluster_bus.core import subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import (
    BusError,
    BusyError,
    ClosedError,
    DisconnectedError,
    InvalidNameError,
    MessageTooLargeError,
    NoRespondersError,
    RequestTimeoutError,
)
from fluster_bus.direct import wire
from fluster_bus.messages.parts.model import Message
from fluster_bus.running.coroutines import retried

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription as NatsSubscription

    from fluster_bus.connection.nats_client import QuickClient

log = logging.getLogger(__name__)

Request = TypeVar("Request", bound=Message)
Reply = TypeVar("Reply", bound=Message)

_ASK_AGAIN_S = 2.0  # an answer takes milliseconds: after this its sender has probably died
_FLUSH = "(flush)"  # in the place of a subject
_SHOWN = 100  # characters


class Bus(Connection):
    """A connection to NATS that comes back by itself. Make one with `Bus.connect`; not thread-safe."""

    # ---- sending ----------------------------------------------------------------------------------------

    def _own_error(self, error: nats.errors.Error, subject: str, size: int) -> BusError:
        """What to raise for an error of nats-py's."""
        if isinstance(error, nats.errors.MaxPayloadError):
            return self._too_large(subject, size)
        if isinstance(error, nats.errors.ConnectionClosedError):
            return ClosedError(f"the connection {self.name!r} is closed")
        if isinstance(error, nats.errors.OutboundBufferLimitError | nats.errors.ConnectionReconnectingError):
            return self._disconnected()
        if isinstance(error, nats.errors.TimeoutError):
            return RequestTimeoutError(f"{subject}: {self.address} did not answer in time")
        return BusError(f"sending to {subject} failed: {error}")

    def _too_large(self, subject: str, size: int) -> MessageTooLargeError:
        return MessageTooLargeError(
            f"the message to {subject} has {size:,} bytes, over the server's limit of {self.max_payload:,}"
        )

    async def publish(
        self, subject: str, data: bytes = b"", *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Send without an answer. Raises DisconnectedError at once while there is no connection.

        MessageTooLargeError and InvalidNameError say what the server would answer by ending the connection for good, so it is not
        sent: what there is to say, and where, may be the choice of a tenant. nats-py looks at the data alone.
        """
        if not self._connected:
            raise self._disconnected()
        if not wire.fits_line(subject, reply):
            raise InvalidNameError(f"the subject {subject[:_SHOWN]!r}… and that of the answer have too many bytes")
        if headers and (size := len(data) + wire.headers_size(headers)) > self.max_payload:
            raise self._too_large(subject, size)
        try:
            await self._nats.publish(subject, data, reply=reply, headers=headers)
        except nats.errors.Error as error:
            raise self._own_error(error, subject, len(data)) from error

    async def flush(self) -> None:
        """Wait until the server has seen everything that was sent, subscriptions included.

        Raises DisconnectedError at once when the connection is lost meanwhile.
        """
        # A message to this connection itself comes back after all that was sent before it. nats-py's own flush does
        # not do: its PING overtakes what is buffered, and when it is cancelled the PONG ends the loop that reads.
        reply, coming = self._replies.expect(self._inbox, _FLUSH, DEFAULT_TIMEOUT_S)
        try:
            await self.publish(reply)
            checked(_FLUSH, await coming)
        except RequestTimeoutError as error:
            raise RequestTimeoutError(
                f"{self.address} did not send back a message within {DEFAULT_TIMEOUT_S:g} s"
            ) from error
        finally:
            self._replies.close(reply)

    def inbox(self, namespace: str | None = None) -> str:
        """A fresh subject that only this connection's user may listen on, and to which `namespace` may answer."""
        return f"{self.address.inbox_prefix(namespace)}.{secrets.token_urlsafe(16)}"

    async def request(
        self,
        subject: str,
        data: bytes = b"",
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        headers: dict[str, str] | None = None,
        asked: str | None = None,
    ) -> Delivery:
        """The answer to a request; `asked` is the namespace whose jobs are to answer, where `subject` does not name it.

        Raises NoRespondersError, DisconnectedError (at once, also when the connection is lost while waiting),
        CredentialsError when the server forbids the subject, RequestTimeoutError, and ServiceError when the
        answer is an error.
        """
        inbox = await self._inbox_for(asked or subjects.asked_namespace(subject))
        reply, coming = self._replies.expect(inbox, subject, timeout_s)
        try:
            await self.publish(subject, data, reply=reply, headers=headers)
            return checked(subject, await coming)
        finally:
            self._replies.close(reply)

    async def _inbox_for(self, namespace: str | None) -> str:
        """Where answers are heard of a namespace's jobs, which may answer nowhere else, or of the cluster's services."""
        if namespace is None or namespace == self._home:
            return self._inbox
        if namespace not in self._inboxes:
            inbox = self.inbox(namespace)
            await self._hear(inbox)
            self._inboxes.setdefault(namespace, inbox)
        return self._inboxes[namespace]

    async def request_many(
        self, subject: str, data: bytes, *, last_status: str, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[Delivery]:
        """All answers to a request whose end is marked by a reply with `last_status`, or by any other status.

        The last element is that reply. Each answer has `timeout_s`. Raises as `request` does.
        """
        reply, answers = self._replies.open(self._inbox, subject)
        found: list[Delivery] = []
        try:
            await self.publish(subject, data, reply=reply)
            while not found or found[-1].status is None:
                async with asyncio.timeout(timeout_s):
                    found.append(checked(subject, await answers.get()))
        except TimeoutError as error:
            raise RequestTimeoutError(
                f"no further answer from {subject} within {timeout_s:g} s ({last_status} not seen)"
            ) from error
        finally:
            self._replies.close(reply)
        return found

    async def ask(
        self, subject: str, message: Message, reply: type[Reply], *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Reply:
        """The answer of a service, read as `reply`.

        While no service listens or answers, the service is busy, or the connection is lost, the request is sent again until
        `timeout_s` is over: a service that restarts is waited for, also when it took the request with it. Services are asked for
        states and wishes that may be sent twice. Raises as `request` does.
        """
        data = message.to_json()
        try:
            answer = await retried(
                lambda left_s: self.request(subject, data, timeout_s=min(left_s, _ASK_AGAIN_S)),
                on=(NoRespondersError, DisconnectedError, RequestTimeoutError, BusyError),
                timeout_s=timeout_s,
            )
        except RequestTimeoutError as error:  # which names the time of the last try alone
            raise RequestTimeoutError(f"no answer from {subject} within {timeout_s:g} s") from error
        return reply.from_json(answer.data)

    # ---- receiving --------------------------------------------------------------------------------------

    async def subscribe(
        self, subject: str, callback: Callable[[Delivery], Awaitable[None] | None], *, queue: str = ""
    ) -> Subscription:
        """Have `callback` run for each message, one after the other, in the order they were sent. Raises ClosedError."""
        if self._over is not None:
            raise ClosedError(self._over)

        async def on_message(msg: Msg) -> None:
            result = callback(Delivery.of(msg))
            if result is not None:
                await result

        try:
            made = await self._nats.subscribe(
                subject,
                queue=queue,
                cb=on_message,
                pending_msgs_limit=PENDING_MESSAGES,
                pending_bytes_limit=PENDING_BYTES,
            )
        except nats.errors.Error as error:
            raise self._own_error(error, subject, 0) from error
        return Subscription(self, self._nats, made)

    async def hear(self, subject: str, take: Callable[[Delivery], None]) -> Subscription:
        """Have `take` run for each message as it is read, before anything else: it is to be short. Its errors are logged.

        Raises ClosedError.
        """
        if self._over is not None:
            raise ClosedError(self._over)
        try:
            made = await self._nats.hear(subject, take)
        except nats.errors.Error as error:
            raise self._own_error(error, subject, 0) from error
        return Subscription(self, self._nats, made)

    async def serve(
        self,
        subject: str,
        request: type[Request],
        handler: Callable[[Request, str], Awaitable[Answer]],
        *,
        queue: str = "",
        concurrency: int = 64,
        request_queue: RequestQueue | None = None,
    ) -> Subscription:
        """Answer requests on `subject` with what `handler(request, subject)` returns, `concurrency` at a time.

        More wait their turn; with a `request_queue` that decides when each is answered. A
        BusError of the handler becomes an error reply with its code and text, any other exception an error reply and a
        line in the log. A reply subject that is not an inbox is refused: else those who may ask here could make this
        service write wherever it may write itself.
        """
        service = Service(self, subject, request, handler, concurrency=concurrency, request_queue=request_queue)
        return await self.subscribe(subject, service.on_delivery, queue=queue)

    async def drain_all(self, subscriptions: Collection[Subscription]) -> None:
        """Leave them as `Subscription.drain` does, with one wait for the server instead of one for each."""
        leaving = [each for each in subscriptions if not each.is_leaving]
        if not leaving:
            return
        for each in leaving:
            each.is_leaving = True
        reconnects = self._nats.stats["reconnects"]
        try:
            # nats-py's own drain stops listening when its PONG is there, which may be before its UNSUB has left.
            for each in leaving:
                await self._nats.send_unsubscribe(each.of_nats)
            await self.flush()
            while leaving:
                await self._nats.wait_handled(leaving[-1].of_nats)
                if self._nats.stats["reconnects"] != reconnects:
                    break  # subscribed to anew: the server is to hear once more that they are left
                self._nats.forget(leaving.pop().of_nats)
        except (DisconnectedError, ClosedError):
            log.debug("%s: the connection was lost while leaving %s", self.name, leaving[0].of_nats.subject)
        finally:  # those that are left, because of an error or a cancellation
            for each in leaving:
                await each.unsubscribe()

    @property
    def awaited_replies(self) -> int:
        """How many requests are out whose replies are awaited."""
        return len(self._replies)

    @property
    def jetstream(self) -> JetStreamContext:
        """nats-py's own view of streams, for the rest of this package."""
        return self._nats.jetstream(timeout=DEFAULT_TIMEOUT_S)


class Subscription:
    """Interest in a subject, until it is drained or dropped."""

    def __init__(self, bus: Bus, client: QuickClient, subscription: NatsSubscription) -> None:
        self._bus = bus
        self._client = client
        self.of_nats = subscription
        self.is_leaving = False

    async def drain(self) -> None:
        """Leave, after everything that is on its way here has been handled: nothing is lost, but by a lost connection."""
        await self._bus.drain_all([self])

    async def unsubscribe(self) -> None:
        """Leave at once; what is on its way here is dropped. Works without a connection, too."""
        self.is_leaving = True
        if self._client.is_subscribed(self.of_nats):
            await self.of_nats.unsubscribe()
