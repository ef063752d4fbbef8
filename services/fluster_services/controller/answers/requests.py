"""Carries out whose turn it is among the requests of tenants, between which everything else of the controller goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass

from fluster_bus.core import subjects
from fluster_bus.core.errors import BusyError, FlusterError, MessageTooLargeError
from fluster_services.controller.answers.request_lines import RequestLines, Turn

_MAX_REQUEST_BYTES = 1 << 20
_MAX_LINE_REQUEST_BYTES = 64 << 10
_SLICE_S = 0.002
_ROUNDS = 8  # of the loop between slices: from its arrival to its answer a heartbeat takes about as many


@dataclass(eq=False)
class _Request:
    answer: Callable[[], Awaitable[None]]
    refuse: Callable[[FlusterError], Awaitable[None]]


class Pace:
    """What a request that takes long calls again and again, so that it waits for its next turn when one is over."""

    def __init__(self, requests: Requests, namespace: str, number: int) -> None:
        self._requests = requests
        self._namespace = namespace
        self._number = number
        self._began = time.monotonic()

    async def step(self) -> None:
        """Go on at once, or, when this turn has lasted long enough, in the next one."""
        if time.monotonic() - self._began >= _SLICE_S:
            await self._requests.wait_turn(self._namespace, self._number)
            self._began = time.monotonic()


_present: ContextVar[Pace] = ContextVar("the pace of the request that this task answers")


def present_pace() -> Pace:
    """The pace of the request which the present task answers."""
    return _present.get()


class Requests:
    """The requests of all namespaces. Heartbeats and what workers tell do not come this way, and wait for none of it."""

    def __init__(self) -> None:
        self._lines: RequestLines[_Request | asyncio.Future[None]] = RequestLines()
        self._wake = asyncio.Event()
        self._answering: set[asyncio.Task[None]] = set()
        # Requests of namespaces, each in the line of its namespace.
        self.of_namespaces = FairQueue(self, subjects.namespace_of, max_bytes=_MAX_REQUEST_BYTES)

    def queue(self, name: Callable[[str], str]) -> FairQueue:
        """A queue for requests of no namespace; `name(subject)` names the line in which one waits, with a blank in it."""
        return FairQueue(self, name, max_bytes=_MAX_LINE_REQUEST_BYTES)

    def put(
        self,
        line: str,
        size: int,
        answer: Callable[[], Awaitable[None]],
        refuse: Callable[[FlusterError], Awaitable[None]],
    ) -> None:
        """Have a request answered in its turn, or refused when that comes too late. Raises BusyError when its line is full."""
        if not self._lines.enter(line, _Request(answer, refuse), size=size, now=time.monotonic()):
            raise _busy(line)
        self._wake.set()

    async def wait_turn(self, namespace: str, number: int) -> None:
        """Return when the request of that number may go on."""
        turn = asyncio.get_running_loop().create_future()
        self._lines.again(namespace, number, turn)
        self._wake.set()
        await turn

    async def run(self) -> None:
        """Give out turns, until cancelled; then nothing is answered that was not."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                await self._give_out()
        finally:
            for each in self._answering:
                each.cancel()
            await asyncio.gather(*self._answering, return_exceptions=True)

    async def _give_out(self) -> None:
        began = time.monotonic()
        while (turn := self._lines.next(now=time.monotonic())) is not None:
            self._give(turn)
            await asyncio.sleep(0)
            if time.monotonic() - began >= _SLICE_S:
                for _ in range(_ROUNDS):
                    await asyncio.sleep(0)
                began = time.monotonic()

    def _give(self, turn: Turn[_Request | asyncio.Future[None]]) -> None:
        if isinstance(turn.item, asyncio.Future):
            if not turn.item.done():
                turn.item.set_result(None)
            return
        late = turn.item.refuse(_busy(turn.namespace)) if turn.is_late else self._answer(turn, turn.item)
        task = asyncio.ensure_future(late)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, turn: Turn[_Request | asyncio.Future[None]], request: _Request) -> None:
        _present.set(Pace(self, turn.namespace, turn.number))
        try:
            await request.answer()
        finally:
            self._lines.end(turn.namespace, turn.size)
            self._wake.set()


class FairQueue:
    """Queues requests of one kind, each in the line that its subject names. Lines are served in turn."""

    def __init__(self, requests: Requests, name: Callable[[str], str], *, max_bytes: int) -> None:
        self._requests = requests
        self._name = name
        self._max_bytes = max_bytes

    def enter(
        self,
        subject: str,
        size: int,
        answer: Callable[[], Awaitable[None]],
        refuse: Callable[[FlusterError], Awaitable[None]],
    ) -> None:
        """Have a request answered in its turn, or refused when that comes too late. Raises FlusterError when it is refused now."""
        if size > self._max_bytes:
            raise MessageTooLargeError(
                f"the request has {size:,} bytes, over the limit of {self._max_bytes:,}: ask about fewer at once"
            )
        self._requests.put(self._name(subject), size, answer, refuse)


def _busy(line: str) -> BusyError:
    who = line if " " in line else f"namespace {line!r}"
    return BusyError(f"too many requests of {who} wait for the controller: ask again in a moment")
