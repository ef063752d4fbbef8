"""A LocalCluster's beginning and end, and what it keeps to itself."""

import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import nats
import nats.errors
import psutil
import pytest
from typer.testing import CliRunner

from fluster.actors import actor, deploy
from fluster.cli.app import app
from fluster.cluster import Cluster, LocalCluster
from fluster.errors import ClusterStartError, JobNotFoundError
from fluster_bus.access.address import BusAddress
from fluster_bus.core import buckets, server_subjects, subjects
from fluster_bus.core.errors import CredentialsError, InvalidNameError, ServiceError
from fluster_bus.messages import EnvironmentConfig, JobStatus
from tests.insides import supervisor_pid
from tests.system.job_requests import call, command, sleeper, texts, wait_ready
from tests.system.processes import Family
from tests.waiting import wait_until, wait_until_async

PATIENCE_S = 60

pytestmark = pytest.mark.anyio


def is_left(store_dir: Path) -> bool:
    return store_dir.exists()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made, to see that none is left."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


# ---- the end --------------------------------------------------------------------------------------------------


def test_many_namespaces_have_room(family: Family) -> None:
    names = [f"team-{number}" for number in range(8)]
    with LocalCluster("team-0", namespaces=names) as cluster, Cluster(cluster.address, "team-7") as last:
        assert last.result(last.launch(call(os.getpid)), timeout=60) > 0


def test_a_start_that_is_interrupted_leaves_nothing(
    family: Family, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fluster.cluster.local.import_now", interrupt)
    with pytest.raises(KeyboardInterrupt) as interrupted:  # its traceback keeps the cluster, as a notebook's does
        LocalCluster()
    assert interrupted.traceback
    assert not family.named("python")
    assert not list(temporary.iterdir())


def test_shutdown_leaves_nothing(family: Family, temporary: Path) -> None:
    cluster = LocalCluster(workers=2)
    assert family.named("nats-server")
    job_ids = cluster.launch_many(
        [sleeper(), command("sh", "-c", "setsid sleep 600 & echo; wait", env=family.variables)]
    )
    for job_id in job_ids:
        wait_ready(cluster, job_id)
    assert list(temporary.iterdir()) == [cluster.store_dir]
    cluster.shutdown()
    assert family.members() == [], "it returns when all are gone"
    assert list(temporary.iterdir()) == []
    cluster.shutdown()


OWNER = """
import signal, sys, threading
from fluster.cluster import LocalCluster
from tests.insides import supervisor_pid
from tests.system.job_requests import sleeper, wait_ready
{before}
cluster = LocalCluster()
job_id = cluster.launch(sleeper(env={variables!r}))
wait_ready(cluster, job_id)
print(cluster.store_dir, supervisor_pid(cluster), flush=True)
{after}
"""


class Owner:
    """A program that starts a cluster with a job that never ends."""

    def __init__(self, family: Family, after: str, before: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER.format(before=before, after=after, variables=family.variables)],
            env=family.environment(PYTHONPATH=os.pathsep.join(sys.path)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        assert words, self.process.communicate()
        self.store_dir, self.supervisor = Path(words[0]), psutil.Process(int(words[1]))

    def end(self) -> tuple[int, str]:
        """Its exit status, and what it said on stderr."""
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, errors


StartOwner = Callable[..., Owner]


@pytest.fixture
def start_owner(family: Family) -> Iterator[StartOwner]:
    started: list[Owner] = []

    def start(after: str, before: str = "") -> Owner:
        started.append(Owner(family, after, before))
        return started[-1]

    yield start
    for owner in started:
        owner.process.kill()
        owner.process.communicate()


WAIT_IN_CLUSTER = "cluster.wait(job_id)"
WAIT_BELOW_WITH = "with cluster:\n    threading.Event().wait()"
END = ""


@pytest.mark.parametrize("after", [WAIT_IN_CLUSTER, WAIT_BELOW_WITH])
def test_ctrl_c_ends_everything(family: Family, temporary: Path, start_owner: StartOwner, after: str) -> None:
    owner = start_owner(after)
    os.killpg(owner.process.pid, signal.SIGINT)
    status, errors = owner.end()
    assert status == -signal.SIGINT
    assert errors.strip().endswith("KeyboardInterrupt")
    assert "Exception ignored" not in errors
    family.wait_gone()
    assert not is_left(owner.store_dir)


def test_a_program_that_just_ends_ends_its_cluster(family: Family, temporary: Path, start_owner: StartOwner) -> None:
    status, errors = start_owner(END).end()
    assert (status, errors) == (0, "")
    assert family.members() == []
    assert list(temporary.iterdir()) == []


def test_a_program_that_fails_ends_its_cluster(family: Family, temporary: Path, start_owner: StartOwner) -> None:
    status, errors = start_owner("raise RuntimeError('oops')").end()
    assert status == 1
    assert errors.strip().endswith("RuntimeError: oops")
    assert family.members() == []
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_the_death_of_the_owner_ends_everything(
    family: Family, temporary: Path, start_owner: StartOwner, number: signal.Signals
) -> None:
    owner = start_owner(WAIT_IN_CLUSTER)
    owner.process.send_signal(number)
    assert owner.end()[0] == -number
    family.wait_gone()
    assert list(temporary.iterdir()) == []


def test_each_process_shows_what_it_is(cluster: LocalCluster) -> None:
    supervisor = psutil.Process(supervisor_pid(cluster))
    assert supervisor.name() == "fluster-supervi", "the kernel keeps 15 characters"
    names = Counter(child.name() for child in supervisor.children())
    assert names["fluster-control"] == names["nats-server"] == 1
    assert names["fluster-worker"] == 2


def test_the_death_of_the_supervisor_ends_everything(family: Family, temporary: Path, start_owner: StartOwner) -> None:
    owner = start_owner("threading.Event().wait()")
    owner.supervisor.kill()
    wait_until(lambda: [process.pid for process in family.members()] in ([], [owner.process.pid]), PATIENCE_S)
    owner.process.send_signal(signal.SIGINT)
    owner.end()
    family.wait_gone()
    assert list(temporary.iterdir()) == []


def test_the_death_of_both_ends_everything(family: Family, start_owner: StartOwner) -> None:
    owner = start_owner(WAIT_IN_CLUSTER)
    owner.supervisor.kill()
    owner.process.kill()
    owner.end()
    family.wait_gone()
    shutil.rmtree(owner.store_dir, ignore_errors=True)  # no process is left that could


def test_a_forked_child_does_not_keep_the_cluster(family: Family, temporary: Path, start_owner: StartOwner) -> None:
    """As those of multiprocessing, which may live on."""
    before = """
import os, signal
from multiprocessing import get_context
"""
    after = """
context = get_context("fork")
child = context.Process(target=signal.pause)
child.start()
os.kill(os.getpid(), signal.SIGKILL)
"""
    owner = start_owner(after, before)
    assert owner.process.wait(PATIENCE_S) == -signal.SIGKILL
    wait_until(lambda: len(family.members()) == 1, PATIENCE_S, family.members)  # the child
    assert list(temporary.iterdir()) == []
    for child in family.members():
        child.kill()
    owner.end()


def test_a_forked_child_ends_by_itself_and_is_told_that_the_connection_is_not_its_own(
    family: Family, temporary: Path, start_owner: StartOwner
) -> None:
    before = """
import os
from fluster import ActorPool, ForkedError, WorkerPool
"""
    after = """
pool, workers = ActorPool(cluster, "nobody"), WorkerPool(cluster, 1)
child = os.fork()
if child == 0:
    for use in (
        lambda: cluster.poll(job_id),
        lambda: pool.call().anything(),
        lambda: pool.submit().anything(),
        lambda: ActorPool(cluster, "others").call().anything(),
        lambda: workers.submit(print),
    ):
        try:
            use()
        except ForkedError as error:
            print(error, file=sys.stderr)
    workers.shutdown()  # does nothing, as the end of the cluster
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert cluster.poll(job_id).status == "RUNNING", "the child's end is not the cluster's"
"""
    status, errors = start_owner(after, before).end()
    assert status == 0, errors
    assert errors.count("make one here, with Cluster(address)") == 5
    assert family.members() == []


# ---- several, and again ---------------------------------------------------------------------------------------


def test_a_keeper_that_is_stopped_does_not_survive_the_cluster(family: Family, temporary: Path, tmp_path: Path) -> None:
    """Nor does a child of its task, which would write on."""
    pid_file = tmp_path / "pid"
    script = f"setsid sh -c 'echo $$ > {pid_file}; echo ready; exec sleep 1000' & wait"
    with LocalCluster(workers=1) as cluster:
        job_id = cluster.launch(command("sh", "-c", script))
        wait_ready(cluster, job_id)
        (keeper,) = family.named("fluster-keeper")
        keeper.suspend()
    assert family.members() == []
    assert not psutil.pid_exists(int(pid_file.read_text()))
    assert list(temporary.iterdir()) == []


def test_two_clusters_do_not_mix(family: Family) -> None:
    with LocalCluster() as one, LocalCluster("two") as two:
        assert one.address != two.address
        first, second = one.launch(command("echo", "one")), two.launch(command("echo", "two"))
        assert one.wait(first, timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
        assert two.wait(second, timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
        assert (texts(one, first), texts(two, second)) == (["one"], ["two"])
        for cluster, job_id in ((one, second), (two, first)):
            with pytest.raises(JobNotFoundError):
                cluster.poll(job_id)
        mine, theirs = BusAddress.parse(one.address), BusAddress.parse(two.address)
        with pytest.raises(CredentialsError):
            Cluster(BusAddress(mine.url, theirs.user, theirs.password))
        one.shutdown()
        assert two.wait(two.launch(command("true")), timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
    family.wait_gone()


def test_a_cluster_inside_a_job_is_a_cluster_of_its_own(cluster: LocalCluster) -> None:
    def work() -> None:
        with LocalCluster() as inner:
            endpoint = inner.register_endpoint("inside", "x")
            assert endpoint.job_id is None, "it belongs to no job of that cluster"
            info = inner.wait(inner.launch(command("true")), timeout=PATIENCE_S)
            assert (info.status, info.parent) == (JobStatus.SUCCEEDED, None)

    info = cluster.wait(cluster.launch(call(work)), timeout=PATIENCE_S)
    assert info.status is JobStatus.SUCCEEDED, info.error_message


def test_a_store_is_gone_on_with(family: Family, tmp_path: Path) -> None:
    store_dir = tmp_path / "store"
    with LocalCluster(store_dir=store_dir) as cluster:
        job_id = cluster.launch(command("echo", "kept"))
        before = cluster.wait(job_id, timeout=PATIENCE_S)
        unfinished = cluster.launch(sleeper())
        wait_ready(cluster, unfinished)
    family.wait_gone()
    with LocalCluster(store_dir=store_dir) as cluster:
        assert cluster.poll(job_id) == before
        assert texts(cluster, job_id) == ["kept"]
        wait_ready(cluster, unfinished, lines=2)
        assert cluster.poll(unfinished).tasks[0].attempt == 2
        cluster.terminate(unfinished)
        assert cluster.wait(unfinished, timeout=PATIENCE_S).status is JobStatus.KILLED
        assert cluster.wait(cluster.launch(command("true")), timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
        with pytest.raises(ClusterStartError, match=r"in use by another cluster \(process \d+\)"):
            LocalCluster(store_dir=store_dir)
        assert cluster.wait(cluster.launch(command("true")), timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
    family.wait_gone()


def _admin(cluster: LocalCluster, *words: str) -> None:
    done = CliRunner().invoke(app, ["--address", cluster.address, "namespace", *words])
    assert done.exit_code == 0, done.output


def test_what_was_added_is_there_when_a_store_is_gone_on_with(family: Family, tmp_path: Path) -> None:
    store_dir = tmp_path / "store"
    with LocalCluster(store_dir=store_dir) as cluster, ExitStack() as stack:
        for words in (["add", "team-a"], ["add", "team-b"], ["drop", "team-b", "--yes"]):
            _admin(cluster, *words)
        team = stack.enter_context(Cluster(cluster.address, "team-a"))
        assert team.result(team.launch(call(os.getpid)), timeout=PATIENCE_S) > 0
        running = team.launch(sleeper())
        wait_ready(team, running)
        # A worker that is killed comes back with the same namespaces, and has what it had.
        (worker,) = cluster.list_workers()
        os.kill(worker.info.pid, signal.SIGKILL)
        wait_until(lambda: [each.info.pid for each in cluster.list_workers() if each.alive] != [worker.info.pid])
        assert team.result(team.launch(call(os.getpid)), timeout=PATIENCE_S) > 0
        assert (team.poll(running).status, team.poll(running).tasks[0].attempt) == (JobStatus.RUNNING, 1)
        team.terminate(running)
    family.wait_gone()
    with LocalCluster(store_dir=store_dir) as cluster, Cluster(cluster.address, "team-a") as team:
        assert json.loads((store_dir / "namespaces.json").read_text()) == ["team-a"]
        assert [each.info.total.namespaces for each in cluster.list_workers()] == [("default", "team-a")]
        assert team.result(team.launch(call(os.getpid)), timeout=PATIENCE_S) > 0
    family.wait_gone()


# ---- what can be wrong ----------------------------------------------------------------------------------------


def refused(**setup: Any) -> str:
    """The one line with which it does not start."""
    with pytest.raises(ClusterStartError) as raised:
        LocalCluster(**setup)
    line = str(raised.value)
    assert "\n" not in line
    return line


def test_a_busy_port_is_said_in_one_line(family: Family) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} is in use by another program" in refused(port=port)
    family.wait_gone()


def test_a_missing_server_is_said_in_one_line(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUSTER_NATS_SERVER", "/no/such/server")
    assert "pip install 'fluster[local]'" in refused()
    family.wait_gone()


def test_a_store_that_is_no_folder_is_said_in_one_line(family: Family, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for store_dir in (file, file / "below"):
        line = refused(store_dir=store_dir)
        assert str(file) in line
        assert "choose another" in line
    family.wait_gone()


def test_timing_is_given_by_the_names_of_the_settings(family: Family) -> None:
    @actor(singleton=True)
    class Only:
        def name(self) -> str:
            return "only"

    assert "'patience_s' is not known: there are heartbeat_s, fence_after_s" in refused(timing={"patience_s": 1})
    assert "timing: fence_after_s=20: with kill_grace_s=3 and heartbeat_s=1 it makes 24" in refused(
        timing={"fence_after_s": 20}
    )
    with LocalCluster(cpu=1, timing={"seat_lease_s": 3}) as cluster:
        assert deploy(cluster, Only, name="only").call().name() == "only"
        seat = cluster.portal.run(cluster.asynchronous.registry.seats.get, buckets.seat_key("only"))
        assert seat is not None
        assert seat.value.lease_s == 3
    family.wait_gone()


def test_limits_are_given_by_the_names_of_the_settings(family: Family) -> None:
    """And act: on the controller, on the streams and on the worker."""
    assert "limits: 'max_record' is not known; did you mean 'max_records'" in refused(limits={"max_record": 1})
    assert "limits: max_log_line=8000000: give a size from 1 KiB to 128 KiB" in refused(limits={"max_log_line": "8MB"})
    assert "limits: daemon_log=1000: give a size from 64 KiB" in refused(limits={"daemon_log": "1KB"})
    assert "limits: logs_budget: invalid size 'much'" in refused(limits={"logs_budget": "much"})
    limits: dict[str, int | str] = {
        "max_records": 1,
        "records_kept_at_least_s": 0,
        "logs_budget": "20GiB",
        "max_log": 4_000,
        "daemon_log": "64KiB",
    }
    with LocalCluster(cpu=1, limits=limits, build_timeout=0.01) as cluster:
        first = cluster.launch(command("seq", "10000"))
        assert cluster.wait(first, timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
        assert 0 < sum(len(text) + 1 for text in texts(cluster, first)) <= 4_000
        stream = cluster.portal.run(cluster.asynchronous.bus.jetstream.stream_info, buckets.logs_stream("default"))
        assert stream.config.max_bytes == 20 << 30  # more than the store of a cluster without this limit may hold
        environment = EnvironmentConfig(pip_packages=("rich",))
        second = cluster.launch(command("true").model_copy(update={"environment": environment}))
        told = cluster.wait(second, timeout=PATIENCE_S).error_message
        assert told is not None
        assert "its environment was not made within 0.01 s" in told
        wait_until(lambda: first not in {job.job_id for job in cluster.list_jobs()})
        assert [job.job_id for job in cluster.list_jobs()] == [second]
    family.wait_gone()


def test_the_start_and_the_disk_are_as_large_as_is_said(family: Family) -> None:
    assert "not ready within 0.001 s" in refused(start_timeout=0.001)
    with LocalCluster(cpu=1, start_timeout=300, limits={"least_free_disk": "1000TiB"}) as cluster:
        job_id = cluster.launch(command("true"))
        wait_until(lambda: "its disk has no room: less than 2000 TiB are left" in cluster.explain(job_id), PATIENCE_S)
    family.wait_gone()


def test_wrong_arguments_are_refused_before_anything_starts(family: Family) -> None:
    for setup in ({"namespace": "a.b"}, {"namespace": "sys"}, {"namespaces": ["ok", "not ok"]}):
        with pytest.raises(InvalidNameError, match=r"invalid namespace|namespace of the cluster itself"):
            LocalCluster(**setup)
    for wrong in (
        {"workers": 0},
        {"cpu": 0},
        {"memory": "much"},
        {"port": 70_000},
        {"timing": {"hold_s": -1}},
        {"limits": {"max_log": ""}},
    ):
        with pytest.raises(ValueError, match=r"workers|cpu|much|port|hold_s|max_log=''"):
            LocalCluster(**wrong)
    assert family.members() == []


# ---- who may do what ------------------------------------------------------------------------------------------


def test_whoever_has_no_credentials_is_refused(cluster: LocalCluster) -> None:
    address = BusAddress.parse(cluster.address)
    with pytest.raises(CredentialsError):
        Cluster(BusAddress(address.url))
    with pytest.raises(CredentialsError):
        Cluster(BusAddress(address.url, "operator", "guessed"))
    with pytest.raises(ServiceError, match="no namespace 'elsewhere'"):
        Cluster(cluster.address, "elsewhere")


def test_files_are_for_their_owner_alone(cluster: LocalCluster) -> None:
    assert cluster.store_dir.stat().st_mode & 0o777 == 0o700
    for path in cluster.store_dir.rglob("*"):
        if path.name in {"nats-server.conf", "default.json"} or "credentials" in path.parts:
            assert path.stat().st_mode & 0o077 == 0, path


@pytest.fixture
def job_address(cluster: LocalCluster, tmp_path: Path) -> Iterator[BusAddress]:
    """What a job finds in its environment, while it runs."""
    file = tmp_path / "address"
    script = f'echo $FLUSTER_CLUSTER_ADDRESS > {file}; cat "$FLUSTER_CREDENTIALS" > {file}.credentials; echo; sleep 600'
    job_id = cluster.launch(command("sh", "-c", script))
    wait_ready(cluster, job_id)
    values = json.loads(Path(f"{file}.credentials").read_text())
    yield BusAddress(file.read_text().strip(), values["user"], values["password"])
    cluster.terminate(job_id)
    cluster.wait(job_id, timeout=PATIENCE_S)


async def test_a_jobs_credentials_reach_no_record_and_no_other_namespace(
    cluster: LocalCluster, job_address: BusAddress
) -> None:
    (job_id,) = [info.job_id for info in cluster.list_jobs(states=[JobStatus.RUNNING])]
    with Cluster(cluster.address, "other") as other:
        other.register_endpoint("theirs", "x")
        endpoints = other.list_endpoints("theirs")
    denied: list[str] = []

    async def on_error(error: Exception) -> None:
        denied.append(str(error))

    user = job_address.user
    job = await nats.connect(
        job_address.url,
        user=user,
        password=job_address.password,
        inbox_prefix=job_address.inbox_prefix(),
        error_cb=on_error,
    )
    try:
        jobs = buckets.jobs_bucket("default")
        stolen = [
            buckets.bucket_key(jobs, job_id),
            buckets.bucket_key(jobs, f"{job_id}.0"),
            buckets.bucket_key(buckets.endpoints_bucket("other"), "x.y.0.1.z"),
            server_subjects.direct_get(buckets.bucket_stream(jobs)),
            server_subjects.direct_get(buckets.bucket_stream(buckets.endpoints_bucket("other"))),
            server_subjects.direct_get(buckets.logs_stream("other")),
            subjects.jobs_submit("other"),
            subjects.jobs_verb("other", "list"),
            subjects.endpoints_verb("other", "list"),
            subjects.worker_verb("worker-0", "look"),
            subjects.heartbeats("worker-0"),
            subjects.capacity(),
            "$JS.API.STREAM.LIST",
            "$JS.API.STREAM.DELETE." + buckets.bucket_stream(jobs),
            "$JS.API.CONSUMER.CREATE." + buckets.logs_stream("default"),
            "$JS.API.STREAM.MSG.GET." + buckets.bucket_stream(jobs),
        ]
        for subject in stolen:
            with pytest.raises((nats.errors.TimeoutError, nats.errors.NoRespondersError)):
                await job.request(subject, b"{}", timeout=0.05)
        for subject in (
            subjects.watch_jobs("other"),
            subjects.watch_any("other"),
            "$KV.>",
            ">",
            "_INBOX.sys.operator.>",
        ):
            await job.subscribe(subject)
        await job.flush()
        await wait_until_async(lambda: len(denied) >= len(stolen) + 5, describe=lambda: denied)
        # What it is for works.
        reply = await job.request(subjects.jobs_verb("default", "status"), json.dumps({"job_ids": [job_id]}).encode())
        assert json.loads(reply.data)["jobs"][0]["status"] == "RUNNING"
    finally:
        await job.close()
    assert cluster.poll(job_id).status is JobStatus.RUNNING
    with Cluster(cluster.address, "other") as other:
        assert other.list_endpoints("theirs") == endpoints
        assert other.list_jobs(states=[JobStatus.PENDING, JobStatus.RUNNING]) == []


# ---- a terminal -----------------------------------------------------------------------------------------------


def test_ctrl_c_at_a_terminal_reaches_the_owner_alone(family: Family, temporary: Path) -> None:
    """The jobs are stopped by the cluster, not by the terminal; so they are also stopped when they ignore it."""
    terminal, side = pty.openpty()
    program = OWNER.format(before="", after=WAIT_IN_CLUSTER, variables=family.variables)
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=family.environment(PYTHONPATH=os.pathsep.join(sys.path)),
        stdin=side,
        stdout=side,
        stderr=subprocess.DEVNULL,
        preexec_fn=_take_terminal,  # noqa: PLW1509 - before exec, in a process without threads of ours
    )
    os.close(side)
    with os.fdopen(terminal, "rb", buffering=0) as screen:
        _read_line(screen)
        os.write(terminal, b"\x03")
        assert process.wait(PATIENCE_S) == -signal.SIGINT
    family.wait_gone()
    assert list(temporary.iterdir()) == []


def _take_terminal() -> None:
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _read_line(screen: IO[bytes]) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        line += screen.read(1)
    return line


def test_of_two_controllers_one_leads_and_one_stands_by(family: Family) -> None:
    with LocalCluster(controllers=2, cpu=4) as cluster:
        assert cluster.wait(cluster.launch(command("true")), timeout=60).status is JobStatus.SUCCEEDED
        logs = [(cluster.store_dir / "logs" / f"{name}.log").read_text() for name in ("controller", "controller-1")]
        lines = [line for log in logs for line in log.splitlines()]
        assert sum(".seat: " in line and line.endswith(" leads") for line in lines) == 1
        assert sum(" stands by; " in line for line in lines) == 1
    family.wait_gone()


def test_what_owner_and_supervisor_left_who_were_killed_together_is_swept_by_the_next_start(
    tmp_path: Path, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    script = "import sys; from fluster import LocalCluster; LocalCluster(); print('up', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script]
    owner = subprocess.Popen(
        command, env=family.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        left = next(tmp_path.glob("fluster-*"))
        (supervisor,) = psutil.Process(owner.pid).children()
        for each in (owner, supervisor):
            each.send_signal(signal.SIGSTOP)  # neither removes the folder when the other dies
        supervisor.kill()
        owner.kill()
    family.wait_gone()
    assert left.exists()
    with LocalCluster() as living:
        wait_until(lambda: not left.exists())
        with LocalCluster():
            wait_until(lambda: len(list(tmp_path.glob("fluster-*/lock"))) == 2)
        assert living.store_dir.exists()
        living.list_jobs()
