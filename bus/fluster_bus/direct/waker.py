"""Waking a thread that waits in `poll`."""

from __future__ import annotations

import logging
import select
import socket

log = logging.getLogger(__name__)


class Waker:
    """Something to wait for, by itself or beside a socket. Any thread wakes; one thread at a time waits."""

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)
        self._poller = select.poll()
        self._poller.register(self._near, select.POLLIN)
        self._awake = False  # a byte is on its way, for all who wake until it is read
        self._woken = False

    def __del__(self) -> None:
        self.close()

    def fileno(self) -> int:
        return self._near.fileno()

    def wake(self) -> None:
        """Wake who waits, or whoever will wait next."""
        if self._awake:
            return
        try:
            self._awake = True
            self._far.send(b"w")
        except OSError as error:
            log.debug("the thread to be woken has ended: %s", error)
        except BaseException:  # Ctrl-C: the byte may not have been sent, and nobody would send another
            self._awake = False
            raise

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when woken, or when the time is over."""
        if self._poller.poll(None if timeout_s is None else max(timeout_s, 0) * 1000):
            self.on_readable()

    def on_readable(self) -> None:
        """For who found the descriptor readable: there was a `wake`."""
        try:
            self._near.recv(4096)
        except BlockingIOError:
            log.debug("nothing is there any more")
        self._awake = False
        self._woken = True

    def look(self) -> bool:
        """True when there was a `wake` since the last look."""
        woken, self._woken = self._woken, False
        return woken

    def close(self) -> None:
        self._near.close()
        self._far.close()
