"""Jobs that run after others: what follows from how those stand.

A job with `after` is recorded without tasks. Once all that it names have ended it is released: its record says so, for
good, and its tasks are recorded and offered. So neither the scheduler nor a worker ever meets a task that must not run
yet, and a waiting job costs nothing but its record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from fluster_bus.core.names import did_you_mean, near_names
from fluster_bus.messages import JobId, JobRecord, JobStatus
from fluster_services import job_lifecycle


def next_record(job: JobRecord, known: Mapping[JobId, JobRecord], *, now: float) -> JobRecord | None:
    """The waiting job's record with what follows: released, or ended with the reason; None while it has to wait.

    `known` has the jobs that it names. One that is not there is over, and ended well enough: it was there when the job
    was submitted, its record outlives it by days, and had it failed this job would have heard of it then.
    """
    if not job_lifecycle.awaits_others(job):
        return None
    if job.kill_requested is not None:
        return job_lifecycle.end_unreleased(job, state=JobStatus.KILLED, now=now, reason=job.kill_requested)
    failed = next((each for each in _ended(job, known) if each.state is not JobStatus.SUCCEEDED), None)
    if failed is not None and job.request.after_failure == "fail":
        why = f": {failed.error_message}" if failed.error_message else ""
        reason = f"it was to run after job {failed.job_id}, which ended as {failed.state}{why}"
        return job_lifecycle.end_unreleased(job, state=JobStatus.FAILED, now=now, reason=reason)
    if waits_for(job, known):
        return None
    return job_lifecycle.release_job(job, now=now)


def waits_for(job: JobRecord, known: Mapping[JobId, JobRecord]) -> list[JobRecord]:
    """The jobs that it still waits for, in the order in which it names them."""
    return [known[job_id] for job_id in job.request.after if job_id in known and not known[job_id].is_over]


def _ended(job: JobRecord, known: Mapping[JobId, JobRecord]) -> Iterable[JobRecord]:
    return (known[job_id] for job_id in job.request.after if job_id in known and known[job_id].is_over)


def unknown(
    job_ids: Iterable[JobId], is_known: Callable[[JobId], bool], names: Callable[[], Sequence[JobId]]
) -> str | None:
    """Why a job cannot wait for these: one does not exist. `names` are ids among which a similar one is looked for."""
    missing = next((job_id for job_id in job_ids if not is_known(job_id)), None)
    if missing is None:
        return None
    hint = did_you_mean(near_names(missing, names())) or ": submit it first"
    return f"after={missing!r}: there is no such job{hint}"
