"""What callers learn about jobs, by a client of a real controller."""

from __future__ import annotations

import asyncio
import math
import pickle
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fluster.cluster.client import AsyncCluster
from fluster.cluster.jobs import job_states
from fluster.cluster.jobs.job_states import JobStates
from fluster.cluster.jobs.submissions import Submissions
from fluster.errors import JobRefusedError
from fluster_bus.core.errors import InvalidNameError, MessageTooLargeError
from fluster_bus.messages import EnvironmentConfig, JobId, JobStatus, LogLine, WorkerId
from tests.component.controllers import StartWorker, job_request

pytestmark = pytest.mark.anyio


TAKEN = JobId("taken")


# ---- many at once ---------------------------------------------------------------------------------------


async def test_an_id_that_several_have_is_refused_before_anything_is_sent(cluster: AsyncCluster) -> None:
    twice = job_request(job_id=JobId("twice"), on_conflict="keep")
    with pytest.raises(
        JobRefusedError, match="none of them was sent: job_id='twice' is that of 2 of these 3 jobs"
    ) as e:
        await cluster.launch_many([twice, job_request("other"), twice])
    assert e.value.accepted == ()
    assert await cluster.list_jobs() == []


@pytest.mark.parametrize("jobs_a_request", [2, 1_000])
async def test_who_launches_many_is_told_which_of_them_were_accepted(
    cluster: AsyncCluster, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch, jobs_a_request: int
) -> None:
    monkeypatch.setattr(job_states, "_JOBS_A_REQUEST", jobs_a_request)
    await start_worker()
    await cluster.launch(job_request(job_id=TAKEN))
    requests = [
        job_request(job_id=JobId("a")),
        job_request(job_id=TAKEN),
        job_request("b"),
        job_request(job_id=JobId("c"), after=(JobId("no-such"),)),
        job_request(job_id=JobId("d")),
    ]
    with pytest.raises(JobRefusedError) as caught:
        await cluster.launch_many(requests)
    accepted = caught.value.accepted
    assert (accepted[0], accepted[1][:2], accepted[2:]) == ("a", "b-", ("d",))
    assert {info.status for info in await cluster.wait(accepted, timeout=60)} == {JobStatus.SUCCEEDED}
    text = str(caught.value)
    assert "taken: job 'taken' exists already" in text
    assert "c: after='no-such': there is no such job" in text
    assert text.endswith(f"; these were accepted and go on: a, {accepted[1]}, d")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.accepted) == (text, accepted)


async def test_of_two_that_launch_the_same_id_at_once_one_is_refused(cluster: AsyncCluster) -> None:
    requests = [job_request(name, job_id=JobId("mine")) for name in ("one", "two")]
    answers = await asyncio.gather(*map(cluster.launch, requests), return_exceptions=True)
    (refused,) = [answer for answer in answers if answer != "mine"]
    assert isinstance(refused, JobRefusedError)
    winner = requests[answers.index(JobId("mine"))]
    assert (await cluster.poll(JobId("mine"))).name == winner.name


async def test_after_one_that_cannot_be_stored_no_more_are_sent_and_those_before_are_told(
    cluster: AsyncCluster,
) -> None:
    states = JobStates(cluster.bus, cluster.namespace)
    one_by_one = Submissions(cluster.bus, cluster.namespace, states, None, at_once=1)
    huge = job_request("huge", environment=EnvironmentConfig(env_vars={"X": "x" * cluster.bus.max_payload}))
    with pytest.raises(MessageTooLargeError) as caught:
        await one_by_one.launch([job_request(job_id=JobId("a")), huge, job_request(job_id=JobId("b"))])
    assert caught.value.__notes__ == ["of the jobs launched together these were stored, and go on: a"]
    [info] = await states.get([JobId("a")])
    assert info.submitted_at is not None, "once it is recorded"
    assert [info.job_id for info in await cluster.list_jobs()] == ["a"]


# ---- what is not an argument --------------------------------------------------------------------------------

_ID = JobId("a")


async def _logs(cluster: AsyncCluster, job_id: JobId, **wanted: Any) -> list[LogLine]:
    return [line async for line in cluster.logs(job_id, **wanted)]


@pytest.mark.parametrize("job_id", ["", "a b", "a.>", "x" * 5_000])
@pytest.mark.parametrize("verb", ["poll", "wait", "watch", "result", "terminate", "explain", "logs"])
async def test_every_call_checks_the_id(cluster: AsyncCluster, verb: str, job_id: str) -> None:
    answer = getattr(cluster, verb)(JobId(job_id))
    with pytest.raises(InvalidNameError, match="invalid job id"):
        await (anext(answer) if verb in ("watch", "logs") else answer)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda c: c.launch({"name": "a"}), TypeError, "is not a JobRequest: give one"),
        (lambda c: c.launch_many(job_request()), TypeError, "`launch`"),
        (lambda c: c.poll(5), TypeError, "not a job id"),
        (lambda c: c.wait(5), TypeError, "not a job id"),
        (lambda c: c.wait([_ID, 5]), TypeError, "not a job id"),
        (lambda c: c.wait(_ID, timeout=math.nan), ValueError, "timeout=nan"),
        (lambda c: c.result(_ID, timeout=-1), ValueError, "timeout=-1"),
        (lambda c: c.result(_ID, task="1"), TypeError, "task='1'"),
        (lambda c: c.drain_worker(WorkerId("w1"), timeout=math.inf), ValueError, "timeout=inf"),
        (lambda c: _logs(c, _ID, task="1"), TypeError, "task='1'"),
        (lambda c: _logs(c, _ID, attempt=0), ValueError, "attempt=0: they are numbered from 1"),
        (lambda c: _logs(c, _ID, since=60), TypeError, "since=60"),
        (lambda c: _logs(c, _ID, tail=-1), ValueError, "tail=-1"),
    ],
)
async def test_what_is_wrong_is_told_before_anything_is_sent(
    cluster: AsyncCluster, call: Callable[[Any], Awaitable[object]], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        await call(cluster)


async def test_logs_since_a_moment_without_a_time_zone_are_refused(cluster: AsyncCluster) -> None:
    job_id = await cluster.launch(job_request())
    with pytest.raises(ValueError, match="has no time zone"):
        await _logs(cluster, job_id, since=datetime.now())  # noqa: DTZ005 - this is what is refused
    for since in (datetime.now(UTC), datetime.min.replace(tzinfo=UTC), timedelta.max, timedelta(0)):
        assert await _logs(cluster, job_id, since=since) == []
