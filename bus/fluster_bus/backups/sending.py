"""Sends the archive of a stream, chunk by chunk, to the server that makes the stream from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from fluster_bus.core.errors import BackupError, NoRespondersError
from fluster_bus.running.retries import retried

if TYPE_CHECKING:
    from fluster_bus.core.delivery import Delivery

_HEARD_WITHIN_S = 10.0


class Requests(Protocol):
    """What is needed of a `Bus`."""

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> Delivery: ...


class ArchiveSender:
    """Sends the archive of `stream` to `where`, the subject on which a server has said that it takes it."""

    def __init__(self, bus: Requests, stream: str, where: str, *, heard_within_s: float = _HEARD_WITHIN_S) -> None:
        self._bus = bus
        self._stream = stream
        self._where = where
        self._heard_within_s = heard_within_s
        self._is_taken = False

    async def send(self, chunk: bytes, timeout_s: float) -> bytes:
        """The server's answer, which comes within so many seconds; an empty chunk is the end. Raises BackupError, BusError."""
        # Another server of a group may say on which subject it listens before this connection's server knows that it does.
        patience_s = 0.0 if self._is_taken else self._heard_within_s
        try:
            answer = await retried(
                lambda _left_s: self._bus.request(self._where, chunk, timeout_s=timeout_s),
                on=(NoRespondersError,),
                timeout_s=patience_s,
            )
        except NoRespondersError as error:
            raise BackupError(self._refused()) from error
        self._is_taken = True
        return answer.data

    def _refused(self) -> str:
        if self._is_taken:
            return (
                f"the server that made stream {self._stream} from its archive takes no more of it: it has ended, or lost its connection "
                "to the others; look whether all servers run, and restore again"
            )
        return (
            "the servers take no archive: their configuration, or the accounts that they know, are of an older release; make them anew "
            "(`fluster credentials push`, or the server's configuration), and try again"
        )
