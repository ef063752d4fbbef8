"""Results in their stream: written by workers, read by the namespace's tenants."""

from __future__ import annotations

import os

import pytest

from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets
from fluster_bus.core.errors import ObjectCorruptError, ObjectNotFoundError, StorageError
from fluster_bus.core.roles import DEFAULT_NAMESPACE, Role
from fluster_bus.messages import Namespace
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.provisioning import ensure_namespace
from fluster_bus.storage.stored_messages import RESULT_CHUNK_BYTES, ResultStore
from tests.component.conftest import ConnectBus

pytestmark = pytest.mark.anyio


def _chunks(data: bytes) -> list[bytes]:
    return [data[start : start + RESULT_CHUNK_BYTES] for start in range(0, len(data), RESULT_CHUNK_BYTES)]


@pytest.mark.parametrize("size", [1, RESULT_CHUNK_BYTES, 9 * RESULT_CHUNK_BYTES + 7])
async def test_what_a_worker_puts_tenants_get(
    shared_server: EmbeddedServer, connect_bus: ConnectBus, size: int
) -> None:
    service = await connect_bus(shared_server, Role.SERVICE)
    await ensure_namespace(service, DEFAULT_NAMESPACE)
    worker = ResultStore(service, DEFAULT_NAMESPACE)
    data = os.urandom(size)
    for _ in range(2):  # a worker that died in between leaves it to its successor
        await worker.put("job", 1, 2, _chunks(data))
    for role in (Role.CLIENT, Role.JOB):
        reader = ResultStore(await connect_bus(shared_server, role, DEFAULT_NAMESPACE), DEFAULT_NAMESPACE)
        assert await reader.get("job", 1, 2, size) == data


async def test_what_is_gone_or_cut_is_no_result(bus: Bus, namespace: Namespace) -> None:
    store = ResultStore(bus, namespace)
    with pytest.raises(ObjectNotFoundError, match="kept for 7 days"):
        await store.get("job", 0, 1, 10)
    await store.put("job", 0, 1, [b"12345"])
    with pytest.raises(ObjectCorruptError, match="5 bytes, not the 10"):
        await store.get("job", 0, 1, 10)


async def test_without_the_namespace_it_says_so(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluster_bus.storage.stored_messages._PATIENCE_S", 0.1)
    with pytest.raises(StorageError, match=r"fluster\.nowhere\.results"):
        await ResultStore(bus, "nowhere").put("job", 0, 1, [b"1"])


async def test_old_results_make_room_for_new_ones(bus: Bus, namespace: Namespace) -> None:
    config = (await bus.jetstream.stream_info(buckets.results_stream(namespace))).config
    assert config.max_age == 7 * 86_400
    assert config.max_bytes == 1 << 30
