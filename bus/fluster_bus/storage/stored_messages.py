"""Messages of a stream that are written and read one by one, so that nobody needs the right to make consumers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from fluster_bus.core import subjects
from fluster_bus.core.errors import (
    DisconnectedError,
    NoRespondersError,
    RequestTimeoutError,
    StorageError,
    StreamNotFoundError,
)
from fluster_bus.running.retries import retried
from fluster_bus.storage.tables import sequence_of_ack

if TYPE_CHECKING:
    from fluster_bus.connection.carrier import Carrier
    from fluster_bus.core.delivery import Delivery

_PATIENCE_S = 30.0
_COPIED_S = 0.1  # a copy that takes part is behind by milliseconds
_UNANSWERED = (NoRespondersError, DisconnectedError, RequestTimeoutError)

T = TypeVar("T")


@dataclass(frozen=True)
class StoredMessages:
    """A stream that keeps the last message of each subject."""

    bus: Carrier
    stream: str

    async def append(self, subject: str, data: bytes) -> int:
        """Store one message; its sequence. Sent twice it is there once, since the later takes the place of the earlier.

        Raises StorageError, BusError.
        """
        try:
            answer = await _patiently(lambda: self.bus.request(subject, data))
        except NoRespondersError as error:
            raise StreamNotFoundError(
                f"no stream takes {subject}: does the namespace exist, is a controller up?"
            ) from error
        except RequestTimeoutError as error:
            raise StorageError(f"{subject} was not acknowledged: is the server's disk full?") from error
        return sequence_of_ack(answer, subject)

    async def last(self, subject: str) -> Delivery | None:
        """The message on `subject`, None when there is none, or not any more. Raises StorageError, BusError."""
        return await self._read(f"{subjects.direct_get(self.stream)}.{subject}")

    async def at(self, sequence: int) -> Delivery | None:
        """The message with that sequence. As `last`."""
        return await self._read(subjects.direct_get(self.stream), json.dumps({"seq": sequence}).encode())

    async def settle(self) -> None:
        """Return when the server that leads the stream is known to have passed on what it had, or after a moment."""
        told = json.loads((await _patiently(lambda: self.bus.request(subjects.stream_info(self.stream)))).data)
        if told.get("config", {}).get("num_replicas", 1) > 1:
            await asyncio.sleep(_COPIED_S)

    async def _read(self, subject: str, data: bytes = b"") -> Delivery | None:
        try:
            answer = await _patiently(lambda: self.bus.request(subject, data))
        except NoRespondersError as error:
            raise StorageError(
                f"stream {self.stream} does not exist: the controller makes it when it starts"
            ) from error
        return answer if answer.status is None else None


async def _patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask again while the server is just coming back: nothing here does harm when it is done twice."""
    return await retried(lambda _left_s: ask(), on=_UNANSWERED, timeout_s=_PATIENCE_S)


async def side_by_side(calls: Iterable[Awaitable[T]]) -> list[T]:
    """What these return, in order; none runs on when one has failed."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
