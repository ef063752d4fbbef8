"""nats-py's client, with what it does for every message made quicker, and with every cancellation heeded."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from nats.aio.client import Client
from nats.aio.msg import Msg

from fluster_bus.pulse import PingTiming, Pulse
from fluster_bus.tcp_stream import TcpStream
from fluster_bus.wire import header_block

if TYPE_CHECKING:
    from nats.aio.client import Srv

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 2.0  # for one server: to take the connection, and then to greet
# nats-py limits its waits by asyncio.wait_for. That of Python 3.11 forgets a cancellation that comes in the moment of the
# result: whoever was to end goes on. Told of no limit it forgets none, so the limits are kept here.
NO_LIMIT: Any = None


class QuickClient(Client):
    """The same, but the headers of a message, which nearly all of ours have, cost a few microseconds.

    Is to be connected with `connect_timeout=NO_LIMIT`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stream = TcpStream()

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        """At one go: nats-py looks at each character of each name. Whatever their writer sent is read, since an error
        would end the loop that reads this connection.
        """
        return header_block(bytes(headers)) or None if headers else None

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        """The same, also where a sender chose a subject that is no text."""
        where, answer_to = subject.decode("utf-8", "replace"), reply.decode("utf-8", "replace")
        return Msg(self, where, answer_to, data, headers, _sid=sid)

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

    async def _connect_to_server(self, s: Srv) -> None:
        if self._transport is None:
            self._transport = self.stream  # connected by what follows, and by each reconnect
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            await super()._connect_to_server(s)

    async def _process_connect_init(self) -> None:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            await super()._process_connect_init()

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
