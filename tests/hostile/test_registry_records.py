"""What a job writes into its namespace's registry misleads at most those who call what it serves."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fluster.actors.members import DISCONNECTED_AT, RESTARTS, RETRIES, TIMEOUTS, Member
from fluster.cluster.client import AsyncCluster
from fluster_bus import subjects
from fluster_bus.errors import InvalidMessageError
from fluster_bus.messages import Endpoint
from fluster_bus.registry import Registry
from fluster_bus.roles import Role
from fluster_bus.server import EmbeddedServer
from fluster_bus.streams import endpoint_key
from tests.component.conftest import ConnectBus
from tests.component.controllers import NS, RunningController, StartWorker, job_request

pytestmark = pytest.mark.anyio

ADDRESS = subjects.actor_member(NS, "ledger", "e1")
ODD = st.one_of(
    st.text(max_size=20), st.sampled_from(["[]", "{}", "null", "[1]", '{"a": "b"}', '{"a": NaN}', "[" * 5000])
)


def endpoint(**fields: object) -> Endpoint:
    plain = {"endpoint_id": "e1", "name": "ledger", "address": ADDRESS, "namespace": NS}
    return Endpoint.from_json(json.dumps({**plain, **fields}).encode())


async def test_a_key_that_is_written_for_other_jobs_and_taken_away_ends_nothing(
    own_server: EmbeddedServer,
    connect_bus: ConnectBus,
    cluster: AsyncCluster,
    controller: RunningController,
    start_worker: StartWorker,
) -> None:
    await start_worker()
    job = await connect_bus(own_server, Role.JOB, NS)
    registry = Registry(job, NS)
    first, second = [await cluster.launch(job_request("held", cpu=1_000)) for _ in range(2)]
    key = endpoint_key(endpoint(job_id=str(first)))
    where = subjects.bucket_key(subjects.endpoints_bucket(NS), key)
    for written in (
        endpoint(job_id=str(first), attempt=9),
        endpoint(job_id=str(second), attempt=9),
        endpoint(job_id=str(first), attempt=9, endpoint_id="e*"),
        endpoint(job_id=str(first), namespace="other"),
    ):
        await job.request(where, written.to_json())
    for odd in (b"", b"{", b"null", b'{"name": 1}', b"\xff"):
        await job.request(where, odd)
    assert await registry.list() == []
    await registry.table.delete(key)
    for each in (first, second):
        await cluster.terminate(each)
    assert await cluster.launch(job_request("after"))


@pytest.mark.parametrize(
    "address",
    [
        "$KV.fluster_jobs_default.train-1",
        "$JS.API.STREAM.DELETE.FLUSTER_SUBMIT",
        "fluster.sys.workers.w1.drain",
        "fluster.other.actors.ledger.one.e1",
        "fluster.default.jobs.submit",
        "fluster.default.actors.>",
        "fluster.default.actors.a b",
        "fluster.default.actors",
    ],
)
def test_a_call_goes_nowhere_but_to_actors_of_the_records_namespace(address: str) -> None:
    with pytest.raises(InvalidMessageError, match="invalid address"):
        Member.of(endpoint(address=address))


@given(st.dictionaries(st.sampled_from([TIMEOUTS, RETRIES, RESTARTS, DISCONNECTED_AT]), ODD))
@example({RESTARTS: "9" * 5000})
@example({TIMEOUTS: '{"add": 1e999}'})
@example({DISCONNECTED_AT: '["boot", "x", {}]'})
def test_any_metadata_makes_a_member_or_none(metadata: dict[str, str]) -> None:
    try:
        member = Member.of(endpoint(metadata=metadata))
    except InvalidMessageError:
        return
    assert all(each >= 0 for each in (*(member.timeouts or {}).values(), *(member.retries or {}).values()))
