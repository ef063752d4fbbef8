"""Jobs of as many tasks as one may have: what follows from their records is decided and written in parts."""

from __future__ import annotations

import pytest

from fluster_bus.messages import JobId, JobRecord, JobStatus, TaskRecord
from fluster_bus.storage.tables import Row
from fluster_services import job_lifecycle
from fluster_services.controller.state.job_index import JobIndex, JobKey, record_key
from fluster_services.controller.state.reconcile import next_records
from fluster_services.gangs import MAX_AT_ONCE
from tests.component.controllers import NS, job_request

KEY = JobKey(NS, JobId("huge"))
MANY = 2_000


def _put(job_index: JobIndex, record: JobRecord | TaskRecord) -> None:
    _put.revision += 1  # type: ignore[attr-defined]
    job_index.apply(Row(record_key(record), record, _put.revision))  # type: ignore[attr-defined]


_put.revision = 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("gang", [False, True], ids=["tasks", "gang"])
def test_a_huge_job_is_stopped_in_parts(gang: bool) -> None:
    job_index = JobIndex()
    job = job_lifecycle.new_job(NS, KEY.job_id, job_request(replicas=MANY, gang=gang), order=1, now=0)
    killed = job_lifecycle.request_job_kill(job, reason="enough")
    assert killed is not None
    _put(job_index, killed)
    for task in job_lifecycle.each_new_task(killed):
        _put(job_index, task)
    entry, rounds = job_index.get(KEY), 0
    assert entry is not None
    while (wanted := next_records(entry, now=1, parent=None)) and not isinstance(wanted[0], JobRecord):
        assert len(wanted) <= MAX_AT_ONCE
        rounds += 1
        for record in wanted:
            _put(job_index, record)
    assert rounds == -(-MANY // MAX_AT_ONCE)
    (ended,) = wanted
    assert ended.state is JobStatus.KILLED
