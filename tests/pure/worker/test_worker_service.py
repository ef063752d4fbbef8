"""Which attempt and which lines an operator means."""

from typing import Any

import pytest

from fluster_bus.core.errors import ServiceError
from fluster_bus.messages import AttemptLogsRequest, AttemptQuery, JobId, Namespace
from fluster_services.worker.contract.spool import SpoolRecord, Stream
from fluster_services.worker.service import find_attempt, selected

KEYS = ["default.train.0.1", "default.train.0.2", "default.train.1.1", "default.train.0.10", "other.train.0.3"]
KEYS += ["default.array.0.1", "default.array.1.1"]
ARRAY_IDS = {"default.array.0.1": 10, "default.array.1.1": 20}


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, "default.train.0.10"),
        ({"attempt": 2}, "default.train.0.2"),
        ({"attempt": 3}, None),
        ({"task": 1}, "default.train.1.1"),
        ({"task": 2}, None),
        ({"task": 0, "number": 1}, "default.train.1.1"),
        ({"job_id": "array", "task": 20, "number": 20}, "default.array.1.1"),
        ({"job_id": "array", "task": 1, "number": 1}, None),
        ({"job_id": "array", "task": 1}, "default.array.1.1"),
        ({"namespace": "other"}, "other.train.0.3"),
        ({"job_id": "tra"}, None),
    ],
)
def test_the_newest_attempt_is_meant_unless_told(fields: dict[str, Any], found: str | None) -> None:
    query = AttemptQuery(**{"namespace": Namespace("default"), "job_id": JobId("train"), **fields})
    assert find_attempt(KEYS, ARRAY_IDS, query) == found


def record(number: int, stream: Stream = "stdout", text: str = "line") -> SpoolRecord:
    return SpoolRecord(number, float(number), stream, f"{text} {number}", False)


def request(**fields: Any) -> AttemptLogsRequest:
    return AttemptLogsRequest(namespace=Namespace("default"), job_id=JobId("train"), **fields)


def test_the_last_lines_that_pass_all_filters_are_told() -> None:
    records = [record(number, "stderr" if number % 2 else "stdout") for number in range(1000)]
    assert [each.offset for each in selected(records, request())] == list(range(900, 1000))
    wanted = request(tail=2, stream="stderr", since=10.0, grep="^line .*9$")
    assert [each.offset for each in selected(records, wanted)] == [989, 999]
    assert selected(records, request(tail=0)) == []
    assert [each.offset for each in selected(records, request(tail=10_000, since=998.0))] == [998, 999]


def test_a_reply_is_bounded() -> None:
    records = [record(number, text="x" * 1_000_000) for number in range(5)]
    assert [each.offset for each in selected(records, request())] == [3, 4]


def test_a_bad_pattern_is_told() -> None:
    with pytest.raises(ServiceError, match="invalid regular expression"):
        selected([], request(grep="["))
