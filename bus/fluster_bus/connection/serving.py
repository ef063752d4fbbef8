"""Answers requests, a bounded number at a time."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from fluster_bus.core import subjects
from fluster_bus.core.delivery import Delivery, error_reply
from fluster_bus.core.errors import (
    ClosedError,
    DisconnectedError,
    FaultLog,
    FlusterError,
    MessageTooLargeError,
    ServiceError,
)
from fluster_bus.direct import wire
from fluster_bus.messages.parts.model import Message

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus

log = logging.getLogger(__name__)

Request = TypeVar("Request", bound=Message)

_TAKEN_AT_ONCE = 32  # arrivals, before anything else of the program goes on


class Answer(Protocol):
    """What a handler returns: a Message, or what was made into JSON bit by bit."""

    def to_json(self) -> bytes: ...


class RequestQueue(Protocol):
    """Decides when a request is answered, or that it is not."""

    def enter(
        self,
        subject: str,
        size: int,
        answer: Callable[[], Awaitable[None]],
        refuse: Callable[[FlusterError], Awaitable[None]],
        /,
    ) -> None:
        """Have `answer` or `refuse` run later. Raises FlusterError when the request is refused now."""


class Service(Generic[Request]):
    """What stands behind `Bus.serve`: it reads the request, has the handler run, and sends its answer or its error."""

    def __init__(
        self,
        bus: Bus,
        subject: str,
        request: type[Request],
        handler: Callable[[Request, str], Awaitable[Answer]],
        *,
        concurrency: int,
        request_queue: RequestQueue | None = None,
    ) -> None:
        self._bus = bus
        self._subject = subject
        self._request = request
        self._handler = handler
        self._room = asyncio.Semaphore(concurrency)
        self._request_queue = request_queue
        self._taken = 0
        self._faults = FaultLog(log)

    async def on_delivery(self, delivery: Delivery) -> None:
        """Have the request answered; returns when there is room for the next one."""
        if delivery.reply and not (subjects.is_inbox(delivery.reply) and wire.fits_line(delivery.reply)):
            text = "%s: refused a request on %s: its reply subject is not an inbox, or too long for one"
            self._faults.warning(text, self._bus.name, delivery.subject)
            return
        if self._request_queue is None:
            await self._room.acquire()
            self._bus.spawn(self._serve_in_room(delivery), f"answer to {delivery.subject}")
            return
        answer, refuse = functools.partial(self._serve, delivery), functools.partial(self._refuse, delivery)
        try:
            self._request_queue.enter(delivery.subject, len(delivery.data), answer, refuse)
        except FlusterError as error:
            await refuse(error)
        self._taken += 1
        if self._taken % _TAKEN_AT_ONCE == 0:
            await asyncio.sleep(0)  # nats-py takes what has arrived without a pause

    async def _serve_in_room(self, delivery: Delivery) -> None:
        try:
            await self._serve(delivery)
        finally:
            self._room.release()

    async def _serve(self, delivery: Delivery) -> None:
        try:
            data, headers = await self._answer(delivery)
            if delivery.reply:
                await self._reply(delivery.reply, data, headers)
        except (DisconnectedError, ClosedError):
            log.info("%s: the connection was lost before %s was answered", self._bus.name, self._subject)

    async def _refuse(self, delivery: Delivery, error: FlusterError) -> None:
        if delivery.reply:
            try:
                data, headers = _error_answer(error)
                await self._bus.publish(delivery.reply, data, headers=headers)
            except (DisconnectedError, ClosedError):
                log.info("%s: the connection was lost before %s was refused", self._bus.name, self._subject)

    async def _answer(self, delivery: Delivery) -> tuple[bytes, dict[str, str] | None]:
        try:
            answer = await self._handler(self._request.from_json(delivery.data), delivery.subject)
            return answer.to_json(), None
        except FlusterError as error:
            return _error_answer(error)
        except Exception as error:
            log.exception("%s: the handler of %s failed", self._bus.name, delivery.subject)
            return error_reply("InternalError", error)

    async def _reply(self, subject: str, data: bytes, headers: dict[str, str] | None) -> None:
        try:
            await self._bus.publish(subject, data, headers=headers)
        except MessageTooLargeError as error:
            data, headers = error_reply(type(error).__name__, error)
            await self._bus.publish(subject, data, headers=headers)


def _error_answer(error: FlusterError) -> tuple[bytes, dict[str, str]]:
    return error_reply(error.code if isinstance(error, ServiceError) else type(error).__name__, error)
