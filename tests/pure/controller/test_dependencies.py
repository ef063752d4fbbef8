"""What becomes of a job that runs after others, however those end and whenever it is looked at."""

import random

import pytest
from pydantic import ValidationError

from fluster_bus.messages import Entrypoint, JobId, JobInfo, JobRecord, JobRequest, JobStatus
from fluster_services import job_lifecycle
from fluster_services.controller.scheduling.explain import explain
from fluster_services.controller.state.job_index import JobEntry, JobIndex, JobKey
from fluster_services.controller.state.reconcile import (
    missing_tasks,
    next_dependent_record,
    next_records,
    unknown_dependency,
    waits_for,
)
from fluster_services.job_lifecycle import job_info
from tests.pure.controller.test_job_index import NS, job_record, row

S, F, K = JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.KILLED


def waiting(*after: str, job_id: str = "b", **fields: object) -> JobRecord:
    request = JobRequest(
        name="train",
        entrypoint=Entrypoint(command=("true",)),
        after=tuple(map(JobId, after)),
        **fields,  # type: ignore[arg-type]
    )
    return job_lifecycle.new_job(NS, JobId(job_id), request, order=9, now=0)


def ended(job_id: str, state: JobStatus, message: str = "") -> JobRecord:
    return job_record(job_id).model_copy(update={"state": state, "error_message": message})


def known(*jobs: JobRecord) -> dict[JobId, JobRecord]:
    return {job.job_id: job for job in jobs}


def test_it_is_released_when_all_have_succeeded_and_not_before() -> None:
    job = waiting("a", "c", replicas=2)
    assert job_lifecycle.new_tasks(job) == []
    assert next_dependent_record(job, known(job_record("a"), ended("c", S)), now=1) is None
    released = next_dependent_record(job, known(ended("a", S), ended("c", S)), now=1)
    assert released is not None
    assert (released.state, released.released) == (JobStatus.PENDING, True)
    assert [each.number for each in released.transitions] == [1, 2]
    assert list(missing_tasks(JobEntry(row(job, 1)))) == []  # type: ignore[arg-type]
    tasks = list(missing_tasks(JobEntry(row(released, 2))))  # type: ignore[arg-type]
    assert [(task.task, task.transitions[-1].time) for task in tasks] == [(0, 1), (1, 1)]
    assert next_dependent_record(released, {}, now=2) is None


@pytest.mark.parametrize("state", [F, K, JobStatus.WORKER_FAILED, JobStatus.UNSCHEDULABLE])
def test_it_fails_with_the_first_that_did_not_succeed_and_names_it(state: JobStatus) -> None:
    job = waiting("a", "c")
    after = next_dependent_record(job, known(job_record("a"), ended("c", state, "exit code 3")), now=1)
    assert after is not None
    assert (after.state, after.finished_at) == (F, 1)
    assert after.error_message == f"it was to run after job c, which ended as {state}: exit code 3"
    assert (
        next_dependent_record(waiting("a", "c", after_failure="run"), known(job_record("a"), ended("c", state)), now=1)
        is None
    )
    after = next_dependent_record(waiting("c", after_failure="run"), known(ended("c", state)), now=1)
    assert after is not None
    assert after.released


def test_a_dependency_whose_record_is_gone_is_over() -> None:
    after = next_dependent_record(waiting("a"), {}, now=1)
    assert after is not None
    assert after.released


def test_it_is_stopped_while_it_waits() -> None:
    job = job_lifecycle.request_job_kill(waiting("a"), reason="enough")
    assert job is not None
    (after,) = next_records(JobEntry(row(job, 1)), now=1, parent=None, after=known(job_record("a")))  # type: ignore[arg-type]
    assert isinstance(after, JobRecord)
    assert (after.state, after.error_message) == (K, "enough")
    assert job_info(after, []).status is K


def test_it_ends_with_its_parent_while_it_waits() -> None:
    job = waiting("a", parent=JobId("p"))
    (after,) = next_records(JobEntry(row(job, 1)), now=1, parent=ended("p", S))  # type: ignore[arg-type]
    assert isinstance(after, JobRecord)
    assert after.kill_requested == "its parent p ended as SUCCEEDED"


def test_who_waits_for_whom_is_known_from_the_records_in_any_order() -> None:
    dice = random.Random(4)
    for _ in range(200):
        job_index = JobIndex()
        first = waiting("a", "c")
        released = job_lifecycle.release_job(first, now=1)
        assert released is not None
        rows = [row(first, 1), row(job_record("a"), 2), row(waiting("a", job_id="d"), 3)]
        expected = {JobKey(NS, JobId("b")), JobKey(NS, JobId("d"))}
        if dice.random() < 0.5:
            rows.append(row(released, 4))
            expected -= {JobKey(NS, JobId("b"))}
        dice.shuffle(rows)
        for each in rows:
            job_index.apply(each)
        job_index.sanity_check()
        assert job_index.dependents(JobKey(NS, JobId("a"))) == expected
        assert set(job_index.dependencies(JobKey(NS, JobId("b")))) == {"a"}


def test_one_that_does_not_exist_is_named_with_those_that_are_near() -> None:
    def why(name: str) -> str | None:
        there = [JobId("prepare-3f2a"), JobId("train-77b0")]
        return unknown_dependency([there[1], JobId(name)], there.__contains__, lambda: there)

    assert why("prepare-3f2a") is None
    assert why("prepare-3f2b") == "after='prepare-3f2b': there is no such job; did you mean 'prepare-3f2a'?"
    assert why("zzz") == "after='zzz': there is no such job: submit it first"


def test_what_it_waits_for_is_explained() -> None:
    job = waiting("a", "c", "d", "e", "f")
    jobs = known(job_record("a"), ended("c", S), job_record("d"), job_record("e"), job_record("f"))
    assert [each.job_id for each in waits_for(job, jobs)] == ["a", "d", "e", "f"]

    def said(*names: str) -> str:
        states = [(name, JobStatus.RUNNING) for name in names]
        return explain(job, [], [], ahead=0, now=0, waits_for=states)

    assert said("a") == "waits for job a, which is RUNNING"
    assert said("a", "d") == "waits for 2 jobs: a (RUNNING) and d (RUNNING)"
    assert said("a", "d", "e", "f") == "waits for 4 jobs: a (RUNNING), d (RUNNING), e (RUNNING) and 1 more"


def test_jobs_are_named_by_id_or_by_what_poll_gives() -> None:
    info = JobInfo(job_id=JobId("a"), name="a", namespace=NS, status=S)
    request = JobRequest(name="b", entrypoint=Entrypoint(command=("true",)), after=[info, "c", "a"])  # type: ignore[list-item]
    assert request.after == ("a", "c")
    assert JobRequest.from_json(request.to_json()) == request


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"after": "a"}, "give a list of job ids"),
        ({"after": ["a.b"]}, "invalid job id 'a.b'"),
        ({"after": ["a"], "job_id": "a"}, "cannot wait for itself"),
        ({"after": ["a"], "parent": "a"}, "is its parent"),
        ({"after": [str(number) for number in range(1_001)]}, "at most 1000"),
        ({"after": ["a"], "after_failure": "wait"}, "'fail' or 'run'"),
    ],
)
def test_what_nothing_can_wait_for_is_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        JobRequest(name="b", entrypoint=Entrypoint(command=("true",)), **fields)  # type: ignore[arg-type]
