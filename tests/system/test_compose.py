"""docker-compose.yml and the image of services/Dockerfile, by a real engine: used from outside, hurt, and gone without a trace."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fluster.cli.credentials import COMPOSE_HOSTS
from tests.compose_project import ROOT, ComposeProject, make_images
from tests.docker_engine import Engine
from tests.networked_engine import networked_engine  # noqa: F401 - a fixture
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

PATIENCE_S = 60


@pytest.fixture(scope="module")
def project(networked_engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeProject]:  # noqa: F811
    """Two controllers and three workers, up and known to each other; afterwards nothing of them is left."""
    make_images(networked_engine)
    project = ComposeProject(networked_engine, tmp_path_factory.mktemp("compose") / "credentials")
    project.compose("build")
    try:
        project.compose("up", "--detach", "--scale", "worker=3")
        wait_until(lambda: alive(project) == workers(project), PATIENCE_S, lambda: project.compose("logs"))
        yield project
    finally:
        project.compose("down", "--volumes", "--timeout", "20")
    assert project.left() == []


def quickstart(project: ComposeProject, folder: Path) -> None:
    """Run the example as a program of this cluster, and end the actors that it leaves there."""
    program = folder / "quickstart.py"
    program.write_text((ROOT / "examples/quickstart.py").read_text().replace("LocalCluster", "Cluster"))
    said = project.outside(str(program))
    assert said.splitlines() == ["101", "101", "[111, 111]", "[0, 1, 4, 9, 16]"]
    for job in project.fluster("ps"):
        project.fluster("cancel", job["job_id"])
    wait_until(lambda: project.fluster("ps") == [], PATIENCE_S)


def alive(project: ComposeProject) -> set[str]:
    """The names of the workers that the cluster hears."""
    return {worker["info"]["worker_id"] for worker in project.fluster("workers") if worker["alive"]}


def workers(project: ComposeProject) -> set[str]:
    """The names of the workers that were started."""
    return {each["Config"]["Hostname"] for each in project.containers("worker")}


def test_it_serves_programs_outside_and_all_of_it_is_healthy(project: ComposeProject, tmp_path: Path) -> None:
    quickstart(project, tmp_path)
    assert [len(project.containers(service)) for service in ("nats", "controller", "worker")] == [1, 2, 3]
    wait_until(
        lambda: {each["State"]["Health"]["Status"] for each in project.containers()} == {"healthy"},
        PATIENCE_S,
        lambda: [each["State"] for each in project.containers()],
    )


def test_daemons_are_no_users_with_rights(project: ComposeProject) -> None:
    for each in [*project.containers("controller"), *project.containers("worker")]:
        status = Path(f"/proc/{each['State']['Pid']}/status").read_text()
        fields = dict(line.split(":\t", 1) for line in status.splitlines())
        assert set(fields["Uid"].split()) == {"10001"}
        assert int(fields["CapBnd"], 16) == 0
        assert fields["NoNewPrivs"] == "1"


def test_a_password_is_in_no_variable_that_the_engine_shows(project: ComposeProject) -> None:
    password = (project.credentials / "passwords.env").read_text().split("=")[1].split()[0]
    assert password not in str(project.containers())


def test_when_the_leading_controller_is_killed_the_other_one_leads(project: ComposeProject, tmp_path: Path) -> None:
    client = project.engine.client
    leading = wait_until(lambda: _leading(project), PATIENCE_S)
    client.kill(leading)  # by the engine, which does not start again what it was asked to end
    quickstart(project, tmp_path)
    assert not client.inspect_container(leading)["State"]["Running"]
    client.start(leading)


def _leading(project: ComposeProject) -> str | None:
    """The container of the controller beside which the other one stands by."""
    logs = {each["Id"]: project.engine.client.logs(each["Id"]) for each in project.containers("controller")}
    leading = [container for container, said in logs.items() if b"stands by" not in said]
    return leading[0] if len(leading) == 1 else None


def test_a_worker_that_dies_is_started_again_and_registered(project: ComposeProject, tmp_path: Path) -> None:
    before = project.containers("worker")[0]
    name = before["Config"]["Hostname"]
    started = {worker["info"]["worker_id"]: worker["info"]["started_at"] for worker in project.fluster("workers")}
    os.kill(before["State"]["Pid"], signal.SIGKILL)  # not through the engine

    def is_back() -> bool:
        return any(
            worker["alive"] and worker["info"]["worker_id"] == name and worker["info"]["started_at"] > started[name]
            for worker in project.fluster("workers")
        )

    wait_until(is_back, PATIENCE_S)
    assert project.engine.client.inspect_container(before["Id"])["RestartCount"] == 1
    assert alive(project) == workers(project)
    quickstart(project, tmp_path)


def test_a_server_that_dies_is_started_again_with_all_that_it_stored(project: ComposeProject) -> None:
    job_id = project.outside("-c", RUN_TRUE).strip()
    (nats,) = project.containers("nats")
    os.kill(nats["State"]["Pid"], signal.SIGKILL)
    wait_until(lambda: project.containers("nats")[0]["RestartCount"] == 1, PATIENCE_S)
    assert project.fluster("status", job_id)["status"] == "SUCCEEDED"
    wait_until(lambda: alive(project) == workers(project), PATIENCE_S)


RUN_TRUE = """
from fluster import Cluster, Entrypoint, JobRequest

with Cluster() as cluster:
    job_id = cluster.launch(JobRequest(name="true", entrypoint=Entrypoint(command=["true"])))
    cluster.wait(job_id)
    print(job_id)
"""

SUMMER = """
from fluster import Cluster, ResourceConfig, actor, deploy

@actor(resources=ResourceConfig(labels={"where": "outside"}))
class Summer:
    def __init__(self):
        self.sum = 0

    def add(self, data):
        import os
        self.sum += len(data)
        return self.sum, sorted(os.listdir("/sys/class/net")), os.path.exists("/.dockerenv")

with Cluster() as cluster:
    pool = deploy(cluster, Summer, name="summer")
    print(pool.call().add(b"x"), pool.call().add(b"x" * 2_000_000)[0])
    pool.shutdown()
"""


def test_a_worker_beside_it_has_its_containers_in_the_network_that_it_is_told(
    project: ComposeProject, tmp_path: Path
) -> None:
    (nats,) = project.containers("nats")
    network = f"{project.name}_default"
    address = nats["NetworkSettings"]["Networks"][network]["IPAddress"]
    # Outside the network it has no name, so the certificate has to be for its address, too.
    hosts = ",".join([*COMPOSE_HOSTS, address])
    project.trust("certificates", "--authority", str(project.credentials), "--server", "nats", "--host", hosts)
    project.compose("kill", "-s", "HUP", "nats")
    variables = {
        "FLUSTER_CLUSTER_ADDRESS": f"tls://{address}:4222",
        "FLUSTER_CREDENTIALS": str(project.credentials / "worker.json"),
        "FLUSTER_JOB_DEFAULT_CREDENTIALS": str(project.credentials / "job_default.json"),
        "FLUSTER_WORKER_ID": "beside",
        "FLUSTER_STATE_DIR": str(tmp_path / "state"),
        "FLUSTER_LABELS": "where=outside",
        "FLUSTER_RUNTIME": "docker",
        "FLUSTER_DOCKER_HOST": project.engine.host,
        "FLUSTER_IMAGE": project.engine.image,
        "FLUSTER_CONTAINER_NETWORK": network,
    }
    with project.beside("-m", "fluster_services.worker", **variables):
        wait_until(lambda: "beside" in alive(project), PATIENCE_S)
        said = project.outside("-c", SUMMER)
        assert said == "(1, ['eth0', 'lo'], True) 2000001\n"


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"FLUSTER_CREDENTIALS": "/etc/shadow"}, "they belong to user 0, and this is user 10001"),
        (
            {
                "FLUSTER_CREDENTIALS": "",
                "FLUSTER_CLUSTER_ADDRESS": "tls://service:wrong@nats:4222",
                "FLUSTER_CA": "/ca.pem",
            },
            "tls://service@nats:4222 refused the credentials",
        ),
    ],
    ids=["another user's", "wrong"],
)
def test_a_daemon_without_its_credentials_says_so(project: ComposeProject, variables: dict[str, str], why: str) -> None:
    given = [word for name, value in variables.items() for word in ("-e", f"{name}={value}")]
    given += ["-v", f"{project.credentials / 'ca.pem'}:/ca.pem:ro"]
    assert why in project.compose("run", "--rm", "--no-deps", "-T", *given, "controller", status=1)


def test_a_project_without_its_credentials_does_not_start(project: ComposeProject, tmp_path: Path) -> None:
    other = ComposeProject(project.engine, tmp_path / "credentials", port=4_223)
    shutil.rmtree(other.credentials)
    said = other.compose("up", "--detach", status=1)
    assert f"{other.credentials}/passwords.env" in said
    other.compose("down", "--volumes")
    assert other.left() == []
