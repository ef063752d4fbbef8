"""Daemons started from the command line, with their settings as options."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from typer.testing import CliRunner

from fluster import Cluster, Entrypoint, JobRequest
from fluster.cli.app import app
from fluster.cli.daemons import CONTROLLER_SETTINGS, WORKER_SETTINGS
from fluster_bus.core.errors import BusError
from fluster_bus.core.roles import Role
from fluster_bus.messages import JobStatus
from fluster_bus.messages.parts.resources import given_labels
from fluster_bus.server import EmbeddedServer
from tests.system.processes import Family
from tests.waiting import wait_until

_COMMAND = [sys.executable, "-c", "from fluster.cli import main; main()"]


@contextmanager
def _daemon(
    family: Family, address: Path, *words: str, stderr: int | None = None, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [*_COMMAND, "--address", str(address), *words], env=family.environment(**variables), stderr=stderr
    ) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


def test_controller_and_worker_are_started_with_options(family: Family, tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "nats", namespaces=("default",))
    server.start()
    try:
        service, worker, job = (tmp_path / name for name in ("service.json", "worker.json", "job.json"))
        server.credentials(Role.SERVICE).save(service)
        server.credentials(Role.WORKER).save(worker)
        server.credentials(Role.JOB, "default").save(job)
        options = ["--cpus", "3", "--worker-id", "w9", "--state-dir", str(tmp_path / "w9"), "--gpus", "0"]
        options += ["--resource", "license=4", "--resource", "slot=1", "--label", "zone=a"]
        with (
            _daemon(family, service, "controller", "start", "--controller-id", "c9"),
            _daemon(
                family, worker, "worker", "start", *options, "--job-credentials", f"default={job}", FLUSTER_CPUS="5"
            ),
            Cluster(server.credentials(Role.OPERATOR).to_url()) as cluster,
        ):
            wait_until(lambda: _workers(cluster) == ["w9"])
            job_id = cluster.launch(JobRequest(name="hello", entrypoint=Entrypoint(command=("true",))))
            total = cluster.list_workers()[0].info.total
            assert (total.cpu, total.resources, given_labels(total.labels)) == (
                3,
                (("license", 4), ("slot", 1)),
                ("zone=a",),
            )
            assert cluster.wait(job_id, timeout=60).status is JobStatus.SUCCEEDED
    finally:
        server.close()
    family.wait_gone()


def test_a_job_of_a_namespace_without_workers_keeps_no_other_waiting(family: Family, tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "nats", namespaces=("ours", "theirs"))
    server.start()
    try:
        files = {"service": Role.SERVICE, "worker": Role.WORKER, "job": Role.JOB}
        for name, role in files.items():
            server.credentials(role, "ours" if role is Role.JOB else None).save(tmp_path / f"{name}.json")
        worker = ["worker", "start", "--worker-id", "w9", "--state-dir", str(tmp_path / "w9"), "--cpus", "3"]
        worker += ["--namespaces", "ours", "--job-credentials", f"ours={tmp_path / 'job.json'}"]
        operator = server.credentials(Role.OPERATOR).to_url()
        with (
            _daemon(family, tmp_path / "service.json", "controller", "start", "--namespaces", "ours,theirs"),
            _daemon(family, tmp_path / "worker.json", *worker),
            Cluster(operator, "theirs") as theirs,
            Cluster(operator, "ours") as ours,
        ):
            wait_until(lambda: _workers(ours) == ["w9"])
            request = JobRequest(name="hello", entrypoint=Entrypoint(command=("true",)))
            waiting = theirs.launch(request)
            why = "no worker runs jobs of namespace theirs (those that there are run jobs of ours)"
            wait_until(lambda: why in theirs.explain(waiting))
            assert ours.wait(ours.launch(request), timeout=60).status is JobStatus.SUCCEEDED
            assert theirs.poll(waiting).status is JobStatus.PENDING
    finally:
        server.close()
    family.wait_gone()


def test_a_worker_that_runs_serves_a_namespace_that_is_added(family: Family, tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "nats", namespaces=("default", "team-a"))
    server.start()
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    try:
        server.credentials(Role.SERVICE).save(tmp_path / "service.json")
        server.credentials(Role.WORKER).save(tmp_path / "worker.json")
        server.credentials(Role.JOB, "default").save(jobs / "job_default.json")
        worker = ["worker", "start", "--worker-id", "w9", "--state-dir", str(tmp_path / "w9"), "--cpus", "3"]
        worker += ["--drain-timeout", "0"]
        operator = server.credentials(Role.OPERATOR).to_url()
        with (
            _daemon(family, tmp_path / "service.json", "controller", "start"),
            _daemon(family, tmp_path / "worker.json", *worker, "--job-credentials-dir", str(jobs)),
            Cluster(operator) as cluster,
        ):
            wait_until(lambda: _workers(cluster) == ["w9"])
            held = cluster.launch(JobRequest(name="held", entrypoint=Entrypoint(command=("sleep", "600"))))
            wait_until(lambda: cluster.poll(held).status is JobStatus.RUNNING)
            added = CliRunner().invoke(app, ["--address", operator, "namespace", "add", "team-a"])
            assert added.exit_code == 0, added.output
            server.credentials(Role.JOB, "team-a").save(jobs / "job_team-a.json")
            with Cluster(operator, "team-a") as team:
                script = "import fluster; fluster.Cluster().list_jobs()"  # with the credentials that it has
                job = team.launch(
                    JobRequest(name="hello", entrypoint=Entrypoint(command=(sys.executable, "-c", script)))
                )
                assert team.wait(job, timeout=60).status is JobStatus.SUCCEEDED
            assert cluster.poll(held).status is JobStatus.RUNNING  # nothing was restarted
            listed = CliRunner().invoke(app, ["--address", operator, "workers"])
            assert "default,team-a" in listed.output
            cluster.terminate(held)
            cluster.wait(held)
    finally:
        server.close()
    family.wait_gone()


def test_a_worker_warns_that_processes_keep_no_namespaces_apart(family: Family, tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "nats", namespaces=("a", "b"))
    server.start()
    try:
        server.credentials(Role.WORKER).save(tmp_path / "worker.json")
        options = ["--worker-id", "w9", "--state-dir", str(tmp_path / "w9"), "--namespaces", "a,b"]
        for namespace in ("a", "b"):
            file = tmp_path / f"job-{namespace}.json"
            server.credentials(Role.JOB, namespace).save(file)
            options += ["--job-credentials", f"{namespace}={file}"]
        with _daemon(family, tmp_path / "worker.json", "worker", "start", *options, stderr=subprocess.PIPE) as process:
            assert process.stderr is not None
            said = process.stderr.readline().decode()
            assert said.startswith("warning: jobs of namespaces a, b run as processes of one user here")
            process.stderr.readline()  # it has begun, so it ends as it is asked
    finally:
        server.close()
    family.wait_gone()


def _workers(cluster: Cluster) -> list[str]:
    try:
        return [each.info.worker_id for each in cluster.list_workers()]
    except BusError:  # its daemons are starting
        return []


def test_every_setting_of_a_daemon_is_an_option() -> None:
    page = (Path(__file__).parents[2] / "docs/operations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`FLUSTER_[^|]*) \| ([^|]*) \|", page, re.MULTILINE)
    for reader, settings in (("controller", CONTROLLER_SETTINGS), ("worker", WORKER_SETTINGS)):
        documented = {
            variable
            for variables, readers in rows
            if {reader, "all"} & set(readers.split(", "))
            for variable in re.findall(r"`(FLUSTER_\w+)`", variables)
        }
        assert {setting.variable for setting in settings} | {"FLUSTER_CLUSTER_ADDRESS"} == documented


def test_gpus_are_spelt_alike_by_all_commands() -> None:
    for words in (("up",), ("submit",), ("deploy",), ("worker", "start")):
        shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
        assert re.search(r"--gpu\b", shown), words
        assert re.search(r"--gpus\b", shown), words
