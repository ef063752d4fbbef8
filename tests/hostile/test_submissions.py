"""What a client puts on `jobs.submit` ends that submission, with an event: never the controller."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fluster.cluster.client import AsyncCluster
from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets, subjects
from fluster_bus.core.errors import InvalidMessageError
from fluster_bus.core.roles import Role
from fluster_bus.messages import JobId, JobRecord, JobRequest, TaskRecord
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.streams import jobs_table
from fluster_services import job_lifecycle
from tests.component.conftest import ConnectBus
from tests.component.controllers import NS, RunningController, StartWorker, job_request, published_events
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

PLAIN = {"name": "job", "entrypoint": {"command": ["true"]}}
UNKNOWN = {
    **PLAIN,
    "job_id": "newer",
    "newer": 1,
    "entrypoint": {"command": ["true"], "newer": {"a": 1}},
    "resources": {"newer": [1]},
    "environment": {"newer": "x"},
}
# Once each of these ended something, or came close.
REFUSED = [
    b"",
    b"\xff\xfe",
    b"null",
    b"[" * 30_000,
    json.dumps({**PLAIN, "name": "\udce9"}).encode(),
    json.dumps({**PLAIN, "name": 1}).encode(),
    json.dumps({**PLAIN, "job_id": "leader"}).encode(),
    json.dumps({**PLAIN, "entrypoint": {"command": ["\udce9"]}}).encode(),
    json.dumps({**PLAIN, "entrypoint": {"callable": "os.system", "command": ["true"]}}).encode(),
    json.dumps({**PLAIN, "entrypoint": {"python": "3.12", "pickled": "caf\xe9"}}).encode(),
    json.dumps({**PLAIN, "resources": {"cpu": float("nan")}}).encode(),
    json.dumps({**PLAIN, "resources": {"cpu": float("inf")}}).encode(),
    json.dumps({**PLAIN, "resources": {"cpu": -1}}).encode(),
    json.dumps({**PLAIN, "resources": {"memory": 1 << 80}}).encode(),
    json.dumps({**PLAIN, "timeout_s": float("inf")}).encode(),
    json.dumps({**PLAIN, "scheduling_timeout_s": float("nan")}).encode(),
    json.dumps({**PLAIN, "replicas": 1 << 70}).encode(),
    json.dumps({**PLAIN, "array": "0-99999999999"}).encode(),
    json.dumps({**PLAIN, "array": {"ids": "x"}}).encode(),
]
NUMBERS = st.one_of(
    st.integers(), st.floats(), st.sampled_from([1e308, -1, 1 << 63, 1 << 64, 1 << 200, float("inf"), float("nan")])
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(), st.sampled_from(["\udce9", "\0", "a.b", "*", ">", "0-3"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=8,
)
FIELDS = sorted(set(JobRequest.model_fields) - {"name", "entrypoint"})


async def submit(bus: Bus, data: bytes) -> int:
    answer = await bus.request(subjects.jobs_submit(NS), data)
    return int(json.loads(answer.data)["seq"])


async def test_fields_of_a_newer_client_are_kept(
    own_server: EmbeddedServer,
    connect_bus: ConnectBus,
    cluster: AsyncCluster,
    start_worker: StartWorker,
    controller: RunningController,
) -> None:
    await start_worker()
    client = await connect_bus(own_server, Role.CLIENT, NS)
    await submit(client, json.dumps(UNKNOWN).encode())
    after = await cluster.launch(job_request("after"))
    assert (await cluster.wait(after, timeout=60)).status.finished()
    row = await jobs_table(controller.bus, NS).get("newer")
    assert row is not None
    stored = json.loads(row.value.to_json())["request"]
    assert (stored["newer"], stored["entrypoint"]["newer"], stored["resources"]["newer"]) == (1, {"a": 1}, [1])
    assert (await cluster.wait(JobId("newer"), timeout=60)).status.finished()


async def test_what_cannot_be_taken_is_refused_with_an_event(
    own_server: EmbeddedServer, connect_bus: ConnectBus, cluster: AsyncCluster, controller: RunningController
) -> None:
    client = await connect_bus(own_server, Role.CLIENT, NS)
    sent = [await submit(client, data) for data in REFUSED]
    await cluster.launch(job_request("after"))

    async def refused() -> set[int]:
        events = await published_events(controller.bus)
        return {each.transition.number for each in events if each.transition.reason.startswith("refused: ")}

    async def all_are_told() -> bool:
        return set(sent) <= await refused()

    async def none_waits() -> bool:
        return (await controller.bus.jetstream.stream_info(buckets.SUBMIT_STREAM)).state.messages == 0

    await wait_until_async(all_are_told)
    await wait_until_async(none_waits)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4),
    st.dictionaries(st.text(max_size=8), VALUES, max_size=2),
)
@example({"resources": {"cpu": 1e308}}, {})
@example({"timeout_s": float("inf")}, {"newer": "\udce9"})
@example({"environment": {"env_vars": {"A": "\udce9"}}}, {})
def test_any_request_becomes_records_that_can_be_read_or_is_refused(
    fields: dict[str, object], unknown: dict[str, object]
) -> None:
    try:
        request = JobRequest.from_json(json.dumps({**unknown, **PLAIN, **fields}).encode())
    except InvalidMessageError as error:
        str(error).encode()
        return
    job = job_lifecycle.new_job(NS, JobId("job"), request, order=1, now=0.0)
    assert JobRecord.from_json(job.to_json()).to_json() == job.to_json()
    for task in job_lifecycle.new_tasks(job)[:3]:
        assert TaskRecord.from_json(task.to_json()) == task
