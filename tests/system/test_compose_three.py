"""The profile `three` of docker-compose.yml, by a real engine: three servers, whose routes are encrypted, and three copies of what is stored."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.compose_project import ComposeProject, make_images
from tests.docker_engine import Engine
from tests.networked_engine import networked_engine  # noqa: F401 - a fixture
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.minutes]

PATIENCE_S = 90

COPIES = """
import asyncio
from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus

async def main():
    bus = await Bus.connect(BusAddress.from_environment(), name="test")
    print((await bus.jetstream.stream_info("KV_fluster_jobs_default")).config.num_replicas)
    await bus.close()

asyncio.run(main())
"""

RUN_TRUE = """
from fluster import Cluster, Entrypoint, JobRequest

with Cluster() as cluster:
    print(cluster.wait(cluster.launch(JobRequest(name="true", entrypoint=Entrypoint(command=["true"])))).status.value)
"""


@pytest.fixture
def project(networked_engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeProject]:  # noqa: F811
    make_images(networked_engine)
    project = ComposeProject(networked_engine, tmp_path_factory.mktemp("compose") / "credentials", is_group=True)
    project.compose("build")
    try:
        yield project
    finally:
        project.compose("down", "--volumes", "--timeout", "20")
    assert project.left() == []


def test_three_servers_keep_three_copies_and_one_of_them_may_be_lost(project: ComposeProject) -> None:
    said = project.compose("run", "--rm", "--no-deps", "-T", "nats-2", status=1, COMPOSE_PROFILES="")
    assert "set the variable COMPOSE_PROFILES=three" in said
    project.compose("up", "--detach")
    logs = lambda: project.compose("logs", "--tail", "40")  # noqa: E731
    wait_until(lambda: any(each["alive"] for each in project.fluster("workers")), PATIENCE_S, logs)
    wait_until(lambda: project.outside("-c", COPIES, user="operator") == "3\n", PATIENCE_S, logs)
    assert project.outside("-c", RUN_TRUE) == "SUCCEEDED\n"
    (first,) = project.containers("nats")
    project.engine.client.kill(first["Id"])  # by the engine, which does not start again what it was asked to end
    assert project.outside("-c", RUN_TRUE) == "SUCCEEDED\n"
    project.trust("certificates", "--authority", str(project.credentials), "--renew")
    project.compose("kill", "-s", "HUP", "nats-2", "nats-3")
    wait_until(
        lambda: project.compose("logs", "nats-2", "nats-3").count("Reloaded server configuration") == 2, describe=logs
    )
    project.engine.client.start(first["Id"])
    wait_until(
        lambda: {each["State"]["Health"]["Status"] for each in project.containers()} == {"healthy"}, PATIENCE_S, logs
    )
    assert project.outside("-c", RUN_TRUE) == "SUCCEEDED\n"
