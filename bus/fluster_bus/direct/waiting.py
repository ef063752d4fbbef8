"""How threads wait on a connection that they share: in turns, woken by others, and looking again and again for a moment before they sleep."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from fluster_bus.running.backoff import Backoff

log = logging.getLogger(__name__)

OnTurn = Callable[[], object]


class Turns:
    """One has the turn; others wait for it, and are called in the order of asking, in another thread.

    Each is known by the function by which it is called.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.holder: OnTurn | None = None  # for readers only
        self._waiting: deque[OnTurn] = deque()
        self._left_at = time.monotonic()

    @property
    def wanted(self) -> bool:
        """True when a thread waits for it."""
        return bool(self._waiting)

    def unchanged_s(self) -> float:
        """For how long it was not given back: no thread reads, or one has been reading all the time."""
        return time.monotonic() - self._left_at

    def has(self, on_turn: OnTurn) -> bool:
        return self.holder == on_turn

    def take(self, on_turn: OnTurn) -> bool:
        """True when it was free, and is held now."""
        with self._lock:
            if self.holder is None:
                self.holder = on_turn
        return self.holder == on_turn

    def ask(self, on_turn: OnTurn) -> bool:
        """True when it was free, and is held now; else `on_turn` is called when it comes."""
        with self._lock:
            if self.holder is None:
                self.holder = on_turn
            else:
                self._waiting.append(on_turn)
        return self.holder == on_turn

    def leave(self, on_turn: OnTurn) -> None:
        """Have it no more, nor wait for it; the one that waits longest has it next. It may be called at any time, and twice."""
        next_: OnTurn | None = None
        with self._lock:
            if on_turn in self._waiting:
                self._waiting.remove(on_turn)
            if self.holder == on_turn:
                self._left_at = time.monotonic()
                self.holder = next_ = self._waiting.popleft() if self._waiting else None
        if next_ is not None:
            next_()


class PollInterval:
    """How long the keeper of a lane waits between two looks at it: longer while threads take turns all the time.

    Each method but `shorten` is for one thread.
    """

    def __init__(self, shortest_s: float, longest_s: float) -> None:
        self._backoff = Backoff(shortest_s, longest_s)
        self._is_shortened = False

    def next_s(self, unchanged_s: float) -> float:
        """The next interval, when the turn was not given back for so long."""
        others_are_busy = unchanged_s < self._backoff.pause_s and not self._is_shortened
        self._is_shortened = False
        if others_are_busy:
            self._backoff.lengthen()
        else:
            self._backoff.reset()
        return self._backoff.pause_s

    def shorten(self) -> bool:
        """Make the next interval the shortest; True when the present one may be longer. From any thread."""
        self._is_shortened = True
        return self._backoff.pause_s > self._backoff.first_s


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
        """Wake the thread that waits, or the next one that will wait."""
        if self._awake:
            return
        try:
            self._awake = True
            self._far.send(b"w")
        except OSError as error:
            log.debug("the thread to be woken has ended: %s", error)
        except BaseException:  # Ctrl-C: the byte may not have been sent, and no thread would send another
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
            log.debug("there was nothing left to read")
        self._awake = False
        self._woken = True

    def look(self) -> bool:
        """True when there was a `wake` since the last look."""
        woken, self._woken = self._woken, False
        return woken

    def close(self) -> None:
        self._near.close()
        self._far.close()


T = TypeVar("T")

EAGER_VARIABLE = "FLUSTER_EAGER_US"  # microseconds for which a thread looks before it sleeps; 0: it sleeps at once
_EAGER_US = 300.0
# Between two looks, some 2 µs apart: another ran here meanwhile, for longer than a server or an actor takes for a small
# call, so the machine is busy.
_DISTURBED_S = 200e-6
_MOST_FAILURES = 6  # that count: after so many, one wait in 64 is tried


class Eagerness:
    """How long it pays to look for an answer again and again before one sleeps. For one thread at a time.

    A thread that sleeps is woken late, by a core that has gone to sleep as well, and finds cold caches: a third of a short
    call's time and more. Looking is worth it as long as answers come within that moment, and nothing else wants the core.
    """

    def __init__(self, for_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.for_s = for_s
        self._clock = clock
        self._failures = 0  # one after the other
        self._rests = 0  # waits that sleep at once

    @classmethod
    def of_this_process(cls) -> Eagerness:
        """As its environment wishes; none where all others would have to wait for the one core. Raises ValueError."""
        text = os.environ.get(EAGER_VARIABLE) or str(_EAGER_US)
        try:
            eager_us = float(text)
        except ValueError:
            eager_us = -1.0
        if not 0 <= eager_us <= 1e6:
            raise ValueError(f"{EAGER_VARIABLE}={text!r}: give microseconds from 0 to 1000000, such as {_EAGER_US:g}")
        return cls(eager_us / 1e6 if _cores() > 1 else 0.0)

    def look(self, found: Callable[[], list[T]]) -> list[T]:
        """What `found()` gives as soon as that is something; nothing when it is time to sleep."""
        if self._rests or not self.for_s:
            self._rests = max(self._rests - 1, 0)
            return []
        clock, yield_ = self._clock, os.sched_yield  # so that others who want this core have it
        now = begun = clock()
        while True:
            if something := found():
                self._failures = 0
                return something
            yield_()
            before, now = now, clock()
            if now - before > _DISTURBED_S or now - begun > self.for_s:
                break
        self._failures = min(self._failures + 1, _MOST_FAILURES)
        self._rests = (1 << self._failures) - 1
        return []


def _cores() -> int:
    if not hasattr(os, "sched_yield"):
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
