from __future__ import annotations

from typing import Any

from fluster.actors import Member, MemberState
from fluster.actors.client.census import census, is_coming_back, why_nobody_serves
from fluster.actors.protocol.members import LAST_ERROR, LEAVING, RESTARTING, RESTARTS
from fluster_bus.messages import Endpoint, EndpointId, JobId, JobInfo, JobStatus, Namespace, TaskStatus

JOB = JobId("pool-1")
P, B, R, F, K = JobStatus.PENDING, JobStatus.BUILDING, JobStatus.RUNNING, JobStatus.FAILED, JobStatus.KILLED


def task(number: int, status: JobStatus, attempt: int = 1, **more: Any) -> TaskStatus:
    return TaskStatus(task=number, status=status, attempt=attempt, **more)


def job(*tasks: TaskStatus, name: str = "pool", first_attempt: int = 1) -> JobInfo:
    return JobInfo(
        job_id=JOB, name=name, namespace=Namespace("default"), status=R, tasks=tasks, first_attempt=first_attempt
    )


def member(
    number: int, attempt: int = 1, metadata: dict[str, str] | None = None, *, job_id: JobId | None = JOB
) -> Member:
    endpoint = Endpoint(
        endpoint_id=EndpointId(f"e{number}"),
        name="pool",
        address=f"fluster.default.actors.e{number}",
        namespace=Namespace("default"),
        job_id=job_id,
        task=number,
        attempt=attempt,
        metadata=metadata or {},
    )
    return Member.of(endpoint)


def shown(members: list[Member]) -> list[tuple[int, str, int]]:
    return [(each.task, each.state.value, each.restarts) for each in members]


def test_each_task_is_somewhere() -> None:
    jobs = [
        job(
            task(0, R),
            task(1, R),
            task(2, P, 2, last_failure="killed"),
            task(3, F, 3, error_message="bang", failures=3),
            task(4, F, 1, error_message="bang", will_retry=True),
            task(5, B),
        )
    ]
    found = census("pool", [member(1), member(0)], jobs)
    assert shown(found) == [
        (1, "ready", 0),
        (0, "ready", 0),
        (2, "restarting", 1),
        (3, "dead", 2),
        (4, "restarting", 0),
        (5, "starting", 0),
    ]
    assert [each.last_error for each in found] == ["", "", "killed", "bang", "bang", ""]
    assert [each.address for each in found[2:]] == [""] * 4


def test_what_a_member_says_of_itself_is_added_to_what_its_job_tells() -> None:
    again = member(0, 3, {RESTARTS: "2", LAST_ERROR: "its own"})
    (found,) = census("pool", [again], [job(task(0, R, 3, last_failure="its process"))])
    assert (found.restarts, found.last_error) == (4, "its own")
    (found,) = census("pool", [member(0, 3)], [job(task(0, R, 3, last_failure="its process"), first_attempt=2)])
    assert (found.restarts, found.last_error) == (1, "its process")
    assert member(0, 1, {RESTARTING: "yes"}).state is MemberState.RESTARTING
    assert member(0, 1, {RESTARTING: ""}).state is MemberState.READY
    assert member(0, 1, {RESTARTING: "yes", LEAVING: "yes"}).state is MemberState.STOPPING
    assert member(0, 1, {RESTARTS: "2", "mine": "kept"}).metadata == {"mine": "kept"}


def test_the_newer_of_registry_and_record_counts() -> None:
    assert shown(census("pool", [member(0, 1)], [job(task(0, R, 2))])) == [(0, "restarting", 1)]
    assert shown(census("pool", [member(0, 1)], [job(task(0, F, 1))])) == [(0, "dead", 0)]
    assert shown(census("pool", [member(0, 2)], [job(task(0, F, 1, will_retry=True))])) == [(0, "ready", 1)]


def test_members_outside_of_the_deployment_count_as_they_are_registered() -> None:
    script, helper = member(7, job_id=None), member(0, job_id=JobId("other-1"))
    assert shown(census("pool", [script, helper], [])) == [(7, "ready", 0), (0, "ready", 0)]
    training = [job(task(0, R), task(1, R), name="training")]  # its first task serves, the others do something else
    assert shown(census("pool", [member(0)], training)) == [(0, "ready", 0)]


def test_why_nobody_serves_is_told_once_all_have_died() -> None:
    died = task(0, F, error_message="out of memory")
    assert why_nobody_serves("pool", [job(died)]) == "its actor has died: task 0 is FAILED: out of memory"
    two = why_nobody_serves("pool", [job(died, task(1, JobStatus.WORKER_FAILED))])
    assert two is not None
    assert two.endswith("and 1 more")
    assert why_nobody_serves("pool", [job(died, task(1, P))]) is None
    assert why_nobody_serves("pool", [job(task(0, F, will_retry=True))]) is None
    assert why_nobody_serves("pool", [job(task(0, K))]) is None
    assert why_nobody_serves("pool", [job(died, name="other")]) is None
    assert why_nobody_serves("pool", []) is None


def test_who_starts_again_is_coming_back() -> None:
    assert is_coming_back("pool", [job(task(0, P, 2))])
    assert is_coming_back("pool", [job(task(0, F, will_retry=True))])
    assert not is_coming_back("pool", [job(task(0, F))])
    assert not is_coming_back("pool", [job(task(0, P, 2), name="other")])
