"""Output of tasks on its way to its readers."""

from __future__ import annotations

from pydantic import Field

from fluster_bus.core.names import JobId
from fluster_bus.messages.parts.model import Message


class LogBatch(Message):
    """Lines of one attempt's stdout or stderr; the subject says whose.

    `offset` and `next_offset` are places in the attempt's spool, from which all lines of this stream are here. Those of
    the other stream were in an earlier batch, unless `more` says that they come in the next.
    """

    offset: int
    next_offset: int
    more: bool = False
    lines: tuple[tuple[float, str], ...] = Field(max_length=100_000)  # (seconds since the epoch, text)
    going_on: tuple[int, ...] = ()  # which of the lines are pieces, whose line goes on in the stream's next one


class LogLine(Message):
    """One line that a task wrote."""

    job_id: JobId
    task: int
    attempt: int
    stream: str
    """stdout or stderr."""
    time: float
    text: str
    goes_on: bool = False
    """It is a piece, whose line goes on in the next of its stream."""
