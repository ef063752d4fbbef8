"""What becomes of a submission whose job id exists already, as pure functions of the two.

    on_conflict   the job that is there      the submission
    any           is of this submission      is that job: it was sent twice
    error         whatever it is             is refused
    keep          lives, or SUCCEEDED        is that job
    keep          ended otherwise            replaces it
    replace       lives                      has it stopped, with what it launched, and replaces it then
    replace       ended                      replaces it

The one that is there is marked with the submission that replaces it, so that a client that waits for the id goes on to wait.
Its record is overwritten only when none of its tasks is held by a worker: that is a fenced order. The
submission stays in the stream until then, so a controller's death in the middle only has it delivered again. Of several
that replace the same job the last one submitted does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum, auto

from fluster_bus.messages import JobId, JobRecord, JobStatus, Replacement, TaskRecord, Transition
from fluster_bus.messages.records import KEPT_EARLIER, KEPT_TRANSITIONS
from fluster_services import job_lifecycle


class Resolution(Enum):
    """What to do with a submission."""

    RECORDED = auto()  # it is this one that is there, delivered again
    DONE = auto()  # nothing: the job that is there is the one that is wanted, or a later submission has the id
    REFUSE = auto()
    STOP = auto()  # mark the one that is there, and look again when that is gone
    REPLACE = auto()


def resolve(known: JobRecord, submitted: JobRecord, *, gone: bool) -> Resolution:
    """What to do with `submitted`. `gone` is true when the one that is there has ended, with all that it launched."""
    order = submitted.order
    if order == known.order:
        return Resolution.RECORDED
    if order in known.earlier:
        return Resolution.DONE
    if _was_sent_again(known, submitted.request.submission):
        return Resolution.DONE
    mode = submitted.request.on_conflict
    if mode == "error":
        return Resolution.REFUSE
    if order < max(known.order, known.replacement.order if known.replacement is not None else 0):
        return Resolution.DONE
    if mode == "keep" and not _is_to_replace(known, order):
        return Resolution.DONE
    return Resolution.REPLACE if known.state.finished() and gone else Resolution.STOP


def _was_sent_again(known: JobRecord, submission: str | None) -> bool:
    """True when the client saw no answer, and the stream forgot meanwhile that it has had it."""
    return submission is not None and submission in (known.request.submission, *known.earlier_submissions)


def _is_to_replace(known: JobRecord, order: int) -> bool:
    """Whether a submission that keeps what is good replaces this one."""
    if known.replacement is not None:
        return known.replacement.order == order  # else that one is the job to keep
    return known.state.finished() and known.state is not JobStatus.SUCCEEDED


def refusal(known: JobRecord) -> str:
    """Why an id is not to be had."""
    stands = f"ended as {known.state}" if known.state.finished() else "has not ended"
    return (
        f"job {known.job_id!r} exists already in namespace {known.namespace!r}, and {stands}: leave job_id out, choose "
        "another, or say on_conflict='keep' or on_conflict='replace'"
    )


def mark(known: JobRecord, order: int) -> JobRecord | None:
    """The record of the job that is there, to be replaced by that submission; None when it says so already."""
    if known.replacement is not None and known.replacement.order == order:
        return None
    marked = known.model_copy(update={"replacement": Replacement(order=order)})
    if known.state.finished() or known.kill_requested is not None:
        return marked
    return marked.model_copy(update={"kill_requested": "replaced by a newer submission of its id"})


def unmark(known: JobRecord) -> JobRecord:
    """The record of a job that is not replaced after all."""
    return known.model_copy(update={"replacement": None})


def is_half_removed(known: JobRecord, tasks: Iterable[TaskRecord]) -> bool:
    """True when the job is over, and records of its tasks are gone."""
    its_own = sum(task.order == known.order for task in tasks)
    return known.is_over and not job_lifecycle.awaits_others(known) and its_own < known.request.replicas


def successor(known: JobRecord, tasks: Iterable[TaskRecord], submitted: JobRecord) -> JobRecord:
    """The record of `submitted` in the place of the one that is there, whose tasks these are."""
    tasks = list(tasks)
    records: list[JobRecord | TaskRecord] = [known, *tasks]
    last = max(each.number for record in records for each in record.transitions)
    (first,) = submitted.transitions
    wish = known.replacement.kill_requested if known.replacement is not None else None
    name = known.request.submission
    earlier_submissions = (*known.earlier_submissions, *([name] if name is not None else []))
    return submitted.model_copy(
        update={
            "kill_requested": wish,
            "earlier": (*known.earlier, known.order)[-KEPT_EARLIER:],
            "earlier_submissions": earlier_submissions[-KEPT_EARLIER:],
            "first_attempt": max([known.first_attempt, *(task.attempt + 1 for task in tasks)]),
            "told_before": last,
            "transitions": _joined(known, first.model_copy(update={"number": last + 1})),
        }
    )


def task_successor(known: TaskRecord, task: TaskRecord) -> TaskRecord:
    """The first record of a task, in the place of one of the job that was replaced."""
    (first,) = task.transitions
    return task.model_copy(update={"transitions": _joined(known, first)})


def _joined(known: JobRecord | TaskRecord, first: Transition) -> tuple[Transition, ...]:
    # The old ones stay with it for a while: perhaps their events are not published yet.
    return (*known.transitions, first)[-KEPT_TRANSITIONS:]


def circle(job_id: JobId, after: Iterable[JobId], get: Callable[[JobId], JobRecord | None]) -> str | None:
    """Why the job cannot take that id: one that it is to run after waits for it, directly or over others."""
    ahead = list(after)
    seen = set(ahead)
    while ahead:
        name = ahead.pop()
        other = get(name)
        if other is None or other.is_over or not job_lifecycle.awaits_others(other):
            continue
        if job_id in other.request.after:
            return f"after={name!r}: that job waits for {job_id!r} itself"
        found = [each for each in other.request.after if each not in seen]
        seen.update(found)
        ahead += found
    return None
