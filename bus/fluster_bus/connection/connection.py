"""The life of a connection to the bus: how it is made, lost, rebuilt and closed; what waits for answers fails when it is lost.

What nats-py raises becomes an error of Fluster's own here, with the remedy.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import re
import secrets
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Self

import nats.errors
import nats.js.errors

from fluster_bus.access.address import BusAddress
from fluster_bus.access.tls import HandshakeError, client_context
from fluster_bus.connection.nats_client import NO_LIMIT, QuickClient
from fluster_bus.connection.replies import Replies
from fluster_bus.core.errors import (
    ClosedError,
    ConnectError,
    CredentialsError,
    DisconnectedError,
    FaultLog,
    StorageError,
    StorageTimeoutError,
    UntrustedServerError,
)
from fluster_bus.direct.pulse import PingTiming
from fluster_bus.running.coroutines import SpawnedTasks, retried

if TYPE_CHECKING:
    from fluster_bus.access.address import BusAddress

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 5.0
_DRAIN_TIMEOUT_S = 2
_CLOSE_TIMEOUT_S = 15.0  # more than nats-py waits: for the drain, and 10 s for the server to have seen all
PENDING_MESSAGES, PENDING_BYTES = 512 * 1024, 256 << 20  # of one subscription, before the slowest are dropped
# What writing to a connection raises that just broke: a RuntimeError is uvloop's word for it, a TypeError asyncio's.
_TRANSPORT_GONE = (OSError, RuntimeError, TypeError)
_NO_LIMIT = 1 << 30  # of unanswered pings: nats-py counts no other sign of life, and waits for what is unsent then
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


class Connection:
    """A connection to NATS that comes back by itself, and the inbox on which it hears answers. Not thread-safe."""

    def __init__(self, address: BusAddress, name: str, pings: PingTiming | None = None) -> None:
        self.address = address
        self.name = name
        self._pings = pings or PingTiming.of_this_process()
        self._nats = QuickClient()
        self._replies = Replies()
        # A secret of this connection: one that sees one reply subject can neither guess nor hear another's.
        self._inbox = f"{address.inbox_prefix()}.{secrets.token_urlsafe(16)}"
        self._home = address.home
        self._inboxes: dict[str, str] = {}  # {namespace: the same, for the answers of its jobs}
        self._opened = False
        self._connected = False
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()  # the connection was lost while it was being closed, or is closed
        self._handshakes_failed = 0  # since there was a connection
        self._refusals: list[Exception] = []  # of the credentials, before there was one
        self._over: str | None = None  # why there will be no further connection
        self._settled = asyncio.Event()  # there is a connection, or there will be none
        self._on_disconnect: list[Callable[[], None]] = []
        self._on_leaving: list[Callable[[], None]] = []
        self._on_reconnect: list[Callable[[], None]] = []
        self._on_end: list[Callable[[], None]] = []
        self._spawned = SpawnedTasks(name)
        self._faults = FaultLog(log)

    # ---- life -------------------------------------------------------------------------------------------

    @classmethod
    async def connect(
        cls, address: BusAddress, *, name: str, timeout_s: float = DEFAULT_TIMEOUT_S, pings: PingTiming | None = None
    ) -> Self:
        """A connection with the credentials of `address`; it is rebuilt without end when it is lost.

        It is lost when `pings` (default: the environment's) are not answered. Raises CredentialsError when the server
        refuses the credentials, ConnectError when none answers within `timeout_s`.
        """
        made = cls(address, name, pings)
        try:
            async with asyncio.timeout(timeout_s):
                await made._open()
        except (nats.errors.Error, OSError, TimeoutError) as error:
            await made._nats.close()
            refusal = next(iter(made._refusals), error)  # says more than that another server was silent
            raise connect_error(address, refusal if isinstance(error, TimeoutError) else error) from error
        except asyncio.CancelledError:
            await made._nats.close()
            raise
        return made

    @property
    def group_address(self) -> BusAddress:
        """Its address with the servers of which those of the group have told it: each may be there when its own are not."""
        return self.address.with_servers(server.netloc for server in self._nats.discovered_servers)

    async def connect_beside(self, name: str) -> Self:
        """Another connection of the same user, however long it takes until a server of the group can be reached.

        The servers of its own address come first: not each that they name need be reachable from here. Raises CredentialsError.
        """
        attempts = itertools.count()

        async def connect(_left_s: float) -> Self:
            address = self.group_address if next(attempts) % 2 else self.address
            return await self.connect(address, name=name)

        return await retried(connect, on=(ConnectError,), timeout_s=math.inf)

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
        await self._nats.hear(f"{inbox}.*", self._replies.deliver)

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
                    self._nats.drop_unsent()
                    await self._nats.close()
        except (nats.errors.Error, TimeoutError, *_TRANSPORT_GONE) as error:
            log.info("the connection %s did not end cleanly: %s", self.name, str(error) or type(error).__name__)
            self._nats.stream.abort()  # what is unsent stays so, and is not waited for
            await self._nats.abandon()

    async def _drain(self) -> None:
        """Close when all is handled and sent; at once when the connection is lost: nats-py would wait for an answer."""
        draining, gone = asyncio.ensure_future(self._nats.drain()), asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait({draining, gone}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # More than once: nats-py's flush may forget one that comes in the moment of the answer.
            while not draining.done():
                draining.cancel()
                await asyncio.sleep(0)
            raise
        finally:
            gone.cancel()
        if not draining.done():
            self._nats.drop_unsent()
            draining.cancel()
            await asyncio.wait({draining})
        if draining.cancelled():
            await self._nats.abandon()
        else:
            draining.result()

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
        """Have `callback` run when there will be no further connection: it is being closed, or the server closed it for good."""
        self._on_end.append(callback)

    def on_leaving(self, callback: Callable[[], None]) -> None:
        """Have `callback` run when this is about to be closed; what it wakes may still publish."""
        self._on_leaving.append(callback)

    def off(self, callback: Callable[[], None]) -> None:
        """Have `callback` no longer run."""
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
            self._refusals.append(error)
            if len(self._refusals) >= self.address.refusals_believed:
                raise error  # out of nats-py's connect, which would try the same credentials for ever
            log.debug("%s: %s; they are shown once more", self.name, error)
            return
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
        # One may ask a service again and again to answer where it may not.
        self._faults.warning("%s: user %s may not use %s", self.name, self.address.user, denied[1])
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

    def spawn(self, task: Coroutine[object, None, None], name: str) -> None:
        """Run `task` until it ends or this connection is closed; an error in it is logged."""
        self._spawned.spawn(task, name)


def is_refusal(error: Exception) -> bool:
    """Whether the server said that it does not take the credentials."""
    return "authorization" in str(error).lower()


def connect_error(address: BusAddress, error: Exception) -> ConnectError:
    """What the attempt to connect to `address` raises, which ended with `error`."""
    file = address.file
    if isinstance(error, HandshakeError):
        return UntrustedServerError(str(error))
    if is_refusal(error) and address.token is not None:
        return CredentialsError(
            f"{address} refused the credentials{f' in the file {file}' if file is not None else ''}: they were revoked, have expired, or "
            "are of another cluster: have new ones made with `fluster credentials add`"
        )
    if is_refusal(error):
        return CredentialsError(
            f"{address} refused the credentials"
            + (f" in the file {file}: they are of a cluster that is gone" if file is not None else "")
            + ": take the address that the cluster printed, with user and password, or the file it wrote"
        )
    reason = str(error) or "timed out"
    if file is not None:
        return ConnectError(
            f"no nats-server answers at {address}, which the file {file} names: the cluster that wrote it is "
            f"gone, or does not answer: start one, as with `fluster up`, and take the address that it prints ({reason})"
        )
    return ConnectError(f"no nats-server answers at {address}: is the cluster up? ({reason})")


_NOT_YET = 10008  # "JetStream system temporarily unavailable"


def store_error(what: str, error: Exception) -> StorageError:
    """The error to raise where `what` was to happen to a stream."""
    if _is_silent(error):
        return StorageTimeoutError(f"{what}: the server's store did not answer in time")
    return StorageError(f"{what}: {error}")


def _is_silent(error: Exception) -> bool:
    if isinstance(error, nats.js.errors.ServiceUnavailableError):
        return error.err_code in (None, _NOT_YET)
    return isinstance(error, TimeoutError | nats.errors.NoRespondersError)
