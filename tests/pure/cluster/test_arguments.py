"""What callers of the job client may pass, and the errors when they pass something else."""

from __future__ import annotations

import math
import threading
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from fluster.cluster.jobs.arguments import (
    check_count,
    check_job_id,
    check_number,
    check_patience,
    check_reason,
    check_requests,
    check_states,
    check_timeout,
    deadline_after,
    log_start,
)
from fluster_bus.core.errors import InvalidNameError
from fluster_bus.messages import Entrypoint, JobId, JobInfo, JobRequest, JobStatus, Namespace

NOW = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
REQUEST = JobRequest(name="train", entrypoint=Entrypoint(command=("true",)))
INFO = JobInfo(job_id=JobId("a"), name="a", namespace=Namespace("default"), status=JobStatus.PENDING)


def test_what_is_right_passes() -> None:
    assert check_requests([REQUEST]) == [REQUEST]
    assert check_requests(iter([REQUEST, REQUEST])) == [REQUEST, REQUEST]
    assert check_job_id("train-3f2a") == "train-3f2a"
    for timeout in (None, 0, 2, 0.5):
        assert check_timeout(timeout) == timeout
    for index in (None, 0, 3):
        assert check_number("task", index, 0) == index


@pytest.mark.parametrize(
    ("requests", "text"),
    [
        (
            [{"name": "train"}],
            r"\{'name': 'train'\}, of type dict, is not a JobRequest: give one, as in JobRequest\(name='train'",
        ),
        ([REQUEST, print], "of type builtin_function_or_method, is not a JobRequest"),
        (REQUEST, "of type JobRequest, is not a list of JobRequests: launch one with `launch`"),
        (5, "5, of type int, is not a list of JobRequests"),
    ],
)
def test_what_is_launched_is_a_request(requests: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        check_requests(requests)


@pytest.mark.parametrize(
    ("value", "text"),
    [(5, "5, of type int, is not a job id: give what"), (INFO, "of type JobInfo, is not a job id: give its job_id")],
)
def test_a_job_id_is_a_text(value: object, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        check_job_id(value)


@pytest.mark.parametrize("value", ["", "a b", "a.b", "*", "x" * 129])
def test_a_job_id_is_a_name(value: str) -> None:
    with pytest.raises(InvalidNameError, match="invalid job id"):
        check_job_id(value)


@pytest.mark.parametrize("value", [-1, -0.1, math.nan, math.inf, -math.inf])
def test_a_timeout_is_a_finite_number(value: float) -> None:
    with pytest.raises(ValueError, match=f"timeout={value!r}: give seconds from 0 on, or None"):
        check_timeout(value)


@pytest.mark.parametrize("value", ["5", True, timedelta(seconds=5), [5]])
def test_a_timeout_is_a_number(value: Any) -> None:
    with pytest.raises(TypeError, match="give seconds as a number"):
        check_timeout(value)


def test_a_task_is_a_number_from_0_on() -> None:
    for wrong in ("1", 1.0, True):
        with pytest.raises(TypeError, match=f"task={wrong!r}: give its number as an int"):
            check_number("task", wrong, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="task=-1: they are numbered from 0"):
        check_number("task", -1, 0)


def test_patience_may_be_over_or_without_end() -> None:
    assert [check_patience(timeout) for timeout in (None, -1, 0, 0.5)] == [None, -1, 0, 0.5]
    threading.Lock().acquire(timeout=check_patience(math.inf) or 0)  # is not too long for the clock
    assert deadline_after(None) is None
    for wrong in ("5", True, [5]):
        with pytest.raises(TypeError, match="give seconds as a number"):
            check_patience(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout=nan: give a number of seconds"):
        deadline_after(math.nan)


@pytest.mark.parametrize("value", [0, -1, True, "3", 2.0, None, 10_001])
def test_a_count_is_within_its_bounds(value: Any) -> None:
    assert check_count("replicas", 3, 1, "the number of actors", most=10_000) == 3
    with pytest.raises(ValueError, match=f"replicas={value!r}: give the number of actors, from 1 to 10,000"):
        check_count("replicas", value, 1, "the number of actors", most=10_000)
    with pytest.raises(ValueError, match="limit=-1: give how many, 0 or more"):
        check_count("limit", -1, 0, "how many")


def test_a_reason_is_a_short_text() -> None:
    assert check_reason("enough") == "enough"
    with pytest.raises(TypeError, match="reason=5: give a text"):
        check_reason(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reason has 1,001 characters, over the limit of 1,000"):
        check_reason("x" * 1_001)


def test_states_are_those_of_jobs() -> None:
    assert check_states([JobStatus.RUNNING]) == (JobStatus.RUNNING,)
    for wrong in ("RUNNING", 5):
        with pytest.raises(TypeError, match=r"give a list, such as \[JobStatus.RUNNING\]"):
            check_states(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'running' is not a valid JobStatus; give PENDING, "):
        check_states(["running"])  # type: ignore[list-item]


def test_logs_are_told_from_a_moment_on() -> None:
    assert log_start(None, NOW) is None
    assert log_start(timedelta(hours=1), NOW) == NOW - timedelta(hours=1)
    there = NOW.astimezone(timezone(timedelta(hours=5)))
    assert log_start(there, NOW) == NOW
    assert (
        log_start(timedelta.max, NOW)
        == log_start(datetime.min.replace(tzinfo=UTC), NOW)
        == datetime(1970, 1, 1, tzinfo=UTC)
    )


def test_a_moment_has_a_time_zone() -> None:
    with pytest.raises(ValueError, match=r"has no time zone: .*astimezone\(\)"):
        log_start(datetime(2026, 1, 2), NOW)  # noqa: DTZ001 - this is what is refused
    for wrong in (60, "2026-01-02", NOW.date()):
        with pytest.raises(TypeError, match="give a datetime with a time zone, or a timedelta"):
            log_start(wrong, NOW)  # type: ignore[arg-type]
