"""What an operator asks one worker, and its answers."""

from __future__ import annotations

from pydantic import Field

from fluster_bus.messages.jobs import WorkerId
from fluster_bus.messages.model import Message


class DrainRequest(Message):
    """Asks a worker to take nothing new, to wait for what runs, and to leave.

    After `timeout_s` it hands back what still runs: stopped, and tried elsewhere at the cost of the preemption budget.
    """

    timeout_s: float | None = Field(default=None, ge=0)


class DrainReply(Message):
    """The worker drains; so many attempts it waits for."""

    worker_id: WorkerId
    running: int
