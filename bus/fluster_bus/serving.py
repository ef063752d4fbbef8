"""Answers requests, a bounded number at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from fluster_bus import subjects
from fluster_bus.delivery import Delivery, error_reply
from fluster_bus.errors import ClosedError, DisconnectedError, FlusterError, MessageTooLargeError, ServiceError
from fluster_bus.messages.model import Message

if TYPE_CHECKING:
    from fluster_bus.bus import Bus

log = logging.getLogger(__name__)

Request = TypeVar("Request", bound=Message)


class Service(Generic[Request]):
    """What stands behind `Bus.serve`: it reads the request, has the handler run, and sends its answer or its error."""

    def __init__(
        self,
        bus: Bus,
        subject: str,
        request: type[Request],
        handler: Callable[[Request, str], Awaitable[Message]],
        *,
        concurrency: int,
    ) -> None:
        self._bus = bus
        self._subject = subject
        self._request = request
        self._handler = handler
        self._room = asyncio.Semaphore(concurrency)

    async def on_delivery(self, delivery: Delivery) -> None:
        """Have the request answered; returns when there is room for the next one."""
        if delivery.reply and not subjects.is_inbox(delivery.reply):
            log.warning("%s: refused a request on %s: its reply subject is no inbox", self._bus.name, delivery.subject)
            return
        await self._room.acquire()
        self._bus.spawn(self._serve(delivery), f"answer to {delivery.subject}")

    async def _serve(self, delivery: Delivery) -> None:
        try:
            data, headers = await self._answer(delivery)
            if delivery.reply:
                await self._reply(delivery.reply, data, headers)
        except (DisconnectedError, ClosedError):
            log.info("%s: the connection was lost before %s was answered", self._bus.name, self._subject)
        finally:
            self._room.release()

    async def _answer(self, delivery: Delivery) -> tuple[bytes, dict[str, str] | None]:
        try:
            answer = await self._handler(self._request.from_json(delivery.data), delivery.subject)
            return answer.to_json(), None
        except FlusterError as error:
            code = error.code if isinstance(error, ServiceError) else type(error).__name__
            return error_reply(code, error)
        except Exception as error:
            log.exception("%s: the handler of %s failed", self._bus.name, delivery.subject)
            return error_reply("InternalError", error)

    async def _reply(self, subject: str, data: bytes, headers: dict[str, str] | None) -> None:
        try:
            await self._bus.publish(subject, data, headers=headers)
        except MessageTooLargeError as error:
            data, headers = error_reply(type(error).__name__, error)
            await self._bus.publish(subject, data, headers=headers)
