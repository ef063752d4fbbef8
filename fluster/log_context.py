"""Who writes to the log: the job, the actor and the call that a record comes from."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import ClassVar, NamedTuple

from fluster.cluster.task.task_context import TaskIdentity

NONE = "-"

_current: ContextVar[RunningCall | None] = ContextVar("running call", default=None)


class RunningCall(NamedTuple):
    """A call that an actor is at."""

    actor: str
    method: str
    reply: str  # the subject of the message's reply
    place: int  # among the calls of the message

    @property
    def call_id(self) -> str:
        """No two calls have the same; one that is not waited for has none."""
        return f"{self.reply.partition('.')[2]}.{self.place}" if self.reply else NONE


def set_running(call: RunningCall) -> None:
    """Note what this thread is at; coroutines that it starts inherit it."""
    _current.set(call)


class LogContext(logging.Filter):
    """A filter for handlers: gives each record `job_id`, `task`, `attempt`, `actor`, `method` and `call_id`.

    What is not known is "-". Put it on a handler, so that records of all loggers pass it:
    `handler.addFilter(LogContext())`, or `{"()": "fluster.LogContext"}` among the filters of a dictConfig.
    """

    in_use: ClassVar[bool] = False  # there is one; otherwise it is not noted which call runs

    def __init__(self, name: str = "") -> None:
        super().__init__(name)
        LogContext.in_use = True
        identity = TaskIdentity.from_environment()
        self._job = (NONE, NONE, NONE) if identity is None else (identity.job_id, identity.task, identity.attempt)

    def filter(self, record: logging.LogRecord) -> bool:
        """True; the record has its attributes then."""
        call = _current.get()
        record.job_id, record.task, record.attempt = self._job
        record.actor, record.method = (NONE, NONE) if call is None else (call.actor, call.method)
        record.call_id = NONE if call is None else call.call_id
        return True
