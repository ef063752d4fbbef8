"""Requests that are out: whose answer is whose, and until when it is waited for."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import BusError, NoRespondersError, RequestTimeoutError, service_error

_DEADLINES_APART_S = 0.01  # those of many requests are looked at together
_NO_RESPONDERS = "503"


class _Awaited(NamedTuple):
    """A request that is out."""

    subject: str
    take: Callable[[Delivery | BusError], None]
    timeout_s: float = math.inf
    deadline: float = math.inf  # by the loop's clock


class Replies:
    """Requests that are out, by their reply subjects.

    By the whole of them: who is asked at one inbox sees the token of that request, can guess those of the next ones, and may
    not answer what is asked at another. One timer sees to the deadlines of all: a timer for each request costs more than all
    the rest of it.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waiting: dict[str, _Awaited] = {}  # {reply subject: the request}
        self._timer: asyncio.TimerHandle | None = None

    def open(self, inbox: str, subject: str) -> tuple[str, asyncio.Queue[Delivery | BusError]]:
        """Where in `inbox` any number of answers may come, and the answers."""
        answers: asyncio.Queue[Delivery | BusError] = asyncio.Queue()
        reply = self._next_reply(inbox)
        self._waiting[reply] = _Awaited(subject, answers.put_nowait)
        return reply, answers

    def expect(self, inbox: str, subject: str, timeout_s: float) -> tuple[str, asyncio.Future[Delivery | BusError]]:
        """The same for the one answer that there is to most requests; after `timeout_s` that is a RequestTimeoutError."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Delivery | BusError] = loop.create_future()

        def take(delivery: Delivery | BusError) -> None:
            if not answer.done():
                answer.set_result(delivery)

        reply, deadline = self._next_reply(inbox), loop.time() + timeout_s
        self._waiting[reply] = _Awaited(subject, take, timeout_s, deadline)
        if self._timer is None or deadline < self._timer.when():
            self._look_at(deadline)
        return reply, answer

    def _next_reply(self, inbox: str) -> str:
        return f"{inbox}.{next(self._numbers):x}"

    def close(self, reply: str) -> None:
        self._waiting.pop(reply, None)

    def __len__(self) -> int:
        return len(self._waiting)

    def deliver(self, delivery: Delivery) -> None:
        waiting = self._waiting.get(delivery.subject)
        if waiting is not None:  # else it came after its requester gave up, or answers nothing
            waiting.take(delivery)

    def fail(self, error: BusError, *, subject: str | None = None) -> None:
        """Tell all requesters, or those of one subject, that no answer will come."""
        for each in self._waiting.values():
            if subject is None or each.subject.lower() == subject.lower():  # nats-py puts errors into lower case
                each.take(error)
        if subject is None:
            self._look_at(math.inf)  # each has its answer

    def _look_at(self, time: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(time, self._on_deadline) if time < math.inf else None

    def _on_deadline(self) -> None:
        now, following = asyncio.get_running_loop().time(), math.inf
        for each in self._waiting.values():
            if each.deadline <= now:
                each.take(RequestTimeoutError(f"no answer on {each.subject} came within {each.timeout_s:g} s"))
            else:
                following = min(following, each.deadline)
        self._timer = None
        self._look_at(max(following, now + _DEADLINES_APART_S))


def checked(subject: str, answer: Delivery | BusError) -> Delivery:
    """The answer to a request on `subject`, if it is one. Raises BusError."""
    if isinstance(answer, BusError):
        raise type(answer)(*answer.args)  # a fresh one: several requesters were handed the same
    if not answer.headers:  # as most
        return answer
    if answer.status == _NO_RESPONDERS:
        raise NoRespondersError(f"no program listens on {subject}")
    if answer.error is not None:
        raise service_error(*answer.error)
    return answer
