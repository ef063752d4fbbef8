"""The keeper's end of its socket. A worker that is connected exchanges JSON lines with it:

    keeper ─► worker   {"started": {"pid", "started_at"}}, {"spooled": offset, "flushed"?: number}, {"progress": [fraction, message]},
                       {"exited": ExitRecord}, {"idle": true}: forgotten, and ready for another,
                       {"refused": {"errno", "error"}}
    worker ─► keeper   {"kill": grace_s, "reason", "preempted": bool}, {"renew": fence_after_s | null, "sent_since_boot_s"}, {"forget": true},
                       {"flush": number}: spool what is in the pipes now, and say so,
                       {"assign": {"draft", "directory"}}, to an idle one

What the keeper tells is how things stand, never a history: nothing piles up for a worker that does not read.
"""

from __future__ import annotations

import math
import selectors
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from fluster.json_lines import BadLineError, JsonLines, checked, encoded
from fluster.progress_file import Progress
from fluster_services.worker.contract.attempt_records import ExitRecord, to_json
from fluster_services.worker.linux.timers import Timers

_READ_BYTES = 64 * 1024
_MAX_MESSAGE_BYTES = 64 * 1024
_TELL_INTERVAL_S = 0.02  # a chatty task must not wake the worker more often than this


class AttemptSnapshot(NamedTuple):
    """How things stand with an attempt."""

    pid: int
    started_at: float
    spooled: int
    record: ExitRecord | None
    progress: Progress | None = None
    flushed: int = 0  # what the worker gave its last wish to flush as a number; later ones are higher


def finite(number: Any) -> float:
    """What the worker gave as a number of seconds. Raises ValueError, TypeError, OverflowError: a timer of `nan` would never rest."""
    if not math.isfinite(seconds := float(number)):
        raise ValueError(f"{number!r} is not a number of seconds")
    return seconds


class WorkerLink:
    """One worker's connection, or none. `obey` carries out what the worker says; what cannot be read of it disconnects it."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        timers: Timers,
        obey: Callable[[dict[str, object]], None],
    ) -> None:
        self._listener: socket.socket | None = None
        self._selector = selector
        self._timers = timers
        self._obey = obey
        self._connection: socket.socket | None = None
        self._received = JsonLines(_MAX_MESSAGE_BYTES)
        self._unsent = b""
        self._start_anew()

    def _start_anew(self) -> None:
        self._has_told_start = self._has_told_exit = False
        self._told_offset = self._told_flush = 0
        self._told_progress: Progress | None = None

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    def listen(self, listener: socket.socket) -> None:
        """Let workers connect. One that is connected already hears of the new attempt."""
        listener.setblocking(False)
        self._listener = listener
        self._selector.register(listener.fileno(), selectors.EVENT_READ, self._on_connect)
        self._start_anew()

    def go_idle(self) -> None:
        """Let no other worker connect; the worker that is connected hears that it may give another attempt."""
        if self._listener is not None:
            self._selector.unregister(self._listener.fileno())
            self._listener.close()
            self._listener = None
        self._timers.cancel("tell")
        self._say({"idle": True})

    def refuse(self, error: Exception) -> None:
        """Say that the attempt given was not begun."""
        self._say({"refused": {"error": str(error), "errno": getattr(error, "errno", None)}})

    def _say(self, message: dict[str, object]) -> None:
        """Say a few bytes to a worker that waits for them."""
        if self._connection is None:
            return
        try:
            self._unsent += encoded(message)
            self._unsent = self._unsent[self._connection.send(self._unsent) :]
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            self._unsent = b"?"
        if self._unsent:
            self._disconnect()  # it does not listen, and is not waited for

    def tell(self, snapshot: AttemptSnapshot) -> None:
        """Send what the worker does not know yet, as far as it takes it."""
        connection = self._connection
        if connection is None:
            return
        try:
            while True:
                if not self._unsent:
                    message = self._news(snapshot)
                    if message is None:
                        break
                    self._unsent = encoded(message)
                self._unsent = self._unsent[connection.send(self._unsent) :]
        except BlockingIOError:
            pass  # the selector tells when there is room
        except (BrokenPipeError, ConnectionResetError):
            self._disconnect()
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._selector.modify(connection.fileno(), events, self._on_message)

    def _news(self, snapshot: AttemptSnapshot) -> dict[str, object] | None:
        if not self._has_told_start:
            self._has_told_start = True
            return {"started": {"pid": snapshot.pid, "started_at": snapshot.started_at}}
        if snapshot.flushed > self._told_flush:
            self._told_offset, self._told_flush = snapshot.spooled, snapshot.flushed
            return {"spooled": self._told_offset, "flushed": self._told_flush}
        if snapshot.spooled > self._told_offset:
            if snapshot.record is None and self._timers.at("tell") is not None:
                return None
            self._told_offset = snapshot.spooled
            self._timers.set("tell", time.monotonic() + _TELL_INTERVAL_S, lambda: None)
            return {"spooled": self._told_offset}
        if snapshot.progress != self._told_progress:
            self._told_progress = snapshot.progress
            return {"progress": snapshot.progress}
        if snapshot.record is not None and not self._has_told_exit:
            self._has_told_exit = True
            return {"exited": to_json(snapshot.record)}
        return None

    def _on_connect(self) -> None:
        if self._listener is None:
            return
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        self._disconnect()  # there is one worker; an older connection is that of its dead predecessor
        connection.setblocking(False)
        self._connection = connection
        self._received, self._unsent = JsonLines(_MAX_MESSAGE_BYTES), b""
        self._start_anew()
        self._selector.register(connection.fileno(), selectors.EVENT_READ, self._on_message)

    def _on_message(self) -> None:
        # Also called when there is room to write again: then nothing is there to read.
        if self._connection is None:
            return
        try:
            data = self._connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        for message in self._received.feed(data):
            try:
                self._obey(checked(message))
            except (ValueError, TypeError, LookupError, ArithmeticError) as error:
                text = str(error) if isinstance(error, BadLineError) else f"{str(message)[:200]}: {error}"
                sys.stderr.write(f"what the worker sent cannot be read: {text}\n")
                data = b""  # the sender of that is not a worker of ours
        if not data:
            self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._selector.unregister(self._connection.fileno())
            self._connection.close()
            self._connection = None
            self._timers.cancel("tell")
