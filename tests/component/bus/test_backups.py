"""Backups of a server's streams: what comes back, what is refused, and what is left when it ends in the middle."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fluster.cluster.client import AsyncCluster
from fluster_bus.access.address import BusAddress
from fluster_bus.backups.contents import MANIFEST_FILE, data_file, read_manifest
from fluster_bus.backups.lead import RestoringLead
from fluster_bus.backups.making import BackupProgress, make_backup, stream_names
from fluster_bus.backups.restoring import restore_backup
from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets, server_subjects, subjects
from fluster_bus.core.errors import BackupError, BusError, CredentialsError, NoRespondersError
from fluster_bus.core.roles import Role
from fluster_bus.core.stream_bounds import PAYLOADS
from fluster_bus.messages import JobId, JobRecord, Namespace, WorkerId
from fluster_bus.messages.records import Replacement
from fluster_bus.running.coroutines import retried
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.objects import ObjectStore
from fluster_bus.storage.provisioning import ensure_namespaces, ensure_system
from fluster_bus.storage.replication import Replication
from fluster_bus.storage.streams import jobs_table, leaders_table, records_table, tasks_table
from fluster_services.config import LOCAL_TIMING
from fluster_services.controller.controller import Controller, ControllerConfig
from fluster_services.controller.leading.seat import RestoringError
from fluster_services.job_lifecycle import new_job, new_tasks
from tests.component.conftest import ConnectBus
from tests.component.controllers import (
    IMPATIENT,
    RunningController,
    S,
    StartController,
    StartWorker,
    check_events,
    job_request,
)
from tests.component.guarded_server import KINDS, guarded_server
from tests.component.toy_worker import ToyWorker
from tests.server_group import group_of_servers
from tests.system.small_disks import mounted
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

NS = Namespace("default")
OTHER = Namespace("other")
ALIVE = {"KV_fluster_workers", "KV_fluster_controllers"}


@pytest.fixture
async def servers() -> AsyncIterator[tuple[Bus, Bus]]:
    """One that has been used, and an empty one."""
    with EmbeddedServer(namespaces=(NS, OTHER)) as used, EmbeddedServer(namespaces=(NS, OTHER)) as empty:
        buses = [await Bus.connect(each.credentials(Role.OPERATOR), name="test") for each in (used, empty)]
        try:
            await ensure_system(buses[0])
            await ensure_namespaces(buses[0], (NS, OTHER))
            yield buses[0], buses[1]
        finally:
            for bus in buses:
                await bus.close()


async def _use(bus: Bus) -> None:
    """Write into each stream: keys anew and removed, headers, empty and large messages."""
    for number in range(40):
        await bus.request(buckets.bucket_key(buckets.jobs_bucket(NS), f"job.{number % 8}"), b"record %d" % number)
    await bus.request(
        buckets.bucket_key(buckets.jobs_bucket(NS), "job.3"), headers={"KV-Operation": "DEL", "Fluster-Reason": "old"}
    )
    for number in range(5):
        await bus.request(subjects.events(NS, JobId("job")), b"e" * number, headers={"Nats-Msg-Id": f"job.{number}"})
        await bus.request(subjects.result_part(NS, "job", 0, 1, number), os.urandom(300_000))
        await bus.request(subjects.secrets(OTHER, f"s{number}"), b"\0secret")
        await bus.request(subjects.jobs_submit(OTHER), json.dumps({"name": f"n{number}"}).encode())
        await bus.request(subjects.durable_calls(NS, "ledger"), b"call", headers={"Nats-Msg-Id": f"c{number}"})
        await bus.request(buckets.bucket_key(buckets.actors_bucket(NS), "handled.ledger"), b"%d" % number)
    await ObjectStore(bus, NS, PAYLOADS).put(os.urandom(3 << 20))


async def _messages(bus: Bus, stream: str) -> list[dict[str, Any]]:
    """All that the server has of a stream, as it is stored."""
    found: list[dict[str, Any]] = []
    while True:
        request = {"seq": found[-1]["seq"] + 1 if found else 1, "next_by_subj": ">"}
        told = json.loads((await bus.request(server_subjects.message_get(stream), json.dumps(request).encode())).data)
        if "error" in told:
            return found
        found.append(told["message"])


async def test_each_message_comes_back_as_it_was_and_no_revision_is_given_twice(
    servers: tuple[Bus, Bus], tmp_path: Path
) -> None:
    used, empty = servers
    await _use(used)
    manifest = await make_backup(used, tmp_path / "backup")
    await restore_backup(empty, tmp_path / "backup")
    names = set(await stream_names(used))
    assert {each.stream for each in manifest.streams} == names - ALIVE
    for name in sorted(names - ALIVE):
        assert await _messages(empty, name) == await _messages(used, name), name
    # A writer that holds a revision from after the backup changes nothing, and what is written now is newer than any.
    table, key = buckets.jobs_bucket(NS), "job.2"
    newer = json.loads((await used.request(buckets.bucket_key(table, key), b"later")).data)["seq"]
    acks = [
        json.loads((await empty.request(buckets.bucket_key(table, key), b"now", headers=headers)).data)
        for headers in ({"Nats-Expected-Last-Subject-Sequence": str(revision)} for revision in (newer, 35))
    ]
    assert [ack.get("error", {}).get("err_code") for ack in acks] == [10_071, None]
    assert acks[1]["seq"] == 1_000_000_001


async def test_what_is_written_meanwhile_is_there_as_it_was_at_one_moment(
    servers: tuple[Bus, Bus], tmp_path: Path
) -> None:
    used, empty = servers
    bucket, keys = buckets.jobs_bucket(NS), 2_000
    for number in range(keys):
        await used.publish(buckets.bucket_key(bucket, f"k{number}"), b"0")
    await used.flush()
    is_over = asyncio.Event()

    async def write() -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            for key in ("first", f"k{random.randrange(keys)}", "second"):
                await used.request(buckets.bucket_key(bucket, key), b"%d" % number)

    writing = asyncio.create_task(write())
    seen: set[int] = set()

    async def count() -> bool:
        seen.add(await _value(used, bucket, "second"))
        return len(seen) > 3

    await wait_until_async(count)
    await make_backup(used, tmp_path / "backup")
    is_over.set()
    await writing
    await restore_backup(empty, tmp_path / "backup")
    told = json.loads((await empty.request(server_subjects.stream_info(buckets.bucket_stream(bucket)))).data)
    assert told["state"]["num_subjects"] == keys + 2  # a server's own snapshot lacks those that move meanwhile
    first, second = await _value(empty, bucket, "first"), await _value(empty, bucket, "second")
    assert first - second in {0, 1}
    assert max(seen) <= second <= await _value(used, bucket, "second")


async def _value(bus: Bus, bucket: str, key: str) -> int:
    where = f"{server_subjects.direct_get(buckets.bucket_stream(bucket))}.{buckets.bucket_key(bucket, key)}"
    return int((await bus.request(where)).data or 0)


def _names(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()]


def _open_to_others(folder: Path) -> list[Path]:
    return [file for file in (folder, *folder.rglob("*")) if file.stat().st_mode & 0o077]


async def test_a_backup_is_private_and_says_what_it_has(servers: tuple[Bus, Bus], tmp_path: Path) -> None:
    used, _ = servers
    await _use(used)
    told: list[BackupProgress] = []
    made = await make_backup(used, tmp_path / "backup", on_progress=told.append)
    assert _open_to_others(tmp_path / "backup") == []
    assert _names(tmp_path) == ["backup"]
    assert read_manifest(tmp_path / "backup") == made
    (records,) = [each for each in made.streams if (each.kind, each.namespace) == ("jobs", NS)]
    assert (records.messages, records.last, records.goes_on_after) == (8, 41, 1_000_000_000)
    assert [each.done for each in told] == sorted(each.done for each in told)
    assert 0.9 * told[-1].total < told[-1].done <= told[-1].total
    # What the plain `nats` command wants to know.
    restorable = json.loads((tmp_path / "backup" / records.stream / "backup.json").read_text())
    assert restorable["config"]["name"] == records.stream
    assert restorable["state"]["messages"] == 8


@pytest.mark.parametrize("harm", ["data", "missing", "manifest", "none", "format"])
async def test_a_damaged_backup_is_refused_before_anything_is_changed(
    servers: tuple[Bus, Bus], tmp_path: Path, harm: str
) -> None:
    used, _ = servers
    folder = tmp_path / "backup"
    await _use(used)
    await make_backup(used, folder)
    data, manifest = data_file(folder, buckets.results_stream(NS)), folder / MANIFEST_FILE
    if harm == "data":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif harm == "missing":
        data.unlink()
    elif harm == "manifest":
        manifest.write_text(manifest.read_text()[:500])
    elif harm == "none":
        manifest.unlink()
    else:
        manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    before = await _messages(used, buckets.bucket_stream(buckets.jobs_bucket(NS)))
    with pytest.raises(BackupError, match=r"is damaged|cannot be read|is not a backup|has format 2"):
        await restore_backup(used, folder, replace=True)
    assert await _messages(used, buckets.bucket_stream(buckets.jobs_bucket(NS))) == before


async def test_what_is_there_is_replaced_only_where_that_is_said(servers: tuple[Bus, Bus], tmp_path: Path) -> None:
    used, empty = servers
    await _use(used)
    await make_backup(used, tmp_path / "backup")
    await restore_backup(empty, tmp_path / "backup")
    key = buckets.bucket_key(buckets.jobs_bucket(NS), "job.9")
    await empty.request(key, b"since then")
    with pytest.raises(BackupError, match=r"the cluster is not empty: stream \S+ has \d+ messages; give --replace"):
        await restore_backup(empty, tmp_path / "backup")
    stream = buckets.bucket_stream(buckets.jobs_bucket(NS))
    assert len(await _messages(empty, stream)) == 9
    await ensure_namespaces(empty, (Namespace("newer"),))
    await restore_backup(empty, tmp_path / "backup", replace=True)
    assert await _messages(empty, stream) == await _messages(used, stream)
    assert not [name for name in await stream_names(empty) if "newer" in name]


async def test_nothing_is_left_of_a_backup_that_ends_in_the_middle(servers: tuple[Bus, Bus], tmp_path: Path) -> None:
    used, _ = servers
    await _use(used)

    def stop(_progress: BackupProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await make_backup(used, tmp_path / "backup", on_progress=stop)
    assert _names(tmp_path) == []
    # One that was killed leaves its draft, which is not taken for a backup.
    draft = tmp_path / ".backup.partial"
    (draft / "KV_old").mkdir(parents=True)
    (draft / "manifest.json").write_text("{")
    await make_backup(used, tmp_path / "backup")
    assert _names(tmp_path) == ["backup"]
    assert not (tmp_path / "backup" / "KV_old").exists()
    with pytest.raises(BackupError, match="is there already"):
        await make_backup(used, tmp_path / "backup")


async def test_a_full_disk_is_told_and_nothing_is_left(servers: tuple[Bus, Bus], tmp_path: Path) -> None:
    used, _ = servers
    await _use(used)  # of which 4.5 MB cannot be made smaller
    with mounted(tmp_path / "disk", megabytes=2) as disk:
        with pytest.raises(BackupError, match="No space left on device; nothing of it is left: make room"):
            await make_backup(used, disk / "backup")
        assert _names(disk) == []


async def test_only_operators_make_backups(tmp_path: Path) -> None:
    with EmbeddedServer() as server:
        for role, namespace in ((Role.CLIENT, NS), (Role.JOB, NS), (Role.WORKER, None), (Role.GATEWAY, None)):
            async with _connected(server.credentials(role, namespace)) as bus:
                with pytest.raises(CredentialsError, match="may not send to"):
                    await make_backup(bus, tmp_path / "backup")
    assert _names(tmp_path) == []


@pytest.mark.parametrize("kind", KINDS)
async def test_an_operator_restores_by_password_and_by_token(tmp_path: Path, kind: str) -> None:
    with guarded_server(kind, (NS, OTHER), tmp_path) as server:
        async with _connected(server.credentials(Role.OPERATOR)) as bus:
            await ensure_system(bus)
            await ensure_namespaces(bus, (NS, OTHER))
            await _use(bus)
            await make_backup(bus, tmp_path / "backup")
            await restore_backup(bus, tmp_path / "backup", replace=True)
            assert len(await _messages(bus, buckets.results_stream(NS))) == 5


async def test_controllers_wait_while_a_store_is_restored_and_lead_what_is_there_then(
    own_server: EmbeddedServer, connect_bus: ConnectBus, tmp_path: Path
) -> None:
    operator = await connect_bus(own_server)
    # As its supervisor does, which starts another when it ends.
    leading = asyncio.create_task(_led(own_server))
    cluster = await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS))
    kept = await cluster.launch(job_request("kept"))
    await make_backup(operator, tmp_path / "backup")
    lost = await cluster.launch(job_request("lost"))

    def stop(progress: BackupProgress) -> None:
        if progress.done > progress.total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await restore_backup(operator, tmp_path / "backup", replace=True, on_progress=stop)
    await asyncio.wait([leading], timeout=60)
    (error,) = _flat(leading.exception())
    assert isinstance(error, RestoringError)
    # What is there is no cluster to lead, so no controller does.
    leading = asyncio.create_task(_led(own_server))
    with pytest.raises(NoRespondersError):
        await operator.request(subjects.ensure_namespace(NS))
    await restore_backup(operator, tmp_path / "backup", replace=True)
    assert [info.job_id for info in await cluster.list_jobs()] == [kept]
    again = await cluster.launch(job_request("again"))
    row = await jobs_table(operator, NS).get(again)
    assert row is not None
    assert row.value.order == 1_000_000_001
    assert lost not in {info.job_id for info in await cluster.list_jobs()}
    await cluster.close()
    leading.cancel()
    await asyncio.gather(leading, return_exceptions=True)


async def _led(server: EmbeddedServer) -> None:
    """One run of a controller."""
    address = server.credentials(Role.SERVICE)
    bus = await Bus.connect(address, name="controller")
    try:
        await Controller(bus, ControllerConfig(address=address, timing=LOCAL_TIMING)).run(lambda: None)
    finally:
        await bus.close()


def _flat(error: BaseException | None) -> list[BaseException | None]:
    return (
        [each for one in error.exceptions for each in _flat(one)] if isinstance(error, BaseExceptionGroup) else [error]
    )


async def test_two_do_not_restore_at_once(own_server: EmbeddedServer, connect_bus: ConnectBus) -> None:
    one, other = await connect_bus(own_server), await connect_bus(own_server)
    lead = await RestoringLead.take(one)
    with pytest.raises(BackupError, match="is being restored at this moment"):
        await RestoringLead.take(other)
    await lead.end(is_whole=False)  # as one that was killed
    lead = await RestoringLead.take(other)
    assert lead.found_half
    await lead.end(is_whole=True)
    assert await leaders_table(one).get(buckets.LEADER_KEY) is None


async def test_one_that_is_refused_leaves_half_a_store_to_nobody(servers: tuple[Bus, Bus], tmp_path: Path) -> None:
    used, _ = servers
    await _use(used)
    await make_backup(used, tmp_path / "backup")
    for is_half in (False, True):
        if is_half:
            await (await RestoringLead.take(used)).end(is_whole=False)
        with pytest.raises(BackupError, match="give --replace"):
            await restore_backup(used, tmp_path / "backup")
        seat = await leaders_table(used).get(buckets.LEADER_KEY)
        assert (seat is not None and seat.value.restoring) is is_half


async def test_what_was_begun_for_a_submission_that_the_backup_lacks_is_completed(
    own_server: EmbeddedServer, start_controller: StartController, start_worker: StartWorker, connect_bus: ConnectBus
) -> None:
    bus = await connect_bus(own_server)
    await ensure_system(bus)
    await ensure_namespaces(bus, (NS,))
    jobs = jobs_table(bus, NS)
    # Recorded, but without its task; and ended, but marked to be replaced.
    begun = new_job(NS, JobId("begun"), job_request("begun"), order=7, now=time.time())
    ended = new_job(NS, JobId("ended"), job_request("ended"), order=8, now=time.time())
    tasks = new_tasks(ended)
    await jobs.create("begun", begun)
    await jobs.create("ended", ended.model_copy(update={"replacement": Replacement(order=9)}))
    for task in tasks:
        await tasks_table(bus, NS).create(buckets.task_key("ended", task.task), task)
    await start_controller()
    await start_worker()
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        infos = await cluster.wait([begun.job_id, ended.job_id], timeout=60)
        assert [info.status for info in infos] == [S, S]


async def test_a_busy_cluster_goes_on_from_its_backup_as_if_it_had_stopped_there(
    own_server: EmbeddedServer,
    start_controller: StartController,
    start_worker: StartWorker,
    connect_bus: ConnectBus,
    tmp_path: Path,
) -> None:
    await start_controller(IMPATIENT)
    await start_worker("w1")
    launched: list[JobId] = []
    is_over = asyncio.Event()

    async def launch() -> None:
        async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
            while not is_over.is_set():
                launched.extend(await cluster.launch_many([job_request("job", replicas=2) for _ in range(5)]))
                await cluster.wait(launched[-15:-10])

    launching = asyncio.create_task(launch())
    operator = await connect_bus(own_server)

    async def is_busy() -> bool:
        return sum(each.state.finished() for each in await _jobs(operator)) > 10

    await wait_until_async(is_busy)
    acknowledged = set(launched)
    await make_backup(operator, tmp_path / "backup")
    is_over.set()
    await launching
    with EmbeddedServer() as server:
        restored = await connect_bus(server)
        await restore_backup(restored, tmp_path / "backup")
        ended = {each.job_id for each in await _jobs(restored) if each.state.finished()}
        controller = await RunningController(server, IMPATIENT).start()
        bus = await connect_bus(server, Role.SERVICE, name="w2")
        worker = await ToyWorker(bus, WorkerId("w2"), heartbeat_s=0.1).start()

        async def have_ended() -> bool:
            jobs = await _jobs(restored)
            return acknowledged <= {each.job_id for each in jobs} and all(each.state is S for each in jobs)

        await wait_until_async(have_ended)
        jobs = [each.job_id for each in await _jobs(restored)]
        assert set(jobs) <= set(launched)
        assert not [key for key in worker.starts if key.split(".")[1] in ended]
        assert len(worker.starts) == len(set(worker.starts))
        await check_events(restored, jobs)
        await controller.stop()


async def _jobs(bus: Bus) -> list[JobRecord]:
    rows = await records_table(bus, NS).rows()
    return [row.value for row in rows if isinstance(row.value, JobRecord)]


@pytest.mark.slow
async def test_a_group_of_servers_is_restored_on_one_and_one_on_a_group(tmp_path: Path) -> None:
    bucket = buckets.jobs_bucket(NS)
    (tmp_path / "group").mkdir()
    async with AsyncExitStack() as stack:
        group = stack.enter_context(group_of_servers(tmp_path / "group"))
        server = stack.enter_context(EmbeddedServer(tmp_path / "one"))
        operator = await stack.enter_async_context(_connected(group.address(0, Role.OPERATOR)))
        one = await stack.enter_async_context(_connected(server.credentials(Role.OPERATOR)))
        await retried(lambda _left_s: ensure_system(operator, Replication(3)), on=(BusError,), timeout_s=60)
        await ensure_namespaces(operator, (NS,), replication=Replication(3))
        is_over = asyncio.Event()

        async def write() -> None:
            number = 0
            while not is_over.is_set():
                number += 1
                for key in ("first", f"k{number % 500}", "second"):
                    await operator.request(buckets.bucket_key(bucket, key), b"%d" % number)

        async def are_many() -> bool:
            return await _value(operator, bucket, "second") > 500

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(write())
            await wait_until_async(are_many)
            await make_backup(operator, tmp_path / "backup")
            is_over.set()
        await restore_backup(one, tmp_path / "backup")
        told = json.loads((await one.request(server_subjects.stream_info(buckets.bucket_stream(bucket)))).data)
        assert (told["state"]["num_subjects"], told["config"]["num_replicas"]) == (502, 1)
        assert await _value(one, bucket, "first") - await _value(one, bucket, "second") in {0, 1}
        await restore_backup(operator, tmp_path / "backup", replace=True)
        told = json.loads((await operator.request(server_subjects.stream_info(buckets.bucket_stream(bucket)))).data)
        assert (told["state"]["num_subjects"], told["config"]["num_replicas"]) == (502, 3)


@asynccontextmanager
async def _connected(address: BusAddress) -> AsyncIterator[Bus]:
    """A connection to a server that may be starting."""
    bus = await retried(lambda _left_s: Bus.connect(address, name="test"), on=(BusError,), timeout_s=30)
    try:
        yield bus
    finally:
        await bus.close()
