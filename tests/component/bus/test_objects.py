"""Files by what they hold, with the rights that jobs and workers have."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path

import pytest
from nats.js import JetStreamContext

from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets, subjects
from fluster_bus.core.errors import (
    CredentialsError,
    ObjectCorruptError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    StorageError,
)
from fluster_bus.core.names import unique_name
from fluster_bus.core.roles import DEFAULT_NAMESPACE, Role
from fluster_bus.core.stream_bounds import BUNDLES, PAYLOADS
from fluster_bus.messages import Namespace
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.objects import CHUNK_BYTES, MAX_OBJECT_BYTES, ObjectStore
from fluster_bus.storage.provisioning import ensure_namespace
from tests.component.conftest import ConnectBus

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store(bus: Bus) -> ObjectStore:
    """The store of the namespace for which the server knows users."""
    await ensure_namespace(bus, DEFAULT_NAMESPACE)
    return ObjectStore(bus, DEFAULT_NAMESPACE)


def jetstream(store: ObjectStore) -> JetStreamContext:
    assert isinstance(store.bus, Bus)
    return store.bus.jetstream


async def _count(store: ObjectStore) -> int:
    info = await jetstream(store).stream_info(buckets.objects_stream(BUNDLES.name, store.namespace))
    return info.state.messages


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 11 * CHUNK_BYTES + 7])
@pytest.mark.usefixtures("store")
async def test_what_a_tenant_puts_a_worker_gets(
    shared_server: EmbeddedServer, connect_bus: ConnectBus, tmp_path: Path, size: int
) -> None:
    data = os.urandom(size)
    job, client = [
        ObjectStore(await connect_bus(shared_server, role, DEFAULT_NAMESPACE), DEFAULT_NAMESPACE)
        for role in (Role.JOB, Role.CLIENT)
    ]
    sha256 = await job.put_file(io.BytesIO(data))
    assert sha256 == hashlib.sha256(data).hexdigest()
    worker = ObjectStore(await connect_bus(shared_server, Role.SERVICE), DEFAULT_NAMESPACE)
    for number, reader in enumerate((worker, client, job)):
        path = tmp_path / str(number)
        await reader.get_file(sha256, path)
        assert path.read_bytes() == data


@pytest.mark.parametrize("size", [100, CHUNK_BYTES + 1, 11 * CHUNK_BYTES + 7])
async def test_payloads_are_apart_from_bundles(store: ObjectStore, size: int) -> None:
    data = os.urandom(size)
    payloads = ObjectStore(store.bus, store.namespace, PAYLOADS)
    sha256 = await payloads.put(data)
    assert await payloads.get(sha256) == data
    with pytest.raises(ObjectNotFoundError, match="kept for 7 days"):
        await store.get(sha256)
    with pytest.raises(ObjectNotFoundError, match="kept for 4 hours"):
        await payloads.get("0" * 64)
    await store.bus.request(subjects.object_part(PAYLOADS.name, store.namespace, sha256, 0), b"x")
    with pytest.raises(ObjectCorruptError, match=sha256):
        await payloads.get(sha256)


async def test_the_same_is_stored_once(store: ObjectStore) -> None:
    data = os.urandom(3 * CHUNK_BYTES)
    sha256 = await store.put(data)
    stored = await _count(store)
    info = await jetstream(store).stream_info(buckets.objects_stream(BUNDLES.name, store.namespace))
    assert await store.put(data) == await store.put_file(io.BytesIO(data)) == sha256
    again = await jetstream(store).stream_info(buckets.objects_stream(BUNDLES.name, store.namespace))
    assert await _count(store) == stored
    assert again.state.last_seq == info.state.last_seq, "nothing was sent"


async def test_what_lost_a_chunk_is_stored_anew(store: ObjectStore, tmp_path: Path) -> None:
    """As when newer objects took its room: the oldest messages go first."""
    data = os.urandom(3 * CHUNK_BYTES)
    sha256 = await store.put(data)
    stream = buckets.objects_stream(BUNDLES.name, store.namespace)
    config = (await jetstream(store).stream_info(stream)).config
    await jetstream(store).update_stream(config.evolve(max_msgs=2))
    with pytest.raises(ObjectNotFoundError, match="newer ones take their room"):
        await store.get_file(sha256, tmp_path / "gone")
    await jetstream(store).update_stream(config)
    await store.put(data)
    await store.get_file(sha256, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data


@pytest.mark.parametrize("forged", [b"", b"x", b"x" * CHUNK_BYTES])
async def test_what_was_written_over_is_not_handed_out(store: ObjectStore, tmp_path: Path, forged: bytes) -> None:
    sha256 = await store.put(os.urandom(CHUNK_BYTES + 100))
    await store.bus.request(subjects.object_part(BUNDLES.name, store.namespace, sha256, 1), forged)
    with pytest.raises(ObjectCorruptError, match=sha256):
        await store.get_file(sha256, tmp_path / "file")
    assert not (tmp_path / "file").exists()


async def test_sizes_are_bounded(store: ObjectStore, tmp_path: Path) -> None:
    sha256 = await store.put(b"x" * 1_000)
    with pytest.raises(ObjectTooLargeError, match="1,000 bytes, over the limit of 999"):
        await store.get_file(sha256, tmp_path / "file", max_bytes=999)
    await store.get_file(sha256, tmp_path / "file", max_bytes=1_000)
    with (tmp_path / "sparse").open("w+b") as file:
        file.truncate(MAX_OBJECT_BYTES + 1)
        with pytest.raises(ObjectTooLargeError, match="over the limit of 536,870,912"):
            await store.put_file(file)


async def test_what_is_not_there_is_said_to_be_missing(
    store: ObjectStore, bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ObjectNotFoundError, match="kept for 7 days"):
        await store.get_file("0" * 64, tmp_path / "file")
    nowhere = ObjectStore(bus, Namespace(unique_name("nowhere")))
    monkeypatch.setattr("fluster_bus.storage.stored_messages._PATIENCE_S", 0.1)
    with pytest.raises(StorageError, match="does not exist"):
        await nowhere.get_file("0" * 64, tmp_path / "file")
    with pytest.raises(StorageError, match="does the namespace exist"):
        await nowhere._messages.append(subjects.object_part(BUNDLES.name, nowhere.namespace, "0" * 64, 0), b"")  # noqa: SLF001 - a part alone, as an upload stores it


async def test_another_namespace_is_out_of_reach(
    shared_server: EmbeddedServer, connect_bus: ConnectBus, store: ObjectStore, namespace: Namespace, tmp_path: Path
) -> None:
    job = await connect_bus(shared_server, Role.JOB, DEFAULT_NAMESPACE)
    theirs = ObjectStore(job, namespace)
    with pytest.raises(CredentialsError):
        await theirs.put(b"x")
    with pytest.raises(CredentialsError):
        await theirs.get_file("0" * 64, tmp_path / "file")
