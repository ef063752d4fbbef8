"""How jobs stand: what the controller tells about them, and what is known of those that it has not recorded yet."""

from __future__ import annotations

from collections.abc import Sequence

from fluster.errors import JobNotFoundError, JobRefusedError
from fluster_bus import subjects
from fluster_bus.bus import Bus
from fluster_bus.errors import DisconnectedError, NoRespondersError, RequestTimeoutError
from fluster_bus.messages import JobId, JobInfo, JobStatus, Namespace, StatusReply, StatusRequest

UNANSWERED = (NoRespondersError, RequestTimeoutError, DisconnectedError)

_RECORD_TIMEOUT_S = 5.0  # the controller itself waits a little less for jobs to be recorded
_JOBS_A_REQUEST = 1_000


class JobStates:
    """The jobs of one namespace, for one client."""

    def __init__(self, bus: Bus, namespace: Namespace) -> None:
        self._bus = bus
        self._namespace = namespace
        self._unconfirmed: dict[JobId, int] = {}  # {stored, not yet seen recorded: its place in the submit stream}

    def expect(self, job_id: JobId, submission: int) -> None:
        """The stream has stored the job: it will be recorded, or refused."""
        self._unconfirmed[job_id] = submission

    async def confirm(self, job_ids: Sequence[JobId]) -> None:
        """Return when the jobs are recorded, or when nobody answers. Raises JobRefusedError."""
        for start in range(0, len(job_ids), _JOBS_A_REQUEST):
            try:
                await self._ask(job_ids[start : start + _JOBS_A_REQUEST])
            except UNANSWERED:
                return

    async def get(self, job_ids: Sequence[JobId]) -> list[JobInfo]:
        """The jobs in the order asked for; one that is stored and not yet recorded is PENDING, submitted at no time.

        Raises JobNotFoundError, JobRefusedError for one that was refused after `launch` had returned, BusError.
        """
        found: dict[JobId, JobInfo] = {}
        missing = list(dict.fromkeys(job_ids))
        while missing:
            asked = missing[:_JOBS_A_REQUEST]
            try:
                reply = await self._ask(asked)
            except UNANSWERED:
                if not self._unconfirmed.keys() >= set(asked):
                    raise
                reply = StatusReply(unknown=tuple(asked))
            found |= {info.job_id: info for info in reply.jobs}
            found |= {job_id: self._unrecorded(job_id) for job_id in reply.unknown}
            # What did not fit into the reply is asked for again.
            missing = [job_id for job_id in missing if job_id not in found]
        return [found[job_id] for job_id in job_ids]

    async def _ask(self, job_ids: Sequence[JobId]) -> StatusReply:
        unconfirmed = [job_id for job_id in job_ids if job_id in self._unconfirmed]
        others = [job_id for job_id in job_ids if job_id not in self._unconfirmed]
        question = StatusRequest(
            job_ids=(*unconfirmed, *others), submissions=tuple(self._unconfirmed[job_id] for job_id in unconfirmed)
        )
        subject = subjects.jobs_verb(self._namespace, "status")
        if unconfirmed:
            answer = await self._bus.request(subject, question.to_json(), timeout_s=_RECORD_TIMEOUT_S)
            reply = StatusReply.from_json(answer.data)
        else:
            reply = await self._bus.ask(subject, question, StatusReply)
        if reply.refused:
            refused = {each.sequence for each in reply.refused}
            self._unconfirmed = {job: place for job, place in self._unconfirmed.items() if place not in refused}
            raise JobRefusedError("; ".join(f"{each.job_id or 'a job'}: {each.reason}" for each in reply.refused))
        for info in reply.jobs:
            self._unconfirmed.pop(info.job_id, None)
        return reply

    def _unrecorded(self, job_id: JobId) -> JobInfo:
        if job_id not in self._unconfirmed:
            raise JobNotFoundError(
                f"no job {job_id!r} in namespace {self._namespace!r}: list_jobs() or `fluster ps` shows those there are"
            )
        return JobInfo(job_id=job_id, name=job_id, namespace=self._namespace, status=JobStatus.PENDING)
