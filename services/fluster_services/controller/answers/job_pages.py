"""Replies that tell of many jobs, or of many tasks, made bit by bit: between two bits others have their turn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from fluster_bus.messages import JobInfo, JobRecord, Progress, TaskRecord, TerminateReply
from fluster_bus.messages.parts.model import Message
from fluster_bus.messages.requests import MAX_JOBS_A_REPLY
from fluster_services.job_info import task_statuses

if TYPE_CHECKING:
    from fluster_services.controller.answers.requests import Pace

_MAX_REPLY_BYTES = 1 << 20  # of jobs; one alone may have more, and still be below the server's limit


class JobPage:
    """The first of some jobs, as many as a reply holds; at least one."""

    def __init__(self, limit: int = MAX_JOBS_A_REPLY) -> None:
        self._limit = min(limit, MAX_JOBS_A_REPLY)
        self._jobs: list[bytes] = []
        self._size = 0

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def is_full(self) -> bool:
        """True when it holds as many jobs as it may."""
        return len(self._jobs) >= self._limit

    def add(self, job: bytes) -> bool:
        """Take in a job; False when it does not fit."""
        self._size += len(job)
        if self._jobs and (self.is_full or self._size > _MAX_REPLY_BYTES):
            return False
        self._jobs.append(job)
        return True

    def reply(self, rest: Message) -> Json:
        """`rest`, with these jobs."""
        return Json(_with_list(rest.to_json(), "jobs", self._jobs))


class Json:
    """A reply that is written already."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def to_json(self) -> bytes:
        return self._data


async def written_job(
    summary: JobInfo, job: JobRecord, tasks: Iterable[TaskRecord], progress: Mapping[int, Progress], pace: Pace
) -> bytes:
    """The JSON of a JobInfo: `summary`, with its tasks."""
    written = []
    for status in task_statuses(job, tasks, progress):
        written.append(status.to_json())
        await pace.step()
    return _with_list(summary.to_json(), "tasks", written)


def terminated(job: bytes) -> Json:
    """A TerminateReply of a job that is written."""
    (name,) = TerminateReply.model_fields
    return Json(b'{"%s":%s}' % (name.encode(), job))


def _with_list(message: bytes, name: str, items: list[bytes]) -> bytes:
    """The JSON of a message that lacks its field `name`, with the items of that."""
    if not items:
        return message
    comma = b"," if len(message) > len(b"{}") else b""
    return b'%s%s"%s":[%s]}' % (message[:-1], comma, name.encode(), b",".join(items))
