"""The answers that a connection waits for."""

from __future__ import annotations

import asyncio
import itertools

from fluster_bus import subjects
from fluster_bus.delivery import Delivery
from fluster_bus.errors import BusError


class Replies:
    """Requests that are out, by the token at the end of their reply subject."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waiting: dict[str, tuple[str, asyncio.Queue[Delivery | BusError]]] = {}  # {token: (subject, answers)}

    def open(self, subject: str) -> tuple[str, asyncio.Queue[Delivery | BusError]]:
        token = f"{next(self._numbers):x}"
        answers: asyncio.Queue[Delivery | BusError] = asyncio.Queue()
        self._waiting[token] = (subject, answers)
        return token, answers

    def close(self, token: str) -> None:
        self._waiting.pop(token, None)

    def deliver(self, delivery: Delivery) -> None:
        waiting = self._waiting.get(subjects.last_token(delivery.subject))
        if waiting is not None:  # else it came after its requester gave up
            waiting[1].put_nowait(delivery)

    def fail(self, error: BusError, *, subject: str | None = None) -> None:
        """Tell all requesters, or those of one subject, that no answer will come."""
        for asked, answers in self._waiting.values():
            if subject is None or asked.lower() == subject.lower():  # nats-py puts errors into lower case
                answers.put_nowait(error)
