"""A tenant that stores all that it can fills its own shares of the store: it gets an error, and no other tenant is touched."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import NamedTuple

import pytest

from fluster.cluster.client import AsyncCluster
from fluster.errors import JobRefusedError
from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets, subjects
from fluster_bus.core.errors import NamespaceFullError, ObjectTooLargeError
from fluster_bus.core.roles import Role
from fluster_bus.core.stream_bounds import (
    BUNDLES,
    MIN_BUDGET_BYTES,
    PAYLOADS,
    SHARES,
    NamespaceBounds,
    shares,
    stream_of,
)
from fluster_bus.messages import Endpoint, EndpointId, Entrypoint, JobId, JobRequest, JobStatus, Namespace
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.objects import CHUNK_BYTES, ObjectStore
from fluster_bus.storage.registry import Registry
from fluster_bus.storage.stored_messages import MAX_SECRETS_BYTES, store_call
from fluster_bus.storage.streams import endpoint_key
from fluster_bus.storage.tables import sequence_of_ack
from fluster_services.config import LOCAL_TIMING, RecordLimits
from tests.component.controllers import RunningController, job_request
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

FULL, OTHER = Namespace("full"), Namespace("other")
SIZES = shares(MIN_BUDGET_BYTES)
MIB = 1 << 20
_CALL_BYTES = 1_000_000


class Tenants(NamedTuple):
    """A cluster of two namespaces with the smallest budgets."""

    server: EmbeddedServer
    controller: RunningController
    stack: AsyncExitStack

    async def bus(self, role: Role, namespace: Namespace | None = FULL) -> Bus:
        bus = await Bus.connect(self.server.credentials(role, namespace), name="test")
        self.stack.push_async_callback(bus.close)
        return bus

    async def client(self, namespace: Namespace) -> AsyncCluster:
        return await self.stack.enter_async_context(
            await AsyncCluster.connect(self.server.credentials(Role.CLIENT, namespace), namespace)
        )

    async def start_controller(self, controller_id: str) -> RunningController:
        running = RunningController(
            self.server,
            LOCAL_TIMING,
            namespaces=(FULL, OTHER),
            bounds=NamespaceBounds(budget_bytes=MIN_BUDGET_BYTES),
            records=RecordLimits(kept_at_least_s=0, sweep_s=0.05),
            controller_id=controller_id,
        )
        self.stack.push_async_callback(running.stop)
        return await running.start()

    async def check_other(self, controller: RunningController) -> None:
        """The other tenant's jobs are taken, and end; who leads leads."""
        other = await self.client(OTHER)
        job_id = await other.launch(job_request("job"))
        await other.terminate(job_id)
        assert (await other.wait(job_id, timeout=60)).status is JobStatus.KILLED
        assert controller.controller.seat.leads


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(namespaces=(FULL, OTHER)) as server:
        yield server


@pytest.fixture
async def tenants(server: EmbeddedServer) -> AsyncIterator[Tenants]:
    async with AsyncExitStack() as stack:
        unstarted = Tenants(server, RunningController(server, LOCAL_TIMING), stack)
        yield unstarted._replace(controller=await unstarted.start_controller("first"))


def _large(name: str) -> JobRequest:
    return JobRequest(name=name, entrypoint=Entrypoint(pickled=bytes(4 * MIB), python="3.12"))


async def test_jobs_beyond_their_share_are_refused_until_finished_ones_have_gone(tenants: Tenants) -> None:
    full = await tenants.client(FULL)
    taken: list[JobId] = []
    told = ""
    while not told:
        try:
            taken.append(await full.launch(_large(f"large-{len(taken)}")))
        except JobRefusedError as refusal:
            told = str(refusal)
    assert len(taken) == 5  # of 5.4 MiB each, in three fourths of 40 MiB
    assert "namespace 'full' has used up its share of the store for jobs" in told
    assert "of 40 MiB are used" in told
    assert "FLUSTER_NAMESPACE_BUDGET" in told
    await tenants.check_other(tenants.controller)
    # What it has runs on and ends, and when it has ended makes room.
    for job_id in taken:
        await full.terminate(job_id)

    async def is_taken() -> bool:
        try:
            await full.launch(_large("next"))
        except JobRefusedError:
            return False
        return True

    await wait_until_async(is_taken)


async def test_a_job_that_never_fits_is_told_so(tenants: Tenants) -> None:
    full = await tenants.client(FULL)
    request = _large("huge").model_copy(update={"replicas": 10_000})
    await full.launch(request)  # the largest that there can be fits, where there is nothing else
    with pytest.raises(JobRefusedError, match=r"has used up its share of the store for jobs"):
        await full.launch(request)
    await tenants.check_other(tenants.controller)


async def test_where_records_have_filled_all_another_controller_still_takes_the_lead(tenants: Tenants) -> None:
    service = await tenants.bus(Role.SERVICE, None)
    bucket = buckets.jobs_bucket(FULL)
    size, number = MIB, 0
    while size:  # to the last byte
        answer = json.loads((await service.request(buckets.bucket_key(bucket, f"fill-{number}.0"), bytes(size))).data)
        number += 1
        size = size // 2 if "error" in answer else size
    await tenants.controller.stop()
    second = await tenants.start_controller("second-whose-name-is-longer")
    await tenants.check_other(second)


def _write_to(share: str, number: int) -> tuple[str, bytes]:
    """A message that a job or a client of the namespace may store, of the largest size."""
    match share:
        case "registry":
            endpoint = Endpoint(
                endpoint_id=EndpointId(f"e{number}"),
                name="a",
                address="address",
                namespace=FULL,
                metadata={"a": "x" * (60 << 10)},
            )
            key = endpoint_key(endpoint)
            return buckets.bucket_key(buckets.endpoints_bucket(FULL), key), endpoint.to_json()
        case "actors":
            return buckets.bucket_key(buckets.actors_bucket(FULL), f"state.a{number}"), bytes(4 * MIB)
        case "calls":
            return subjects.durable_calls(FULL, f"a{number}"), bytes(_CALL_BYTES)
        case "secrets":
            return subjects.secrets(FULL, f"a{number}"), bytes(MAX_SECRETS_BYTES)
        case kind:
            return subjects.object_part(kind, FULL, "0" * 64, number), bytes(CHUNK_BYTES)


REFUSING = [name for name, share in SHARES.items() if share.refuses and name != "jobs"]
DROPPING = [kind.name for kind in (BUNDLES, PAYLOADS)]


@pytest.mark.parametrize("share", [*REFUSING, *DROPPING])
async def test_what_is_full_refuses_or_drops_its_oldest_and_no_other_tenant_sees_it(
    tenants: Tenants, share: str
) -> None:
    tenant = await tenants.bus(Role.CLIENT if share == "secrets" else Role.JOB)
    refused: NamespaceFullError | None = None
    written = number = 0
    while written < 2 * SIZES[share] and refused is None:
        subject, data = _write_to(share, number)
        try:
            sequence_of_ack(await tenant.request(subject, data), subject)
        except NamespaceFullError as error:
            refused = error
        written, number = written + len(data), number + 1
    state = (await tenants.controller.bus.jetstream.stream_info(stream_of(share, FULL))).state
    assert state.bytes <= SIZES[share]
    if share in DROPPING:
        assert refused is None
        assert state.first_seq > 1
    else:
        assert f"namespace 'full' has used up its share of the store for {share}" in str(refused)
        assert SHARES[share].setting in str(refused)
    await tenants.check_other(tenants.controller)


async def test_the_calls_of_a_tenant_tell_what_is_full(tenants: Tenants) -> None:
    job = await tenants.bus(Role.JOB)
    registry = Registry(job, FULL)

    async def register_all() -> None:
        for number in range(40):
            await registry.register(registry.endpoint(f"e{number}", "address", metadata={"a": "x" * (60 << 10)}))

    async def call_all() -> None:
        for number in range(10):
            await store_call(job, FULL, "a", bytes(_CALL_BYTES), call_id=str(number), reply="")

    with pytest.raises(NamespaceFullError, match="share of the store for registry"):
        await register_all()
    with pytest.raises(NamespaceFullError, match=r"for calls; .* a larger FLUSTER_CALLS_BUDGET or"):
        await call_all()


async def test_what_is_larger_than_a_share_is_refused_before_it_pushes_others_out(tenants: Tenants) -> None:
    job = await tenants.bus(Role.JOB)
    store = ObjectStore(job, FULL, PAYLOADS)
    kept = await store.put(b"kept")
    with pytest.raises(ObjectTooLargeError, match=r"over the limit of 16,515,072: .* FLUSTER_NAMESPACE_BUDGET"):
        await store.put(bytes(17 * MIB))
    assert await store.get(kept) == b"kept"
    largest = bytes(16_515_072)
    assert await store.get(await store.put(largest)) == largest
