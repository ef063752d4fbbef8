"""Three nats-servers under load, of which some are lost, for a while or for good: no attempt ends for it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import nats
import pytest
from nats.js.api import StreamInfo

from fluster.cluster import Cluster
from fluster_bus.core import buckets
from fluster_bus.core.errors import BusError
from fluster_bus.core.roles import Role
from fluster_bus.messages import JobStatus
from fluster_services.config import Timing
from tests.server_group import ServerGroup, group_of_servers
from tests.system.daemons import DEFAULT, Daemons
from tests.system.job_requests import command
from tests.system.processes import Family
from tests.waiting import wait_until, wait_until_async

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

# Servers take as long to elect leaders as they do: some 10 s on a busy machine.
TIMING = Timing(heartbeat_s=0.5, fence_after_s=40, worker_timeout_s=60, kill_grace_s=1)
AWAY_S = 8.0
PINGS = {"FLUSTER_PING_INTERVAL_S": "0.5", "FLUSTER_PINGS_UNANSWERED": "2"}
if "FLUSTER_CHAOS_ROUNDS" in os.environ:  # make chaos
    TIMING, AWAY_S = Timing(), 40.0
JOBS_AT_ONCE, PATIENCE_S = 4, 120


@dataclass
class Load:
    """Jobs that are launched and waited for, some at once, until the block ends; none may need a second attempt."""

    cluster: Cluster
    finished: int = 0
    wrong: list[object] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def goes_on(self, jobs: int = 30) -> None:
        """Return when so many more have finished."""
        began = self.finished
        wait_until(lambda: self.wrong or self.finished >= began + jobs, PATIENCE_S, lambda: self.finished - began)
        assert not self.wrong

    def run(self) -> None:
        while not self._over.is_set():
            try:
                job_id = self.cluster.launch(command("true"))
            except BusError:
                continue  # not acknowledged: what becomes of it is not promised
            try:
                info = self.cluster.wait(job_id, timeout=PATIENCE_S)
            except Exception as error:
                self.wrong.append(error)
                raise
            with self._lock:
                self.finished += 1
            if (info.status, info.tasks[0].attempt) != (JobStatus.SUCCEEDED, 1):
                self.wrong.append(info)

    def end(self) -> None:
        self._over.set()


@contextmanager
def _load(cluster: Cluster) -> Iterator[Load]:
    load = Load(cluster)
    threads = [threading.Thread(target=load.run) for _ in range(JOBS_AT_ONCE)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load.end()
        for thread in threads:
            thread.join()


async def _asked(group: ServerGroup, is_so: Callable[[list[StreamInfo]], object]) -> None:
    """Return once what the servers say about the streams is so."""
    servers = [group.address(number, Role.OPERATOR).to_url() for number in range(len(group.ports))]
    client = await nats.connect(servers, connect_timeout=30, max_reconnect_attempts=-1)
    streams = client.jetstream(timeout=2)

    async def is_told() -> bool:
        try:
            return bool(is_so(await streams.streams_info()))
        except (nats.errors.Error, TimeoutError):
            return False

    try:
        await wait_until_async(is_told, PATIENCE_S)
    finally:
        await client.close()


def _are_copied(found: list[StreamInfo]) -> bool:
    groups = [info.cluster for info in found]
    return all(
        each and each.leader and len(each.replicas or ()) == 2 and all(peer.current for peer in each.replicas or ())
        for each in groups
    )


async def _leader(group: ServerGroup) -> int:
    """The number of the server that leads the stream of records."""
    leaders: list[str] = []

    def is_led(found: list[StreamInfo]) -> bool:
        records = buckets.bucket_stream(buckets.jobs_bucket(DEFAULT))
        leaders.extend(
            info.cluster.leader
            for info in found
            if info.config.name == records and info.cluster and info.cluster.leader
        )
        return bool(leaders)

    await _asked(group, is_led)
    return group.number(leaders[-1])


async def test_no_attempt_ends_with_a_server(family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PINGS.items():
        monkeypatch.setenv(name, value)
    with Daemons(tmp_path, family, timing=TIMING) as daemons, group_of_servers(tmp_path) as group:
        for number in (0, 1):
            daemons.start_controller(f"c{number}", address=group.address(number, Role.SERVICE))
        jobs = {DEFAULT: group.address(1, Role.JOB, DEFAULT)}
        daemons.start_worker("w1", address=group.address(2, Role.SERVICE), job_credentials=jobs)
        await _asked(group, _are_copied)
        with Cluster(group.address(1, Role.OPERATOR)) as client, _load(client) as load:
            load.goes_on()
            # Killed as it leads, and back after a while.
            killed = await _leader(group)
            group.kill(killed)
            load.goes_on()
            group.start(killed)
            await _asked(group, _are_copied)
            # Lost with its disk: another machine takes its place and its name, with nothing stored.
            lost = await _leader(group)
            group.kill(lost)
            load.goes_on()
            group.replace(lost)
            await _asked(group, _are_copied)
            load.goes_on()
            # Only the one that was replaced has all there is.
            others = [number for number in range(3) if number != lost]
            for number in others:
                group.kill(number)
            began = time.monotonic()
            wait_until(lambda: time.monotonic() > began + AWAY_S, PATIENCE_S)
            for number in others:
                group.start(number)
            load.goes_on()


async def test_a_controller_leads_whose_own_server_is_lost(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands by at another server of the group by then, and makes each further connection there too."""
    for name, value in PINGS.items():
        monkeypatch.setenv(name, value)
    with Daemons(tmp_path, family, timing=TIMING) as daemons, group_of_servers(tmp_path) as group:
        daemons.start_controller("c0", address=group.address(0, Role.SERVICE))
        daemons.start_controller("c1", address=group.address(1, Role.SERVICE))
        jobs = {DEFAULT: group.address(2, Role.JOB, DEFAULT)}
        daemons.start_worker("w1", address=group.address(2, Role.SERVICE), job_credentials=jobs)
        await _asked(group, _are_copied)
        with Cluster(group.address(2, Role.OPERATOR)) as client, _load(client) as load:
            load.goes_on(4)
            group.kill(1)
            load.goes_on(4)
            daemons.kill("c0")
            load.goes_on(4)
            assert "c1 leads" in daemons.log("c1")
