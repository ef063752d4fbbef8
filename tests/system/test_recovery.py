"""What is killed comes back, and nothing is lost or done twice."""

import contextlib
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from fluster.cluster import Cluster, LocalCluster
from fluster.errors import JobRefusedError
from fluster_bus.messages import Event, JobId, JobInfo, JobRequest, JobStatus, ResourceConfig
from fluster_services.config import Timing
from tests.system.daemons import PATIENT, QUICK, Daemons
from tests.system.histories import check_history
from tests.system.job_requests import READY, call, command, sleeper, texts, wait_ready
from tests.system.processes import Family
from tests.waiting import wait_until

PATIENCE_S = 60
_NAME_BYTES = 15  # what Linux keeps of the name of a process
SMALL = ResourceConfig.with_cpu(0.5, memory="128MiB")


# ---- evidence -----------------------------------------------------------------------------------------------


class Ledger:
    """A file to which each attempt adds a line when it begins."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def request(self, *, name: str = "work", seconds: float = 0.1) -> JobRequest:
        """A job that writes its line and takes a moment."""
        path = str(self.path)

        def work() -> None:
            import os
            import time

            file = os.open(path, os.O_WRONLY | os.O_APPEND)
            os.write(file, f"{os.environ['FLUSTER_JOB_ID']} {os.environ['FLUSTER_ATTEMPT']}\n".encode())
            os.close(file)
            time.sleep(seconds)

        return call(work, name=name, resources=SMALL)

    def lines(self) -> list[tuple[str, int]]:
        """(job, attempt), in the order in which they began."""
        return [(job, int(attempt)) for job, attempt in map(str.split, self.path.read_text().splitlines())]

    def wait_lines(self, count: int) -> None:
        wait_until(lambda: len(self.lines()) >= count, PATIENCE_S, lambda: len(self.lines()))

    def check(self, infos: list[JobInfo], stories: Mapping[str, list[Event]] | None = None) -> None:
        """No attempt ran twice; with `stories`, the histories of the tasks, no job did."""
        ran = Counter(self.lines())
        assert [place for place, times in ran.items() if times > 1] == []
        last = {(info.job_id, info.tasks[0].attempt) for info in infos}
        assert last <= ran.keys()
        if stories is not None:
            twice = [job for job, times in Counter(job for job, _ in ran).items() if times > 1]
            assert {job: [event.transition.reason for event in stories[f"{job}.0"]] for job in twice} == {}
            assert len(ran) == len(infos)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


# ---- a cluster that mends itself ------------------------------------------------------------------------------


def is_gone(process: psutil.Process) -> bool:
    """Whether it runs no more, also before its exit code was read."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Victims:
    """The processes of a LocalCluster, by what ps shows them as."""

    def __init__(self, family: Family) -> None:
        (self._supervisor,) = [
            process for process in psutil.Process().children() if process in family.named("fluster_services")
        ]

    def find(self, what: str) -> psutil.Process:
        """The one that runs, as soon as it shows what it is: one that is started again may have to come first."""
        return wait_until(lambda: self._shown_as(what))[0]

    def _shown_as(self, what: str) -> list[psutil.Process]:
        name = what if what == "nats-server" else f"fluster-{what}"[:_NAME_BYTES]
        for child in self._supervisor.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name() == name:
                    return [child]
        return []

    def kill(self, what: str) -> None:
        victim = self.find(what)
        victim.kill()
        wait_until(lambda: is_gone(victim))


@pytest.fixture
def local(family: Family) -> Iterator[LocalCluster]:
    with LocalCluster(cpu=16) as cluster:
        yield cluster
    family.wait_gone()


@pytest.mark.parametrize("what", ["worker", "controller", "nats-server"])
def test_two_hundred_jobs_survive(local: LocalCluster, family: Family, ledger: Ledger, what: str) -> None:
    victims = Victims(family)
    job_ids = local.launch_many([ledger.request() for _ in range(200)])
    ledger.wait_lines(60)
    victims.kill(what)
    infos = local.wait(job_ids, timeout=PATIENCE_S)
    assert Counter(info.status for info in infos) == {JobStatus.SUCCEEDED: 200}
    ledger.check(infos, check_history(local, infos))
    later = local.launch(ledger.request())
    assert local.wait(later, timeout=PATIENCE_S).status is JobStatus.SUCCEEDED


@pytest.mark.slow
def test_two_hundred_jobs_survive_everything(local: LocalCluster, family: Family, ledger: Ledger) -> None:
    dice = random.Random(os.urandom(8))
    victims = Victims(family)
    job_ids = local.launch_many([ledger.request() for _ in range(200)])
    for number, what in enumerate(dice.sample(["worker", "controller", "nats-server"], 3)):
        ledger.wait_lines(30 + 45 * number + dice.randrange(20))
        victims.kill(what)
    infos = local.wait(job_ids, timeout=PATIENCE_S)
    assert Counter(info.status for info in infos) == {JobStatus.SUCCEEDED: 200}
    ledger.check(infos, check_history(local, infos))


@pytest.mark.slow
def test_jobs_survive_the_loss_of_all_at_once_while_they_are_launched(
    local: LocalCluster, family: Family, ledger: Ledger
) -> None:
    victims = Victims(family)
    doomed = [victims.find(what) for what in ("worker", "controller", "nats-server")]
    random.Random(os.urandom(8)).shuffle(doomed)
    job_ids: list[JobId] = []

    def launch() -> None:
        for _ in range(10):
            job_ids.extend(local.launch_many([ledger.request() for _ in range(6)]))

    launching = threading.Thread(target=launch)
    launching.start()
    ledger.wait_lines(15)
    for victim in doomed:
        victim.kill()
    launching.join(PATIENCE_S)
    assert len(job_ids) == 60
    infos = local.wait(job_ids, timeout=PATIENCE_S)
    assert Counter(info.status for info in infos) == {JobStatus.SUCCEEDED: 60}
    ledger.check(infos, check_history(local, infos))
    assert len(ledger.lines()) == 60, "no submit was recorded twice"


@pytest.mark.parametrize("what", ["worker", "controller", "nats-server"])
def test_clients_go_on_without_being_told(local: LocalCluster, family: Family, what: str) -> None:
    victims = Victims(family)
    job_id = local.launch(sleeper())
    wait_ready(local, job_id)
    local.register_endpoint("of-the-client", "here")
    victims.kill(what)
    # Right away, while whatever it was is still gone.
    assert local.poll(job_id).status is JobStatus.RUNNING
    assert local.wait(local.launch(command("true")), timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
    assert [endpoint.address for endpoint in local.lookup_endpoints("of-the-client")] == ["here"]
    assert texts(local, job_id) == [READY]
    local.terminate(job_id)
    info = local.wait(job_id, timeout=PATIENCE_S)
    assert (info.status, info.tasks[0].attempt) == (JobStatus.KILLED, 1)


# ---- a worker that is away ------------------------------------------------------------------------------------


@pytest.fixture
def timing() -> Timing:
    return PATIENT


quick = pytest.mark.parametrize("timing", [QUICK], ids=[""])


@pytest.fixture
def daemons(tmp_path: Path, family: Family, timing: Timing) -> Iterator[Daemons]:
    with Daemons(tmp_path / "cluster", family, timing=timing) as daemons:
        daemons.start_controller()
        yield daemons


@pytest.fixture
def client(daemons: Daemons) -> Iterator[Cluster]:
    with daemons.connect() as cluster:
        yield cluster


def watchful(folder: Path, **fields: object) -> JobRequest:
    """A job that tells who runs it, and whether the attempt before it still lives."""
    script = f"""
        for file in {folder}/pid.*; do
            test -e $file && kill -0 $(cat $file) 2>/dev/null && echo overlap with $file
        done
        echo $$ > {folder}/pid.$FLUSTER_ATTEMPT
        echo {READY}
        exec sleep 600
    """
    return command("sh", "-c", script, name="watchful", **fields)  # type: ignore[arg-type]


def gone(folder: Path, attempt: int) -> bool:
    try:
        os.kill(int((folder / f"pid.{attempt}").read_text()), 0)
    except ProcessLookupError:
        return True
    return False


def check_adopted(client: Cluster, job_id: JobId) -> None:
    """The worker runs new tasks, and the job's first attempt as before, which it can stop."""
    second = client.launch(command("true"))
    assert client.wait(second, timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
    assert (client.poll(job_id).status, client.poll(job_id).tasks[0].attempt) == (JobStatus.RUNNING, 1)
    client.terminate(job_id)
    info = client.wait(job_id, timeout=PATIENCE_S)
    assert (info.status, info.tasks[0].attempt) == (JobStatus.KILLED, 1)


def test_a_worker_that_comes_back_in_time_adopts_what_it_left(
    daemons: Daemons, client: Cluster, tmp_path: Path
) -> None:
    daemons.start_worker()
    job_id = client.launch(watchful(tmp_path))
    wait_ready(client, job_id)
    daemons.kill("w1")
    daemons.start_worker()
    assert not gone(tmp_path, 1)
    check_adopted(client, job_id)
    assert texts(client, job_id) == [READY]
    assert gone(tmp_path, 1)


def test_a_task_that_was_offered_before_its_worker_was_back_is_offered_again(daemons: Daemons, client: Cluster) -> None:
    """The controller has found the restarted server first. The worker is heard in time, with the room that it had."""
    daemons.start_worker()
    assert client.wait(client.launch(command("true")), timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
    daemons.kill("w1", signal.SIGSTOP)
    daemons.restart_server()
    job_id = client.launch(command("true"))
    wait_until(lambda: "no connection to it" in client.explain(job_id), PATIENCE_S, lambda: client.explain(job_id))
    daemons.kill("w1", signal.SIGCONT)
    info = client.wait(job_id, timeout=PATIENCE_S)
    assert (info.status, info.tasks[0].attempt) == (JobStatus.SUCCEEDED, 1)


def test_a_worker_without_its_template_ends_and_the_next_adopts_what_it_left(
    daemons: Daemons, client: Cluster, tmp_path: Path
) -> None:
    """It can start nothing, and is started again by whatever keeps it."""
    daemons.start_worker()
    job_id = client.launch(watchful(tmp_path))
    wait_ready(client, job_id)
    (template,) = daemons.family.named("fluster-templ")
    template.kill()
    worker = daemons.running.pop("w1")
    assert worker.wait(20) == 1
    daemons.start_worker()
    check_adopted(client, job_id)


def test_a_task_that_ended_while_its_worker_was_away_is_told_when_it_is_back(
    daemons: Daemons, client: Cluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    daemons.start_worker()
    job_id = client.launch(command("sh", "-c", f"echo {READY}; cat {gate}; echo done; touch {tmp_path}/done; exit 3"))
    wait_ready(client, job_id)
    daemons.kill("w1")
    gate.write_text("go\n")
    wait_until((tmp_path / "done").exists)
    daemons.start_worker()
    info = client.wait(job_id, timeout=PATIENCE_S)
    assert (info.status, info.exit_code, info.tasks[0].attempt) == (JobStatus.FAILED, 3, 1)
    assert texts(client, job_id) == [READY, "go", "done"]


def test_a_wish_that_is_uttered_while_the_worker_is_away_is_fulfilled_when_it_is_back(
    daemons: Daemons, client: Cluster, tmp_path: Path
) -> None:
    daemons.start_worker()
    job_id = client.launch(watchful(tmp_path))
    wait_ready(client, job_id)
    daemons.kill("w1")
    client.terminate(job_id)
    daemons.start_worker()
    info = client.wait(job_id, timeout=PATIENCE_S)
    assert (info.status, info.tasks[0].attempt) == (JobStatus.KILLED, 1)
    assert gone(tmp_path, 1)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@quick
def test_what_a_lost_worker_ran_is_tried_again(
    daemons: Daemons, client: Cluster, tmp_path: Path, how: signal.Signals
) -> None:
    daemons.start_worker("w1")
    job_id = client.launch(watchful(tmp_path))
    wait_ready(client, job_id)
    daemons.kill("w1", how)
    daemons.start_worker("w2")
    wait_until((tmp_path / "pid.2").exists, PATIENCE_S, lambda: client.poll(job_id))
    assert gone(tmp_path, 1)
    wait_ready(client, job_id, lines=2)
    (task,) = client.poll(job_id).tasks
    assert (task.worker_id, task.attempt, task.preemptions, task.failures) == ("w2", 2, 1, 0)
    # The old worker is back: it finds that the attempt is not its own any more, and serves on.
    if how is signal.SIGSTOP:
        daemons.kill("w1", signal.SIGCONT)
    else:
        daemons.start_worker("w1")
    wait_until(lambda: {status.info.worker_id for status in client.list_workers() if status.alive} == {"w1", "w2"})
    assert client.poll(job_id).tasks[0].attempt == 2
    whole = ResourceConfig.with_cpu(daemons.cpu)
    assert client.wait(client.launch(command("true", resources=whole)), timeout=PATIENCE_S).worker_id == "w1"
    client.terminate(job_id)
    info = client.wait(job_id, timeout=PATIENCE_S)
    assert (info.status, info.tasks[0].attempt) == (JobStatus.KILLED, 2)
    assert texts(client, job_id) == [READY, READY], "the attempts overlapped"
    story = check_history(client, [info])[f"{job_id}.0"]
    assert [event.transition.state for event in story] == [
        JobStatus.PENDING,
        JobStatus.BUILDING,
        JobStatus.RUNNING,
        JobStatus.WORKER_FAILED,
        JobStatus.PENDING,
        JobStatus.BUILDING,
        JobStatus.RUNNING,
        JobStatus.KILLED,
    ]


@quick
def test_a_lost_worker_is_the_end_when_the_budget_is_spent(daemons: Daemons, client: Cluster, tmp_path: Path) -> None:
    daemons.start_worker()
    job_id = client.launch(watchful(tmp_path, max_retries_preemption=0))
    wait_ready(client, job_id)
    daemons.kill("w1")
    info = client.wait(job_id, timeout=PATIENCE_S)
    assert info.status is JobStatus.WORKER_FAILED
    assert info.error_message == "worker w1 was not heard for 3 s"
    assert gone(tmp_path, 1)
    assert client.list_workers() == []


@quick
def test_the_endpoints_of_a_lost_worker_are_removed(daemons: Daemons, client: Cluster) -> None:
    def serve() -> None:
        from fluster.cluster import current_cluster

        current_cluster().register_endpoint("served", "x")
        print(READY)
        threading.Event().wait()

    daemons.start_worker()
    job_id = client.launch(call(serve))
    wait_ready(client, job_id)
    assert [endpoint.job_id for endpoint in client.lookup_endpoints("served")] == [job_id]
    daemons.kill("w1")
    wait_until(lambda: client.lookup_endpoints("served") == [])
    client.terminate(job_id)
    assert client.wait(job_id, timeout=PATIENCE_S).status is JobStatus.KILLED


@quick
def test_a_worker_that_is_cut_off_stops_its_tasks(daemons: Daemons, client: Cluster, tmp_path: Path) -> None:
    """A worker that cannot reach the bus cannot know whether the task was given to another."""
    daemons.start_worker()
    job_id = client.launch(watchful(tmp_path))
    wait_ready(client, job_id)
    daemons.kill_server()
    wait_until(lambda: gone(tmp_path, 1))
    daemons.server.start()
    wait_until((tmp_path / "pid.2").exists, PATIENCE_S, lambda: client.poll(job_id))
    wait_ready(client, job_id, lines=2)
    assert client.poll(job_id).tasks[0].preemptions == 1
    client.terminate(job_id)
    assert client.wait(job_id, timeout=PATIENCE_S).status is JobStatus.KILLED
    assert texts(client, job_id) == [READY, READY]


# ---- a controller that is away --------------------------------------------------------------------------------


def test_a_job_can_be_launched_while_no_controller_is_there(daemons: Daemons, client: Cluster) -> None:
    daemons.start_worker()
    daemons.kill("controller")
    job_ids = client.launch_many([command("true"), command("false")])
    assert [client.poll(job_id).status for job_id in job_ids] == [JobStatus.PENDING, JobStatus.PENDING]
    daemons.start_controller()
    infos = client.wait(job_ids, timeout=PATIENCE_S)
    assert [info.status for info in infos] == [JobStatus.SUCCEEDED, JobStatus.FAILED]
    check_history(client, infos)


def test_a_job_that_is_refused_later_is_told_to_whoever_waits(daemons: Daemons, client: Cluster) -> None:
    daemons.start_worker()
    taken = client.launch(command("true", job_id="taken"))
    client.wait(taken, timeout=PATIENCE_S)
    with daemons.connect() as another:
        daemons.kill("controller")
        assert another.launch(command("false", job_id="taken")) == "taken"
        daemons.start_controller()
        with pytest.raises(JobRefusedError, match="'taken' exists already"):
            another.wait(JobId("taken"), timeout=PATIENCE_S)


def test_a_controller_that_dies_right_after_a_submit_loses_nothing(daemons: Daemons, client: Cluster) -> None:
    """It is stopped with the submits in its hands, and killed."""
    daemons.start_worker()
    submitted: list[JobId] = []
    daemons.kill("controller", signal.SIGSTOP)
    launching = threading.Thread(
        target=lambda: submitted.extend(client.launch_many([command("true", replicas=3) for _ in range(10)]))
    )
    launching.start()
    daemons.kill("controller")
    daemons.start_controller()
    launching.join(PATIENCE_S)
    infos = client.wait(submitted, timeout=PATIENCE_S)
    assert Counter(info.status for info in infos) == {JobStatus.SUCCEEDED: 10}
    assert {len(info.tasks) for info in infos} == {3}
    check_history(client, infos)


def test_a_task_that_ends_while_no_controller_is_there_is_seen_by_the_next(
    daemons: Daemons, client: Cluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    daemons.start_worker()
    script = f"echo {READY}; cat {gate}; test $FLUSTER_ATTEMPT -ge 2"
    job_id = client.launch(command("sh", "-c", script, max_retries_failure=1))
    wait_ready(client, job_id)
    daemons.kill("controller")
    gate.write_text("")
    daemons.start_controller()
    gate.write_text("")  # returns when the second attempt reads
    info = client.wait(job_id, timeout=PATIENCE_S)
    assert (info.status, info.tasks[0].attempt, info.tasks[0].failures) == (JobStatus.SUCCEEDED, 2, 1)
    check_history(client, [info])


# ---- what takes too long in a cluster of usual timing -----------------------------------------------------------


def test_what_ignores_sigterm_is_killed_after_its_grace(daemons: Daemons, client: Cluster, tmp_path: Path) -> None:
    daemons.start_worker()
    script = f"trap '' TERM; echo $$ > {tmp_path}/pid.1; echo {READY}; while :; do sleep 600; done"
    job_id = client.launch(command("sh", "-c", script))
    wait_ready(client, job_id)
    client.terminate(job_id, reason="enough")
    info = client.wait(job_id, timeout=PATIENCE_S)
    assert (info.status, info.error_message) == (JobStatus.KILLED, "enough")
    assert gone(tmp_path, 1)


def test_processes_that_left_the_group_end_with_the_job(daemons: Daemons, client: Cluster, tmp_path: Path) -> None:
    daemons.start_worker()
    script = f"(setsid sh -c 'echo $$ > {tmp_path}/pid.1; echo {READY}; exec sleep 600' &); sleep 600"
    job_id = client.launch(command("sh", "-c", script))
    wait_ready(client, job_id)
    client.terminate(job_id)
    assert client.wait(job_id, timeout=PATIENCE_S).status is JobStatus.KILLED
    assert gone(tmp_path, 1)


def test_what_fits_nowhere_is_given_up_with_the_reason(daemons: Daemons, client: Cluster) -> None:
    daemons.start_worker()
    info = client.wait(client.launch(command("true", resources=ResourceConfig.with_cpu(64))), timeout=PATIENCE_S)
    assert info.status is JobStatus.UNSCHEDULABLE
    assert "needs 64 CPUs" in info.error_message
    assert "w1, has 16 CPUs" in info.error_message
    with_gpu = client.launch(command("true", resources=ResourceConfig.with_gpu("h100", 2)))
    info = client.wait(with_gpu, timeout=PATIENCE_S)
    assert info.status is JobStatus.UNSCHEDULABLE
    assert "2 x gpu h100" in info.error_message


def test_what_fits_nowhere_yet_waits_for_a_worker(daemons: Daemons, client: Cluster) -> None:
    job_id = client.launch(command("true"))
    assert client.poll(job_id).status is JobStatus.PENDING
    daemons.start_worker()
    assert client.wait(job_id, timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
