"""The answers that a connection waits for."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from fluster_bus.core import subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import BusError


class Replies:
    """Requests that are out, by the token at the end of their reply subject."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waiting: dict[str, tuple[str, Callable[[Delivery | BusError], None]]] = {}  # {token: (subject, taker)}

    def open(self, subject: str) -> tuple[str, asyncio.Queue[Delivery | BusError]]:
        """For any number of answers."""
        answers: asyncio.Queue[Delivery | BusError] = asyncio.Queue()
        return self._open(subject, answers.put_nowait), answers

    def expect(self, subject: str) -> tuple[str, asyncio.Future[Delivery | BusError]]:
        """For the one answer that there is to most requests."""
        answer: asyncio.Future[Delivery | BusError] = asyncio.get_running_loop().create_future()

        def take(delivery: Delivery | BusError) -> None:
            if not answer.done():
                answer.set_result(delivery)

        return self._open(subject, take), answer

    def _open(self, subject: str, take: Callable[[Delivery | BusError], None]) -> str:
        token = f"{next(self._numbers):x}"
        self._waiting[token] = (subject, take)
        return token

    def close(self, token: str) -> None:
        self._waiting.pop(token, None)

    def deliver(self, delivery: Delivery) -> None:
        waiting = self._waiting.get(subjects.last_token(delivery.subject))
        if waiting is not None:  # else it came after its requester gave up
            waiting[1](delivery)

    def fail(self, error: BusError, *, subject: str | None = None) -> None:
        """Tell all requesters, or those of one subject, that no answer will come."""
        for asked, take in self._waiting.values():
            if subject is None or asked.lower() == subject.lower():  # nats-py puts errors into lower case
                take(error)
