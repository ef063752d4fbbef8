"""Requests that are out: whose answer is whose, and until when it is waited for."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

from fluster_bus.core import subjects
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
    """Requests that are out, by the token at the end of their reply subject.

    One timer sees to the deadlines of all: a timer for each request costs more than all the rest of it.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waiting: dict[str, _Awaited] = {}  # {token: the request}
        self._timer: asyncio.TimerHandle | None = None

    def open(self, subject: str) -> tuple[str, asyncio.Queue[Delivery | BusError]]:
        """For any number of answers."""
        answers: asyncio.Queue[Delivery | BusError] = asyncio.Queue()
        token = self._next_token()
        self._waiting[token] = _Awaited(subject, answers.put_nowait)
        return token, answers

    def expect(self, subject: str, timeout_s: float) -> tuple[str, asyncio.Future[Delivery | BusError]]:
        """For the one answer that there is to most requests; after `timeout_s` that is a RequestTimeoutError."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Delivery | BusError] = loop.create_future()

        def take(delivery: Delivery | BusError) -> None:
            if not answer.done():
                answer.set_result(delivery)

        token, deadline = self._next_token(), loop.time() + timeout_s
        self._waiting[token] = _Awaited(subject, take, timeout_s, deadline)
        if self._timer is None or deadline < self._timer.when():
            self._look_at(deadline)
        return token, answer

    def _next_token(self) -> str:
        return f"{next(self._numbers):x}"

    def close(self, token: str) -> None:
        self._waiting.pop(token, None)

    def __len__(self) -> int:
        return len(self._waiting)

    def deliver(self, delivery: Delivery) -> None:
        waiting = self._waiting.get(subjects.last_token(delivery.subject))
        if waiting is not None:  # else it came after its requester gave up
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
