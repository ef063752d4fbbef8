"""Namespaces that come and go while controllers run, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from fluster.cluster.client import AsyncCluster
from fluster.cluster.namespaces import NamespaceAdmin
from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.core.errors import BusError, ServiceError
from fluster_bus.core.roles import Role
from fluster_bus.core.stream_bounds import MIN_BUDGET_BYTES, SHARES, SYSTEM_BYTES, stream_of
from fluster_bus.messages import JobStatus, Namespace, NamespaceQuota, NamespaceRecord, NamespaceState
from fluster_bus.running.coroutines import retried
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage import provisioning
from fluster_bus.storage.streams import namespaces_table, records_table
from fluster_bus.storage.tables import Row
from tests.component.conftest import ConnectBus
from tests.component.controllers import IMPATIENT, NS, RunningController, StartWorker, job_request
from tests.component.toy_worker import STAY_RUNNING
from tests.component.worker.test_log_pump import Attempt, pump
from tests.server_group import ServerGroup, group_of_servers
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

TEAM = Namespace("team-a")
ADDING, ACTIVE, DROPPING, DELETING = NamespaceState


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    """It lets users of both namespaces in; which there are is up to its controllers."""
    with EmbeddedServer(namespaces=(NS, TEAM)) as server:
        yield server


@pytest.fixture
async def operator(own_server: EmbeddedServer, connect_bus: ConnectBus) -> Bus:
    return await connect_bus(own_server)


@pytest.fixture
def admin(operator: Bus) -> NamespaceAdmin:
    return NamespaceAdmin(operator)


class Controllers:
    """Starts controllers, and ends those that are left."""

    def __init__(self, server: EmbeddedServer, stack: AsyncExitStack) -> None:
        self._server = server
        self._stack = stack

    async def start(self, name: str = "controller", namespaces: tuple[Namespace, ...] = (NS,)) -> RunningController:
        running = RunningController(self._server, IMPATIENT, namespaces, controller_id=name)
        self._stack.push_async_callback(running.stop)
        return await running.start()


@pytest.fixture
async def controllers(own_server: EmbeddedServer) -> AsyncIterator[Controllers]:
    async with AsyncExitStack() as stack:
        yield Controllers(own_server, stack)


async def _client(server: EmbeddedServer) -> AsyncCluster:
    return await AsyncCluster.connect(server.credentials(Role.CLIENT, TEAM), TEAM)


async def _streams(bus: Bus, namespace: str) -> list[str]:
    names = {each.config.name for each in await bus.jetstream.streams_info()}
    return [name for name in (stream_of(share, namespace) for share in SHARES) if name in names]


async def _names(admin: NamespaceAdmin) -> list[str]:
    return [each.record.name for each in await admin.list()]


async def _runs_a_job(server: EmbeddedServer) -> JobStatus:
    async with await _client(server) as cluster:
        job = await cluster.launch(job_request())
        await cluster.wait(job)
        return (await cluster.poll(job)).status


async def test_a_namespace_is_added_used_and_dropped_on_a_running_cluster(
    controllers: Controllers,
    own_server: EmbeddedServer,
    operator: Bus,
    admin: NamespaceAdmin,
    start_worker: StartWorker,
) -> None:
    controller = await controllers.start()
    sizes = {each.config.name: each.config.max_bytes for each in await operator.jetstream.streams_info()}
    added = await admin.add(TEAM, NamespaceQuota(waiting_jobs=5), weight=2.0)
    assert (added.state, added.quota.waiting_jobs, added.weight) == (ACTIVE, 5, 2.0)
    assert len(await _streams(operator, TEAM)) == len(SHARES)
    await start_worker("of-team", namespaces=(TEAM,))
    assert await _runs_a_job(own_server) is JobStatus.SUCCEEDED
    (default, team) = await admin.list()
    assert (default.record.name, team.record.name) == (NS, TEAM)
    assert team.store_used > 0
    assert team.store_share > 64 << 20
    await admin.drop(TEAM)
    assert await _names(admin) == [NS]
    assert await _streams(operator, TEAM) == []
    assert controller.controller.job_index.keys_of(TEAM) == []
    # The others have its room again, as soon as the leader has seen to it.
    await wait_until_async(lambda: _have_sizes(operator, sizes))
    again = await admin.add(TEAM)  # and it is empty
    assert (again.quota, again.weight) == (NamespaceQuota(), 1.0)
    async with await _client(own_server) as cluster:
        assert await cluster.list_jobs() == []


async def _have_sizes(bus: Bus, sizes: dict[Any, Any]) -> bool:
    return {each.config.name: each.config.max_bytes for each in await bus.jetstream.streams_info()} == sizes


class _LateUsers:
    """A server that lets users of a namespace in when it is asked for the third time."""

    def __init__(self) -> None:
        self.said: list[str] = []

    async def let_in(self, namespace: str, /) -> bool:
        self.said.append(f"add {namespace}")
        return self.said.count(f"add {namespace}") == 3

    def forget(self, namespace: str, /) -> None:
        self.said.append(f"forget {namespace}")


async def test_a_namespace_is_made_once_the_server_lets_its_users_in(
    own_server: EmbeddedServer, admin: NamespaceAdmin
) -> None:
    users = _LateUsers()
    running = await RunningController(own_server, IMPATIENT, server_users=users).start()
    try:
        assert (await admin.add(TEAM)).state is ACTIVE
        assert users.said == [f"add {TEAM}"] * 3
        await admin.drop(TEAM)
        assert users.said[3:] == [f"forget {TEAM}"]
    finally:
        await running.stop()


async def test_where_namespaces_are_fixed_adding_one_is_refused_with_the_reason(
    own_server: EmbeddedServer, admin: NamespaceAdmin
) -> None:
    running = await RunningController(own_server, IMPATIENT, namespaces_are_fixed="they are; start another").start()
    try:
        with pytest.raises(ServiceError, match="namespace 'team-a' cannot be added: they are; start another"):
            await admin.add(TEAM)
        assert await _names(admin) == [NS]
    finally:
        await running.stop()


async def test_of_two_who_add_one_namespace_at_once_one_does(controllers: Controllers, admin: NamespaceAdmin) -> None:
    await controllers.start()
    outcomes = await asyncio.gather(*(admin.add(TEAM) for _ in range(2)), return_exceptions=True)
    (refused,) = [each for each in outcomes if isinstance(each, BaseException)]
    assert isinstance(refused, ServiceError)
    assert "there is a namespace 'team-a' already" in str(refused)
    assert await _names(admin) == [NS, TEAM]


async def test_changes_at_once_are_all_kept(controllers: Controllers, admin: NamespaceAdmin, operator: Bus) -> None:
    await controllers.start()
    others = NamespaceAdmin(operator)
    await asyncio.gather(
        admin.set(NS, {"cpus": 4}),
        others.set(NS, {"gpus": 2}),
        admin.set(NS, {}, weight=3.0),
        others.set(NS, {"memory": 8}),
    )
    (status,) = await admin.list()
    assert status.record.quota == NamespaceQuota(cpus=4, gpus=2, memory=8)
    assert status.record.weight == 3.0
    assert (await admin.set(NS, {"cpus": None})).quota == NamespaceQuota(gpus=2, memory=8)
    with pytest.raises(ServiceError, match=r"cpus of namespace 'default' cannot be -1"):
        await admin.set(NS, {"cpus": -1})
    with pytest.raises(ServiceError, match="no namespace 'team-a': `fluster namespace ls`"):
        await admin.set(TEAM, {"cpus": 1})


async def test_a_namespace_for_which_there_is_no_room_is_refused_and_nothing_of_it_is_left() -> None:
    room = SYSTEM_BYTES + MIN_BUDGET_BYTES * 3 // 2
    with EmbeddedServer(namespaces=(NS, TEAM), store_limit_bytes=room) as server:
        running = await RunningController(server, IMPATIENT).start()
        bus = await Bus.connect(server.credentials(Role.OPERATOR), name="operator")
        try:
            before = {each.config.name: each.config.max_bytes for each in await bus.jetstream.streams_info()}
            admin = NamespaceAdmin(bus)
            with pytest.raises(ServiceError, match=r"cannot be added: .*no room for 2 namespaces"):
                await admin.add(TEAM)
            await wait_until_async(lambda: _have_sizes(bus, before))
            assert await _names(admin) == [NS]
            with pytest.raises(ServiceError, match="no room for 2 namespaces"):
                await admin.add(TEAM)  # tried anew, with the same outcome
        finally:
            await bus.close()
            await running.stop()


async def test_a_namespace_with_unfinished_jobs_is_dropped_only_by_force(
    controllers: Controllers,
    own_server: EmbeddedServer,
    operator: Bus,
    admin: NamespaceAdmin,
    start_worker: StartWorker,
) -> None:
    await controllers.start()
    await admin.add(TEAM)
    worker = await start_worker("of-team", STAY_RUNNING, namespaces=(TEAM,))
    async with await _client(own_server) as cluster:
        job = await cluster.launch(job_request())

        async def runs() -> bool:
            return (await cluster.poll(job)).status is JobStatus.RUNNING

        await wait_until_async(runs)
        with pytest.raises(ServiceError, match=f"has unfinished jobs: {job}; wait for them .* --force"):
            await admin.drop(TEAM)
        assert (await cluster.poll(job)).status is JobStatus.RUNNING
        await admin.drop(TEAM, force=True)
    assert worker.held == {}
    assert await _streams(operator, TEAM) == []
    with pytest.raises(ServiceError, match="no namespace 'team-a'"):
        await admin.drop(TEAM)


async def test_the_bucket_is_the_truth_for_controllers_that_are_started(
    controllers: Controllers, admin: NamespaceAdmin
) -> None:
    first = await controllers.start()
    await admin.add("team-b")
    await first.stop()
    second = await controllers.start(namespaces=(NS, TEAM))
    assert await _names(admin) == [NS, TEAM, "team-b"]
    await admin.drop(TEAM)
    await second.stop()
    await controllers.start(namespaces=(NS, TEAM))
    assert await _names(admin) == [NS, "team-b"]  # what was dropped stays so
    await admin.add(TEAM)
    assert await _names(admin) == [NS, TEAM, "team-b"]


async def test_a_standby_serves_what_was_added_before_it_leads(
    controllers: Controllers, own_server: EmbeddedServer, admin: NamespaceAdmin, start_worker: StartWorker
) -> None:
    first = await controllers.start("first")
    second = await controllers.start("second")
    await admin.add(TEAM)
    await admin.add("team-b")
    await admin.drop("team-b")
    await start_worker("of-team", namespaces=(TEAM,))
    await first.stop()
    assert await _runs_a_job(own_server) is JobStatus.SUCCEEDED
    assert second.controller.seat.leads
    assert second.controller.namespaces.record(Namespace("team-b")) is None
    await admin.drop(TEAM)
    assert await _names(admin) == [NS]


async def _put(bus: Bus, state: NamespaceState) -> None:
    """As a controller had written it that was killed then."""
    table = namespaces_table(bus)
    row = await table.get(TEAM)
    record = row.value if row is not None else NamespaceRecord(name=TEAM)
    await table.put(TEAM, record.model_copy(update={"state": state}))


@pytest.mark.parametrize("made", [0, 1, 5, len(SHARES)])
async def test_a_namespace_is_completed_whose_controller_was_killed_while_it_made_it(
    controllers: Controllers, own_server: EmbeddedServer, operator: Bus, admin: NamespaceAdmin, made: int
) -> None:
    first = await controllers.start()
    await admin.add(TEAM)
    await first.stop()
    for stream in (await _streams(operator, TEAM))[made:]:
        await operator.jetstream.delete_stream(stream)
    await _put(operator, ADDING)
    await controllers.start()
    await wait_until_async(lambda: _is_active(operator))
    assert len(await _streams(operator, TEAM)) == len(SHARES)
    async with await _client(own_server) as cluster:
        assert await cluster.list_jobs() == []


async def _is_active(bus: Bus) -> bool:
    row = await namespaces_table(bus).get(TEAM)
    return row is not None and row.value.state is ACTIVE


@pytest.mark.parametrize("killed", [(DROPPING, len(SHARES)), (DELETING, len(SHARES)), (DELETING, 4), (DELETING, 0)])
async def test_a_namespace_goes_whose_controller_was_killed_while_it_dropped_it(
    controllers: Controllers,
    own_server: EmbeddedServer,
    operator: Bus,
    start_worker: StartWorker,
    killed: tuple[NamespaceState, int],
) -> None:
    (state, left), admin = killed, NamespaceAdmin(operator)
    first = await controllers.start()
    await admin.add(TEAM)
    worker = await start_worker("of-team", STAY_RUNNING, namespaces=(TEAM,))
    async with await _client(own_server) as cluster:
        job = await cluster.launch(job_request())
        await wait_until_async(lambda: bool(worker.held))
        if state is DELETING:
            await cluster.terminate(job)
            await cluster.wait(job)
    await first.stop()
    await _put(operator, state)
    for stream in (await _streams(operator, TEAM))[left:]:
        await operator.jetstream.delete_stream(stream)
    await controllers.start()
    await wait_until_async(lambda: _is_gone(operator))
    await wait_until_async(lambda: not worker.held)
    assert await _streams(operator, TEAM) == []
    await admin.add(TEAM)


async def _is_gone(bus: Bus) -> bool:
    return await namespaces_table(bus).get(TEAM) is None


@pytest.mark.slow
async def test_a_controller_killed_at_a_moment_of_its_own_leaves_nothing_half_made(
    controllers: Controllers,
    own_server: EmbeddedServer,
    operator: Bus,
    start_worker: StartWorker,
) -> None:
    """Whatever the moment is, another one completes what it had begun, and who asked is answered."""
    admin = NamespaceAdmin(operator)
    await provisioning.ensure_system(operator)
    await start_worker("of-team", namespaces=(TEAM,))
    for number in range(6):
        running = await controllers.start(f"c{number}")
        adding = asyncio.create_task(admin.add(TEAM))
        for _ in range(number * 40):
            await asyncio.sleep(0)
        await running.stop()
        running = await controllers.start(f"d{number}")
        await adding
        assert await _runs_a_job(own_server) is JobStatus.SUCCEEDED
        dropping = asyncio.create_task(admin.drop(TEAM, force=True))
        for _ in range(number * 40):
            await asyncio.sleep(0)
        await running.stop()
        running = await controllers.start(f"e{number}")
        await dropping
        assert await _streams(operator, TEAM) == []
        assert await _names(admin) == [NS]
        await running.stop()


async def test_jobs_of_others_are_untouched_by_a_drop(
    controllers: Controllers,
    own_server: EmbeddedServer,
    operator: Bus,
    admin: NamespaceAdmin,
    start_worker: StartWorker,
) -> None:
    await controllers.start()
    await admin.add(TEAM)
    worker = await start_worker("of-both", STAY_RUNNING, namespaces=(NS, TEAM))
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        job = await cluster.launch(job_request())
        async with await _client(own_server) as others:
            await others.launch(job_request())
            await wait_until_async(lambda: len(worker.held) == 2)
        await admin.drop(TEAM, force=True)
        assert (await cluster.poll(job)).status is JobStatus.RUNNING
        row = await records_table(operator, NS).get(job)
        assert isinstance(row, Row)
        assert [each.running_jobs for each in await admin.list()] == [1]


async def test_a_worker_that_was_away_while_a_namespace_was_dropped_waits_for_nothing_of_it(
    controllers: Controllers, own_server: EmbeddedServer, operator: Bus, start_worker: StartWorker, tmp_path: Path
) -> None:
    await controllers.start()
    admin = NamespaceAdmin(operator)
    await admin.add(TEAM)
    worker = await start_worker("of-both", STAY_RUNNING, namespaces=(NS, TEAM))
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        kept = await cluster.launch(job_request())
        async with await _client(own_server) as others:
            await others.launch(job_request())
            await wait_until_async(lambda: len(worker.held) == 2)
        (row,) = [each for each in worker.held.values() if each.value.namespace == TEAM]
        await worker.vanish()
        await admin.drop(TEAM, force=True)  # as soon as it is known to be lost
        claims = worker.claims
        assert await claims.look(TEAM, row.value.job_id, 0) is None
        assert await claims.end(row, JobStatus.SUCCEEDED, "exit code 0") is False
        attempt = Attempt(tmp_path / "spool", TEAM)
        attempt.say("stdout", "said while nobody listened")
        await pump(operator, attempt, TEAM).publish()
        await pump(operator, attempt, TEAM).resume()
        assert {each.value.namespace for each in await claims.held()} <= {NS}
        assert (await cluster.poll(kept)).job_id == kept


async def test_a_drop_looks_at_the_jobs_seldom_however_many_end(
    controllers: Controllers, own_server: EmbeddedServer, operator: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await controllers.start()
    admin = NamespaceAdmin(operator)
    await admin.add(TEAM)
    async with await _client(own_server) as cluster:
        await cluster.launch_many([job_request() for _ in range(300)])
    looks = Mock(wraps=running.controller.namespace_reconciler.unfinished)
    monkeypatch.setattr(running.controller.namespace_reconciler, "unfinished", looks)
    await admin.drop(TEAM, force=True)
    assert looks.call_count < 100
    assert await _names(admin) == [NS]


class _OfGroup:
    """A group of servers, where a controller looks for one."""

    def __init__(self, group: ServerGroup) -> None:
        self._group = group

    def credentials(self, role: Role) -> BusAddress:
        return self._group.address(0, role)


@pytest.mark.slow
async def test_three_servers_have_copies_of_what_is_added_and_one_of_them_may_be_lost(tmp_path: Path) -> None:
    with group_of_servers(tmp_path) as group:
        bus = await retried(
            lambda _left_s: Bus.connect(group.address(1, Role.OPERATOR), name="operator"), on=(BusError,), timeout_s=60
        )
        running = await RunningController(cast("EmbeddedServer", _OfGroup(group)), IMPATIENT).start()
        try:
            admin = NamespaceAdmin(bus)
            await admin.add(TEAM)
            copies = {each.config.name: each.config.num_replicas for each in await bus.jetstream.streams_info()}
            assert {copies[stream_of(share, TEAM)] for share in SHARES} == {3}
            group.kill(2)
            await admin.drop(TEAM)
            assert await _names(admin) == [NS]
        finally:
            await bus.close()
            await running.stop()
