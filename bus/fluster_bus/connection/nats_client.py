"""nats-py's client, with what it does for every message made quicker, and with every cancellation heeded.

This is the one module that uses parts of nats-py which are not public; `tests/pure/bus/test_nats_client.py` names them, and
fails when a release of nats-py has changed them.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from nats.aio.client import Client, __version__
from nats.aio.msg import Msg
from nats.errors import DrainTimeoutError, ProtocolError
from nats.protocol.parser import Parser

from fluster_bus.access.tls import check_offer, handshake_error
from fluster_bus.connection.tcp_stream import TcpStream
from fluster_bus.core.errors import FaultLog, FlusterError
from fluster_bus.direct import wire
from fluster_bus.direct.pulse import PingTiming, Pulse

if TYPE_CHECKING:
    from nats.aio.client import Srv
    from nats.aio.subscription import Subscription

    from fluster_bus.core.delivery import Delivery

log = logging.getLogger(__name__)

if __version__.partition(".")[0] not in ("2", "0"):  # 0.0.0: it is installed without its metadata
    raise ImportError(
        f"nats-py {__version__} is installed, and Fluster uses parts of nats-py 2 that are not public: "
        "run `pip install 'nats-py>=2.16,<3'`"
    )

_CONNECT_TIMEOUT_S = 2.0  # for one server: to take the connection, and then to greet
# nats-py limits its waits by asyncio.wait_for. That of Python 3.11 forgets a cancellation that comes in the moment of the
# result: the task that was to end goes on. Without a limit it forgets none, so the limits are kept here.
NO_LIMIT: Any = None


class ExactParser(Parser):
    """nats-py's takes some bytes of a subject for white space, and then what a tenant sent for the end of the connection."""

    def __init__(self, take: Callable[[wire.RawMessage | wire.Control], Awaitable[None] | None]) -> None:
        self._take = take
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self._cut = wire.Parser(wire.raw_message)

    async def parse(self, data: bytes = b"") -> None:
        """Hand on what is complete. Raises ProtocolError."""
        cut = self._cut
        try:
            arrived = cut.feed(data)
        except wire.ProtocolError as error:
            raise ProtocolError(str(error)) from error
        take = self._take
        for said in arrived:
            rest = take(said)
            if rest is not None:
                await rest
            if self._cut is not cut:  # the connection was given up: what is left of it belongs to no other
                return


class QuickClient(Client):
    """The same, with fewer steps for each message: what a job costs is for the most part these.

    Its headers, which nearly all of ours have, are read at one go; what `hear` takes has no queue and no task of its own; and what is
    sent is written by a callback of the loop, where nats-py wakes a task. Is to be connected with `connect_timeout=NO_LIMIT`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ps = ExactParser(self._on_said)
        self.stream = TcpStream()
        self._heard: dict[int, Callable[[Delivery], None]] = {}  # {number of a subscription: what takes its messages}
        self._write_is_due = False
        self._faults = FaultLog(log)

    # ---- receiving ------------------------------------------------------------------------------------------

    def _on_said(self, said: wire.RawMessage | wire.Control) -> Awaitable[None] | None:
        if isinstance(said, tuple):
            number, subject, reply, data, headers = said
            take = self._heard.get(number)
            if take is None:
                return self._process_msg(number, subject, reply, data, headers)
            self.stats["in_msgs"] += 1
            self.stats["in_bytes"] += len(data)
            try:
                take(wire.delivery(subject, reply, data, headers))
            except FlusterError as error:  # it cannot be read
                where = subject.decode("utf-8", "replace")
                self._faults.warning("%s: a message on %s was not taken: %s", self.options["name"], where, error)
            except Exception as error:  # whatever a message does: this is the loop that reads the connection
                where = subject.decode("utf-8", "replace")
                self._faults.fault(error, "%s: a message on %s was not taken", self.options["name"], where)
            return None
        if isinstance(said, wire.Ping):
            return self._process_ping()
        if isinstance(said, wire.Pong):
            return self._process_pong()
        if isinstance(said, wire.Info):
            return self._process_info(dict(said.values))
        return self._process_err(said.text.lower())

    async def hear(self, subject: str, take: Callable[[Delivery], None]) -> Subscription:
        """Have `take` run for each message as soon as it is read, by the task that reads: it has to be short."""
        given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        given_up.cancel()  # so nats-py makes no task for it, and would drop what were to come before the next line
        subscription = await self.subscribe(subject, future=given_up)
        self._heard[subscription._id] = take  # noqa: SLF001
        return subscription

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._heard.pop(sid, None)
        super()._remove_sub(sid, max_msgs)

    async def _process_pong(self) -> None:
        """The same, also when the wait for it was given up: nats-py's would end the loop that reads."""
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        """At one go: nats-py looks at each character of each name. Whatever their writer sent is read, since an error
        would end the loop that reads this connection.
        """
        return wire.header_block(headers) or None if headers else None

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        """The same, also where a sender chose a subject that is not text."""
        where, answer_to = subject.decode("utf-8", "replace"), reply.decode("utf-8", "replace")
        return Msg(self, where, answer_to, data, headers, _sid=sid)

    # ---- sending --------------------------------------------------------------------------------------------

    async def _flush_pending(self, force_flush: bool = False) -> None:
        """Write all that is sent in this round of the loop at its end, at once."""
        del force_flush  # for a limit on what is pending, which is not set
        if not self._write_is_due:
            self._write_is_due = True
            asyncio.get_running_loop().call_soon(self._write_pending)

    def _write_pending(self) -> None:
        self._write_is_due = False
        if not self._pending or not self.is_connected:
            return
        if self.stream.write_if_room(self._pending, self._pending_data_size):
            self._pending, self._pending_data_size = [], 0
        elif self._flush_queue is not None and self._flush_queue.empty():
            # nats-py's task writes it, and waits until there is room, or deals with a connection that is lost.
            self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        async with asyncio.timeout(timeout):
            return await super().request(subject, payload, NO_LIMIT, old_style, headers)

    async def drain(self) -> None:
        """Close when all that has arrived was handled, or `drain_timeout` is over, and all is sent. Is to be connected.

        A cancellation ends it at once. nats-py's leaves a future then whose exception nothing takes, which Python logs as an error.
        """
        subscriptions = list(self._subs.values())
        self._status = Client.DRAINING_SUBS  # no other is made, and a connection that is lost stays so
        until = asyncio.get_running_loop().time() + self.options["drain_timeout"]
        try:
            async with asyncio.timeout_at(until):
                for each in subscriptions:
                    await self.send_unsubscribe(each)
                self._write_pending()  # a PING of nats-py's goes before what is not written yet
                await self.flush()
            async with asyncio.timeout_at(until):  # for itself, as nats-py's flush may forget the end of the other
                for each in subscriptions:
                    await self.wait_handled(each)
        except TimeoutError:
            log.info("%s: %s", self.options["name"], DrainTimeoutError())
        self._status = Client.DRAINING_PUBS
        await self.flush()
        await self.close()

    async def _connect_to_server(self, s: Srv) -> None:
        if self._transport is None:
            self._transport = self.stream  # connected by what follows, and by each reconnect
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            await super()._connect_to_server(s)

    async def _process_connect_init(self) -> None:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            try:
                await super()._process_connect_init()
            except ssl.SSLError as error:
                raise handshake_error(self._server, error) from error

    async def _process_info(self, info: dict[str, object], initial_connection: bool = False) -> None:
        if (
            initial_connection
        ):  # nats-py would send credentials as they are to one that says in a tls:// server's place that it has none
            info["tls_required"] = check_offer(self._server, info)
        await super()._process_info(info, initial_connection)

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        """The same, to its end where the connection is lost meanwhile: nats-py's stops at what it cannot send, and those who wait
        for the end of the connection would not be notified.
        """
        self.stream.leaving = True
        await super()._close(status, do_cbs)

    @property
    def _server(self) -> str:
        return self._current_server.uri.geturl() if self._current_server is not None else ""

    # ---- what nats-py has no public names for ---------------------------------------------------------------

    def drop_unsent(self) -> None:
        """Forget what waits to be sent: a transport that is gone answers it with a TypeError of asyncio's."""
        self._pending, self._pending_data_size = [], 0

    async def abandon(self) -> None:
        """Close, and let go of what nats-py keeps when the server left in the middle of its own close."""
        self.drop_unsent()
        for task in [each._wait_for_msgs_task for each in self._subs.values()]:  # noqa: SLF001
            if task is not None:
                task.cancel()
        self._subs.clear()
        await self.close()  # does nothing where it came far enough to call itself closed
        if self._transport is not None:
            self._transport.close()

    async def send_unsubscribe(self, subscription: Subscription) -> None:
        """Have the server send no more for it; what is on its way here is still handled."""
        await self._send_unsubscribe(subscription._id)  # noqa: SLF001

    async def wait_handled(self, subscription: Subscription) -> None:
        """Return when all that has arrived for it was handled."""
        await subscription._pending_queue.join()  # noqa: SLF001

    def forget(self, subscription: Subscription) -> None:
        """Let go of one of which the server sends no more, and of which all was handled."""
        if not subscription._closed:  # noqa: SLF001
            subscription._closed = True  # noqa: SLF001
            subscription._stop_processing()  # noqa: SLF001
            self._remove_sub(subscription._id)  # noqa: SLF001

    def is_subscribed(self, subscription: Subscription) -> bool:
        """Whether it can be unsubscribed, which nats-py refuses a second time; a client that closes takes all along."""
        return not (subscription._closed or self.is_closed or self.is_draining)  # noqa: SLF001

    # ---- signs of life --------------------------------------------------------------------------------------

    async def watch_pulse(self, timing: PingTiming) -> None:
        """Let a connection go whose server is silent though it is sent pings; it is then rebuilt as after any loss."""
        pulse = Pulse(timing, time.monotonic())
        while True:
            await asyncio.sleep(max(pulse.due - time.monotonic(), 0))
            if pulse.is_dead(time.monotonic(), heard=self.stream.take_heard()):
                if self.is_connected:
                    text = "%s: the server has said nothing for %g s: the connection is made anew"
                    log.warning(text, self.options["name"], pulse.silent_s)
                self.stream.abort()
