"""How jobs stand: what the controller tells about them, and what is known of those that it has not recorded yet."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from fluster.errors import JobNotFoundError, JobRefusedError, QuotaExceededError
from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.errors import BusyError, DisconnectedError, NoRespondersError, RequestTimeoutError, StorageError
from fluster_bus.messages import JobId, JobInfo, JobStatus, Namespace, RefusedJob, StatusReply, StatusRequest
from fluster_bus.messages.records import QUOTA_EXCEEDED
from fluster_bus.running.coroutines import retried

T = TypeVar("T")

UNANSWERED = (NoRespondersError, RequestTimeoutError, DisconnectedError, BusyError)

_RECORD_TIMEOUT_S = 5.0  # the controller itself waits a little less for jobs to be recorded
_RETURN_TIMEOUT_S = 10.0  # a server that died is up again long before
_JOBS_A_REQUEST = 1_000


async def once_back(attempt: Callable[[], Awaitable[T]]) -> T:
    """What `attempt` returns, which may run twice: again while the server or its store is just coming back.

    Raises what the last one raised, after 10 s.
    """
    return await retried(lambda _left_s: attempt(), on=(*UNANSWERED, StorageError), timeout_s=_RETURN_TIMEOUT_S)


class JobStates:
    """The jobs of one namespace, for one client."""

    def __init__(self, bus: Bus, namespace: Namespace) -> None:
        self._bus = bus
        self._namespace = namespace
        self._unconfirmed: dict[JobId, int] = {}  # {stored, not yet seen recorded: its place in the submit stream}

    def expect(self, places: Mapping[JobId, int]) -> None:
        """The stream has stored the jobs in these places: they will be recorded, or refused."""
        self._unconfirmed |= places

    def unconfirmed(self, job_ids: Iterable[JobId]) -> dict[JobId, int]:
        """Those of the jobs that are stored and not yet seen recorded, with their places in the submit stream."""
        return {job_id: self._unconfirmed[job_id] for job_id in job_ids if job_id in self._unconfirmed}

    async def confirm(self, places: Mapping[JobId, int]) -> None:
        """Return when the jobs that were stored there are recorded, or when no controller answers.

        Raises JobRefusedError or QuotaExceededError once all were asked about, with those that were not refused.
        """
        job_ids, refused = list(places), dict[JobId, RefusedJob]()
        for start in range(0, len(job_ids), _JOBS_A_REQUEST):
            asked = {job_id: places[job_id] for job_id in job_ids[start : start + _JOBS_A_REQUEST]}
            try:
                refused |= _refused(await self._ask(asked), asked)
            except UNANSWERED:
                break
        if refused:
            raise _error(refused, [job_id for job_id in job_ids if job_id not in refused])

    async def ask_about(self, job_id: JobId, ask: Callable[[], Awaitable[T]]) -> T:
        """What `ask` returns, also of a job that the controller has not come to yet. Raises what it raises, and as `confirm`."""
        while True:
            await self.confirm(self.unconfirmed([job_id]))
            try:
                return await ask()
            except JobNotFoundError:
                if not self.unconfirmed([job_id]):
                    raise

    async def get(self, job_ids: Sequence[JobId], *, details: bool = False) -> list[JobInfo]:
        """The jobs in the order asked for; one that is stored and not yet recorded is PENDING, submitted at no time.

        Raises JobNotFoundError, JobRefusedError for one that was refused after `launch` had returned, BusError.
        """
        found: dict[JobId, JobInfo] = {}
        missing = list(dict.fromkeys(job_ids))
        while missing:
            asked = missing[:_JOBS_A_REQUEST]
            places = self.unconfirmed(asked)
            try:
                reply = await self._ask(places, [job_id for job_id in asked if job_id not in places], details=details)
            except UNANSWERED:
                if len(places) < len(asked):
                    raise
                reply = StatusReply(unknown=tuple(asked))
            refused = _refused(reply, places)
            if refused:
                raise _error(refused)
            found |= {info.job_id: info for info in reply.jobs}
            found |= {job_id: self._unrecorded(job_id) for job_id in reply.unknown}
            # What did not fit into the reply is asked for again.
            missing = [job_id for job_id in missing if job_id not in found]
        return [found[job_id] for job_id in job_ids]

    async def _ask(
        self, places: Mapping[JobId, int], others: Iterable[JobId] = (), *, details: bool = False
    ) -> StatusReply:
        """How jobs stand that were stored in those places, once they were looked at there, and how others do."""
        question = StatusRequest(job_ids=(*places, *others), submissions=tuple(places.values()), details=details)
        subject = subjects.jobs_verb(self._namespace, "status")
        if places:
            answer = await retried(
                lambda left_s: self._bus.request(subject, question.to_json(), timeout_s=left_s),
                on=(BusyError,),
                timeout_s=_RECORD_TIMEOUT_S,
            )
            reply = StatusReply.from_json(answer.data)
        else:
            reply = await self._bus.ask(subject, question, StatusReply)
        for job_id in {*_refused(reply, places), *(info.job_id for info in reply.jobs)} & places.keys():
            if self._unconfirmed.get(job_id) == places[job_id]:  # else it was launched anew meanwhile
                del self._unconfirmed[job_id]
        return reply

    def _unrecorded(self, job_id: JobId) -> JobInfo:
        if job_id not in self._unconfirmed:
            raise JobNotFoundError(
                f"no job {job_id!r} in namespace {self._namespace!r}: `fluster ps --all` lists those there are, and "
                "in Python `cluster.list_jobs()`"
            )
        return JobInfo(job_id=job_id, name=job_id, namespace=self._namespace, status=JobStatus.PENDING)


def _refused(reply: StatusReply, places: Mapping[JobId, int]) -> dict[JobId, RefusedJob]:
    """Why those of the jobs in these places were refused that were."""
    refused = {each.sequence: each for each in reply.refused}
    return {job_id: refused[place] for job_id, place in places.items() if place in refused}


def _error(refused: Mapping[JobId, RefusedJob], accepted: Sequence[JobId] = ()) -> JobRefusedError:
    """What to raise for them: that a quota was exceeded if that is all that kept them out."""
    told = "; ".join(f"{job_id}: {each.reason}" for job_id, each in refused.items())
    is_by_quota = all(each.code == QUOTA_EXCEEDED for each in refused.values())
    return (QuotaExceededError if is_by_quota else JobRefusedError)(told, accepted)
