"""One connection to the bus, made comfortable: requests that fail at once when nobody can answer, services, streams."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar

import nats
import nats.errors
from nats.js import JetStreamContext

from fluster_bus.access.tls import HandshakeError, client_context
from fluster_bus.connection.bus import Subscription
from fluster_bus.connection.connection import Replies
from fluster_bus.connection.nats_client import NO_LIMIT, QuickClient
from fluster_bus.connection.nats_errors import connect_error, is_refusal
from fluster_bus.connection.serving import Answer, Entrance, Service
from fluster_bus.core import subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import (
    BusError,
    BusyError,
    ClosedError,
    CredentialsError,
    DisconnectedError,
    MessageTooLargeError,
    NoRespondersError,
    RequestTimeoutError,
    service_error,
)
from fluster_bus.direct.pulse import PingTiming
from fluster_bus.messages.parts.model import Message
from fluster_bus.running.coroutines import SpawnedTasks, retried

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from fluster_bus.access.address import BusAddress

log = logging.getLogger(__name__)

Request = TypeVar("Request", bound=Message)
Reply = TypeVar("Reply", bound=Message)

DEFAULT_TIMEOUT_S = 5.0
_ASK_AGAIN_S = 2.0  # an answer takes milliseconds: after this its sender has probably died
_DRAIN_TIMEOUT_S = 2
_CLOSE_TIMEOUT_S = 15.0  # more than nats-py waits: for the drain, and 10 s for the server to have seen all
_NO_RESPONDERS = "503"
_PENDING_MESSAGES, _PENDING_BYTES = 512 * 1024, 256 << 20  # of one subscription, before the slowest are dropped
# What writing to a connection raises that just broke: a RuntimeError is uvloop's word for it, a TypeError asyncio's.
_TRANSPORT_GONE = (OSError, RuntimeError, TypeError)
_NO_LIMIT = 1 << 30  # of unanswered pings: nats-py counts no other sign of life, and waits for what is unsent then
_FLUSH = "(flush)"  # in the place of a subject
_DENIED = re.compile(r'permissions violation for (?:publish|subscription) to "([^"]+)"', re.IGNORECASE)

# Loops hold their tasks weakly, and nothing else holds a connection whose owner was cancelled while it closed it.
_CLOSINGS: set[asyncio.Task[None]] = set()


def _nats_options(address: BusAddress) -> dict[str, Any]:
    """`address.proof` as options of nats-py, which asks for a token and its signature by callbacks."""
    fields = address.proof(None)
    if "jwt" not in fields:
        return {"user": fields.get("user"), "password": fields.get("pass")}
    return {
        "user_jwt_cb": lambda: bytearray(fields["jwt"].encode()),
        "signature_cb": lambda nonce: address.proof(nonce)["sig"].encode(),
    }


class Bus:
    """A connection to NATS that comes back by itself. Make one with `Bus.connect`; not thread-safe."""

    def __init__(self, address: BusAddress, name: str, pings: PingTiming | None = None) -> None:
        self.address = address
        self.name = name
        self._pings = pings or PingTiming.of_this_process()
        self._nats = QuickClient()
        self._replies = Replies()
        # A secret of this connection: who sees one reply subject can neither guess nor hear another's.
        self._inbox = f"{address.inbox_prefix()}.{secrets.token_urlsafe(16)}"
        self._home = address.home
        self._inboxes: dict[str, str] = {}  # {namespace: the same, for the answers of its jobs}
        self._opened = False
        self._connected = False
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()  # the connection was lost while it was being closed, or is closed
        self._handshakes_failed = 0  # since there was a connection
        self._over: str | None = None  # why there will be no connection any more
        self._settled = asyncio.Event()  # there is a connection, or there will be none
        self._on_disconnect: list[Callable[[], None]] = []
        self._on_leaving: list[Callable[[], None]] = []
        self._on_reconnect: list[Callable[[], None]] = []
        self._on_end: list[Callable[[], None]] = []
        self._spawned = SpawnedTasks(name)

    # ---- life -------------------------------------------------------------------------------------------

    @classmethod
    async def connect(
        cls, address: BusAddress, *, name: str, timeout_s: float = DEFAULT_TIMEOUT_S, pings: PingTiming | None = None
    ) -> Self:
        """A connection with the credentials of `address`; it is rebuilt without end when it is lost.

        It is lost when `pings` (default: the environment's) are not answered. Raises CredentialsError when the server
        refuses the credentials, ConnectError when none answers within `timeout_s`.
        """
        bus = cls(address, name, pings)
        try:
            async with asyncio.timeout(timeout_s):
                await bus._open()
        except (nats.errors.Error, OSError, TimeoutError) as error:
            await bus._nats.close()
            raise connect_error(address, error) from error
        except asyncio.CancelledError:
            await bus._nats.close()
            raise
        return bus

    async def _open(self) -> None:
        await self._nats.connect(
            servers=self.address.servers,
            **_nats_options(self.address),
            tls=client_context(self.address.ca) if self.address.may_encrypt else None,
            name=self.name,
            inbox_prefix=self.address.inbox_prefix(),
            allow_reconnect=True,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.1,  # type: ignore[arg-type]  # annotated int, used as seconds of a sleep
            connect_timeout=NO_LIMIT,
            drain_timeout=_DRAIN_TIMEOUT_S,  # a handler that hangs does not hold up `close`
            # Nothing is kept back while disconnected: it would run after the reconnect, long after its caller gave up.
            pending_size=-1,
            ping_interval=self._pings.interval_s,  # type: ignore[arg-type]  # annotated int, used as seconds of a sleep
            max_outstanding_pings=_NO_LIMIT,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_closed,
        )
        await self._hear(self._inbox)
        self._opened = True
        self._on_standing()
        self.spawn(self._nats.watch_pulse(self._pings), "the watch over the connection")

    async def _hear(self, inbox: str) -> None:
        await self._nats.subscribe(
            f"{inbox}.*",
            cb=self._on_reply,
            pending_msgs_limit=_PENDING_MESSAGES,
            pending_bytes_limit=_PENDING_BYTES,
        )

    def _on_standing(self) -> None:
        if self._over is None:
            self._connected = True
            self._handshakes_failed = 0
            self._settled.set()

    def _end(self, reason: str) -> None:
        self._connected = False
        self._over = reason
        self._settled.set()
        self._replies.fail(ClosedError(reason))
        for callback in self._on_end:
            callback()

    async def close(self) -> None:
        """Handle what has arrived, send what is written, then leave: that goes on where the caller is cancelled meanwhile.

        Returns when the connection is closed, to each that calls it.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name=f"{self.name}: the closing of the connection")
            _CLOSINGS.add(self._closing)
            self._closing.add_done_callback(_CLOSINGS.discard)
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for callback in self._on_leaving:
            callback()
        try:
            await asyncio.sleep(0)  # what they have woken sends what it has
            self._closed = True
            self._end(f"the connection {self.name!r} was closed: make another")
            await self._leave()
        except asyncio.CancelledError:  # the loop ends
            self._nats.stream.abort()
            raise
        finally:
            await self._spawned.close()

    async def _leave(self) -> None:
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                if self._nats.is_connected:
                    await self._drain()
                else:
                    self._drop_unsent()
                    await self._nats.close()
        except (nats.errors.Error, TimeoutError, *_TRANSPORT_GONE) as error:
            log.info("the connection %s did not end cleanly: %s", self.name, str(error) or type(error).__name__)
            self._nats.stream.abort()  # what is unsent stays so, and is not waited for
            await self._abandon()

    async def _drain(self) -> None:
        """Close when all is handled and sent; at once when the connection is lost: nats-py would wait for an answer."""
        draining, gone = asyncio.ensure_future(self._nats.drain()), asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait({draining, gone}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # More than once: nats-py takes the first for the end of the drain, and waits for the server then.
            while not draining.done():
                draining.cancel()
                await asyncio.sleep(0)
            raise
        finally:
            gone.cancel()
        if not draining.done():
            self._drop_unsent()
            draining.cancel()
            await asyncio.wait({draining})
        if draining.cancelled():  # as nats-py had not yet begun to wait, or waited for what it does last
            await self._abandon()
        else:
            draining.result()

    def _drop_unsent(self) -> None:
        # It would be written to the transport that is gone, which asyncio answers with a TypeError.
        self._nats._pending, self._nats._pending_data_size = [], 0  # noqa: SLF001

    async def _abandon(self) -> None:
        """Let go of what nats-py keeps when the server left in the middle of its own close."""
        client = self._nats
        self._drop_unsent()
        for task in [each._wait_for_msgs_task for each in client._subs.values()]:  # noqa: SLF001
            if task is not None:
                task.cancel()
        client._subs.clear()  # noqa: SLF001
        await client.close()  # does nothing where it came far enough to call itself closed
        if client._transport is not None:  # noqa: SLF001
            client._transport.close()  # noqa: SLF001

    @property
    def connected(self) -> bool:
        return self._connected

    @property
    def max_payload(self) -> int:
        """The largest message that the server takes, in bytes."""
        return self._nats.max_payload

    @property
    def server_version(self) -> tuple[int, int]:
        """Which nats-server is at the other end, as (2, 15)."""
        version = self._nats.connected_server_version
        return version.major, version.minor

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Have `callback` run whenever the connection is lost."""
        self._on_disconnect.append(callback)

    def certificate_end(self) -> float | None:
        """When the server's certificate ends, as Unix time; None where the connection is not encrypted."""
        return self._nats.stream.certificate_end()

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Have `callback` run whenever the connection is back and subscriptions stand again."""
        self._on_reconnect.append(callback)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Have `callback` run when there will be no connection any more: it is being closed, or the server closed it for good."""
        self._on_end.append(callback)

    def on_leaving(self, callback: Callable[[], None]) -> None:
        """Have `callback` run when this is about to be closed; what it wakes may still publish."""
        self._on_leaving.append(callback)

    def off(self, callback: Callable[[], None]) -> None:
        """Have `callback` not run any more."""
        self._on_disconnect = [each for each in self._on_disconnect if each != callback]
        self._on_reconnect = [each for each in self._on_reconnect if each != callback]
        self._on_leaving = [each for each in self._on_leaving if each != callback]
        self._on_end = [each for each in self._on_end if each != callback]

    async def wait_connected(self, timeout_s: float | None = None) -> None:
        """Wait until there is a connection. Raises DisconnectedError when there is none in time, ClosedError when none
        will come.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()
        except TimeoutError as error:
            raise self._disconnected() from error
        if self._over is not None:
            raise ClosedError(self._over)

    def _disconnected(self) -> DisconnectedError | ClosedError:
        if self._over is not None:
            return ClosedError(self._over)
        return DisconnectedError(f"the connection to {self.address} is lost; it is being rebuilt")

    async def _on_error(self, error: Exception) -> None:
        if not self._opened and is_refusal(error):
            raise error  # out of nats-py's connect, which would try the same credentials for ever
        if isinstance(error, HandshakeError):
            self._handshakes_failed += 1
            if not self._opened and self._handshakes_failed >= len(self.address.servers):
                raise error  # by now each of them was tried
            if self._opened and self._handshakes_failed == 1:
                log.warning("%s: %s", self.name, error)
            return
        denied = _DENIED.search(str(error))
        if denied is None:
            # Before there was a connection, the error that `connect` raises says it all.
            level = logging.INFO if self._opened else logging.DEBUG
            log.log(level, "%s: %s", self.name, str(error) or type(error).__name__)
            return
        log.warning("%s: user %s may not use %s", self.name, self.address.user, denied[1])
        self._replies.fail(
            CredentialsError(f"user {self.address.user!r} may not send to {denied[1]!r}: ask with other credentials"),
            subject=denied[1],
        )

    async def _on_disconnected(self) -> None:
        if self._closed:
            self._gone.set()
        if not self._connected:
            return
        self._connected = False
        self._settled.clear()
        self._replies.fail(self._disconnected())
        for callback in self._on_disconnect:
            callback()

    async def _on_reconnected(self) -> None:
        self._on_standing()
        for callback in self._on_reconnect:
            callback()

    async def _on_closed(self) -> None:
        if self._opened and not self._closed:
            log.error("%s: the server closed this connection for good: %s", self.name, self._nats.last_error)
            self._end(f"the server closed the connection {self.name!r} for good: {self._nats.last_error}")

    # ---- sending ----------------------------------------------------------------------------------------

    @contextmanager
    def _translated(self, subject: str, size: int) -> Iterator[None]:
        try:
            yield
        except nats.errors.MaxPayloadError as error:
            raise MessageTooLargeError(
                f"the message to {subject} has {size:,} bytes, over the server's limit of {self.max_payload:,}"
            ) from error
        except nats.errors.ConnectionClosedError as error:
            raise ClosedError(f"the connection {self.name!r} is closed") from error
        except (nats.errors.OutboundBufferLimitError, nats.errors.ConnectionReconnectingError) as error:
            raise self._disconnected() from error
        except nats.errors.TimeoutError as error:
            raise RequestTimeoutError(f"{subject}: {self.address} did not answer in time") from error
        except nats.errors.Error as error:
            raise BusError(f"sending to {subject} failed: {error}") from error

    async def publish(
        self, subject: str, data: bytes = b"", *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Send without an answer. Raises DisconnectedError at once while there is no connection."""
        if not self._connected:
            raise self._disconnected()
        with self._translated(subject, len(data)):
            await self._nats.publish(subject, data, reply=reply, headers=headers)

    async def flush(self) -> None:
        """Wait until the server has seen everything that was sent, subscriptions included.

        Raises DisconnectedError at once when the connection is lost meanwhile.
        """
        # A message to this connection itself comes back after all that was sent before it. nats-py's own flush does
        # not do: its PING overtakes what is buffered, and when it is cancelled the PONG ends the loop that reads.
        token, answers = self._replies.open(_FLUSH)
        try:
            await self.publish(f"{self._inbox}.{token}")
            async with asyncio.timeout(DEFAULT_TIMEOUT_S):
                self._checked(_FLUSH, await answers.get())
        except TimeoutError as error:
            raise RequestTimeoutError(
                f"{self.address} did not send back a message within {DEFAULT_TIMEOUT_S:g} s"
            ) from error
        finally:
            self._replies.close(token)

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
        token, coming = self._replies.expect(subject)
        try:
            await self.publish(subject, data, reply=f"{inbox}.{token}", headers=headers)
            async with asyncio.timeout(timeout_s):
                answer = await coming
        except TimeoutError as error:
            raise RequestTimeoutError(f"no answer on {subject} came within {timeout_s:g} s") from error
        finally:
            self._replies.close(token)
        return self._checked(subject, answer)

    async def _inbox_for(self, namespace: str | None) -> str:
        """Where answers are heard of a namespace's jobs, which may answer nowhere else, or of the cluster's services."""
        if namespace is None or namespace == self._home:
            return self._inbox
        if namespace not in self._inboxes:
            inbox = self.inbox(namespace)
            await self._hear(inbox)
            self._inboxes.setdefault(namespace, inbox)
        return self._inboxes[namespace]

    def _checked(self, subject: str, answer: Delivery | BusError) -> Delivery:
        if isinstance(answer, BusError):
            raise type(answer)(*answer.args)  # a fresh one: several requesters were handed the same
        if answer.status == _NO_RESPONDERS:
            raise NoRespondersError(f"no program listens on {subject}")
        if answer.error is not None:
            raise service_error(*answer.error)
        return answer

    async def request_many(
        self, subject: str, data: bytes, *, last_status: str, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[Delivery]:
        """All answers to a request whose end is marked by a reply with `last_status`, or by any other status.

        The last element is that reply. Each answer has `timeout_s`. Raises as `request` does.
        """
        token, answers = self._replies.open(subject)
        found: list[Delivery] = []
        try:
            await self.publish(subject, data, reply=f"{self._inbox}.{token}")
            while not found or found[-1].status is None:
                async with asyncio.timeout(timeout_s):
                    found.append(self._checked(subject, await answers.get()))
        except TimeoutError as error:
            raise RequestTimeoutError(
                f"no further answer from {subject} within {timeout_s:g} s ({last_status} not seen)"
            ) from error
        finally:
            self._replies.close(token)
        return found

    async def ask(
        self, subject: str, message: Message, reply: type[Reply], *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Reply:
        """The answer of a service, read as `reply`.

        While nobody listens or answers, the service is busy, or the connection is lost, the request is sent again until
        `timeout_s` is over: a service that restarts is waited for, also when it took the request with it. Services are asked for
        states and wishes that may be told twice. Raises as `request` does.
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

    async def _on_reply(self, msg: Msg) -> None:
        self._replies.deliver(Delivery.of(msg))

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

        with self._translated(subject, 0):
            return Subscription(
                self,
                await self._nats.subscribe(
                    subject,
                    queue=queue,
                    cb=on_message,
                    pending_msgs_limit=_PENDING_MESSAGES,
                    pending_bytes_limit=_PENDING_BYTES,
                ),
            )

    async def serve(
        self,
        subject: str,
        request: type[Request],
        handler: Callable[[Request, str], Awaitable[Answer]],
        *,
        queue: str = "",
        concurrency: int = 64,
        entrance: Entrance | None = None,
    ) -> Subscription:
        """Answer requests on `subject` with what `handler(request, subject)` returns, `concurrency` at a time.

        More wait their turn; with an `entrance` that decides when each is answered, and hears of each as it arrives. A
        BusError of the handler becomes an error reply with its code and text, any other exception an error reply and a
        line in the log. A reply subject that is not an inbox is refused: else those who may ask here could make this
        service write wherever it may write itself.
        """
        service = Service(self, subject, request, handler, concurrency=concurrency, entrance=entrance)
        return await self.subscribe(subject, service.on_delivery, queue=queue)

    @property
    def jetstream(self) -> JetStreamContext:
        """nats-py's own view of streams, for the rest of this package."""
        return self._nats.jetstream(timeout=DEFAULT_TIMEOUT_S)

    def spawn(self, task: Coroutine[Any, Any, None], name: str) -> None:
        """Run `task` until it ends or this connection is closed; an error in it is logged."""
        self._spawned.spawn(task, name)
