"""The command line as a person or a script uses it: real processes against a real cluster."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from fluster.actors import ActorServer, deploy
from fluster.cluster import LocalCluster
from fluster_bus.access.address import BusAddress
from fluster_bus.messages import JobId, JobStatus
from tests.system.job_requests import call
from tests.system.processes import Family
from tests.waiting import wait_until

_COMMAND = [sys.executable, "-c", "from fluster.cli import main; main()"]
_TIMEOUT_S = 120
_LIST_JOBS = "import fluster; print([each.name for each in fluster.Cluster().list_jobs()])"


class Cli:
    """`fluster` in a shell where FLUSTER_CLUSTER_ADDRESS names the cluster."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster

    def environment(self, **variables: str) -> dict[str, str]:
        return {**os.environ, "FLUSTER_CLUSTER_ADDRESS": self.cluster.address, **variables}

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*_COMMAND, *arguments],
            env=self.environment(**variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*_COMMAND, *arguments],
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ok(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self.ok("--output", "json", *arguments))


@pytest.fixture
def cli(cluster: LocalCluster) -> Cli:
    return Cli(cluster)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A FIFO at which jobs wait, until a test writes to it."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path


def _first_line(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline().rstrip("\n")


def _one_line(done: subprocess.CompletedProcess[str]) -> str:
    (line,) = done.stderr.splitlines()
    assert line.startswith("fluster: ")
    return line


# ---- jobs ------------------------------------------------------------------------------------------------


def test_namespaces_are_added_to_a_local_cluster_used_and_dropped(cli: Cli) -> None:
    cli.ok("namespace", "add", "team-a", "--waiting-jobs", "5")
    assert {"default", "team-a"} <= {each["name"] for each in cli.json("namespace", "ls")}
    # Nothing was restarted, and the job has credentials of its namespace.
    job = cli.ok(
        "--namespace", "team-a", "submit", "--follow", "--name", "mine", "--", sys.executable, "-c", _LIST_JOBS
    )
    assert job.splitlines()[-1] == "['mine']"
    cli.ok("namespace", "drop", "team-a", "--yes")
    unknown = cli.run("namespace", "drop", "team-a", "--yes")
    assert unknown.returncode == 4
    assert "no namespace 'team-a': `fluster namespace ls` lists those that there are" in _one_line(unknown)
    cli.ok("namespace", "add", "team-a")
    again = cli.ok(
        "--namespace", "team-a", "submit", "--follow", "--name", "mine", "--", sys.executable, "-c", _LIST_JOBS
    )
    assert again.splitlines()[-1] == "['mine']"
    cli.ok("namespace", "drop", "team-a", "--yes")


def test_a_quota_is_changed_on_a_local_cluster(cli: Cli) -> None:
    cli.ok("namespace", "set", "default", "--weight", "2")
    assert {each["weight"] for each in cli.json("namespace", "ls") if each["name"] == "default"} == {2}
    cli.ok("namespace", "set", "default", "--weight", "1")


def test_submit_prints_the_id_alone_and_logs_shows_what_the_job_wrote(cli: Cli) -> None:
    job_id = cli.ok("submit", "--env", "WORD=hello world", "--", "sh", "-c", 'echo "$WORD"; echo oops >&2').strip()
    info = cli.cluster.wait(JobId(job_id), timeout=60)
    assert (info.status, info.name) == (JobStatus.SUCCEEDED, "sh")
    done = cli.run("logs", job_id)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello world\n", "oops\n")
    lines = [json.loads(line) for line in cli.ok("logs", job_id, "--output", "json").splitlines()]
    assert {(line["stream"], line["text"]) for line in lines} == {("stdout", "hello world"), ("stderr", "oops")}


def test_what_follows_the_command_belongs_to_it(cli: Cli) -> None:
    job_id = cli.ok("submit", "--name", "mine", "echo", "--wait", "--name", "x").strip()
    assert cli.cluster.wait(JobId(job_id), timeout=60).name == "mine"
    assert cli.ok("logs", job_id) == "--wait --name x\n"


def test_waiting_ends_with_the_outcome(cli: Cli) -> None:
    good = cli.run("submit", "--wait", "--output", "json", "--", "true")
    assert (good.returncode, json.loads(good.stdout)["status"]) == (0, "SUCCEEDED")
    bad = cli.run("submit", "--wait", "--", "sh", "-c", "exit 3")
    assert bad.returncode == 1
    assert "FAILED: exit code 3" in _one_line(bad)
    assert bad.stdout.strip() in bad.stderr


def test_following_shows_the_lines_of_all_tasks_and_ends_with_the_outcome(cli: Cli) -> None:
    good = cli.run("submit", "--follow", "--replicas", "2", "--", "sh", "-c", "echo from $FLUSTER_TASK_INDEX")
    assert (good.returncode, sorted(good.stdout.splitlines())) == (0, ["0| from 0", "1| from 1"])
    assert _one_line(good).startswith("fluster: job sh-")
    bad = cli.run("submit", "--follow", "--", "sh", "-c", "echo so far; exit 3")
    assert (bad.returncode, bad.stdout) == (1, "so far\n")
    assert "FAILED: exit code 3" in bad.stderr


def test_why_a_command_could_not_be_run_is_shown_once(cli: Cli) -> None:
    done = cli.run("submit", "--follow", "--", "no-such-program")
    assert done.returncode == 1
    assert done.stderr.count("PATH is") == 1
    assert "command 'no-such-program' was not found (PATH is '" in done.stderr
    assert done.stderr.splitlines()[-1].endswith(" ended as FAILED: FileNotFoundError: see above")


def test_a_worker_that_is_not_there_is_told_at_once(cli: Cli) -> None:
    done = cli.run("submit", "--on", "wroker-1", "--", "true")
    job_id = done.stdout.strip()
    try:
        assert done.returncode == 0
        assert "no worker named 'wroker-1' has been seen; did you mean 'worker-1'" in _one_line(done)
        explained = cli.ok("explain", job_id)
        is_given_up = "UNSCHEDULABLE" in explained  # on a slow machine it is by then, and says it otherwise
        told = "no worker wroker-1 takes work" if is_given_up else "no worker named 'wroker-1' has been seen"
        assert told in explained
    finally:
        cli.ok("cancel", job_id)
    assert cli.run("submit", "--on", "worker-1", "--", "true").stderr == ""


def test_logs_that_are_followed_come_as_they_are_written_and_end_with_the_job(cli: Cli, gate: Path) -> None:
    job_id = cli.ok("submit", "--", "sh", "-c", f"echo first; read line <{gate}; echo $line").strip()
    with cli.start("logs", "-f", job_id) as following:
        assert _first_line(following.stdout) == "first"
        gate.write_text("second\n")
        rest, errors = following.communicate(timeout=_TIMEOUT_S)
    assert (following.returncode, rest, errors) == (0, "second\n", "")


def test_an_interrupted_wait_leaves_the_job_and_cancel_ends_it(cli: Cli) -> None:
    with cli.start("submit", "--follow", "--", "sh", "-c", "echo up; exec sleep 600") as following:
        job_id = _first_line(following.stderr).rpartition(" ")[2]
        assert _first_line(following.stdout) == "up"
        following.send_signal(signal.SIGINT)
        _, errors = following.communicate(timeout=_TIMEOUT_S)
    assert following.returncode == 130
    assert "goes on" in errors
    assert "Traceback" not in errors
    assert cli.cluster.poll(JobId(job_id)).status is JobStatus.RUNNING

    running = cli.ok("ps").splitlines()
    assert running[0].split() == [
        "ID",
        "NAME",
        "STATE",
        "TASKS",
        "WORKER",
        "AGE",
        "DURATION",
        "RESOURCES",
        "COMMAND",
        "ERROR",
    ]
    (row,) = [line.split() for line in running if line.startswith(job_id)]
    assert row[1:4] == ["sh", "RUNNING", "0/1"]
    assert row[4].startswith("worker-")

    assert cli.ok("cancel", job_id[:-2]).strip() == job_id
    assert cli.cluster.wait(JobId(job_id), timeout=60).status is JobStatus.KILLED
    assert job_id not in cli.ok("ps")
    (info,) = [job for job in cli.json("ps", "--all") if job["job_id"] == job_id]
    assert info["status"] == "KILLED"
    again = cli.run("cancel", job_id)
    assert again.returncode == 0
    assert "had ended before, as KILLED" in _one_line(again)


def test_status_tells_about_the_job_and_its_tasks(cli: Cli) -> None:
    job_id = cli.ok("submit", "--wait", "--replicas", "2", "--", "true").strip()
    shown = cli.ok("status", job_id)
    assert job_id in shown
    tasks = [line.split() for line in shown.splitlines()[-2:]]
    assert [(task[0], task[1], task[4]) for task in tasks] == [("0", "SUCCEEDED", "0"), ("1", "SUCCEEDED", "0")]
    info = cli.json("status", job_id)
    assert [task["exit_code"] for task in info["tasks"]] == [0, 0]


@pytest.mark.parametrize("program", ["true", "sleep"])
def test_what_a_job_was_asked_to_run_is_shown_without_its_secrets(cli: Cli, program: str) -> None:
    wanted = ("--cpu", "2", "--memory", "64MiB", "--cwd", "/", "--env", "STEPS=10", "--env", "HF_TOKEN=hidden")
    ends = ("--wait",) if program == "true" else ()
    job_id = cli.ok("submit", *ends, *wanted, "--", program, "600").strip()
    for shown in (cli.ok("status", job_id), cli.ok("ps", "--all")):
        assert "2 CPU, 64 MiB" in shown
        assert f"{program} 600" in shown
        assert "hidden" not in shown
    assert "STEPS=10" in cli.ok("status", job_id)
    assert re.search(r"^environment +cwd /$", cli.ok("status", job_id), re.MULTILINE)
    [listed] = [job for job in cli.json("ps", "--all") if job["job_id"] == job_id]
    for info in (cli.json("status", job_id), listed):
        details = info["details"]
        assert details["command"] == [program, "600"]
        assert details["resources"]["cpu"] == 2
        variables = details["environment"]["env_vars"]
        assert (variables["STEPS"], variables["HF_TOKEN"]) == ("10", "***")
    cli.ok("cancel", job_id)


def test_a_beginning_that_fits_several_jobs_is_refused_with_their_ids(cli: Cli) -> None:
    ids = [cli.ok("submit", "--name", "twin", "--", "true").strip() for _ in range(2)]
    done = cli.run("status", "twin-")
    assert done.returncode == 4
    assert all(job_id in _one_line(done) for job_id in ids)


# ---- actors and workers ----------------------------------------------------------------------------------


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def add(self, amount: int, *, times: int = 1) -> dict[str, int]:
        """Count."""
        self.value += amount * times
        return {"value": self.value}

    def fail(self, text: str) -> None:
        raise ValueError(text)

    def pid(self) -> int:
        return os.getpid()


@pytest.fixture
def counter(cluster: LocalCluster) -> Iterator[str]:
    server = ActorServer(cluster)
    server.register("cli-counter", Counter())
    server.serve_background()
    yield "cli-counter"
    server.shutdown()


def test_actors_are_listed_and_called_in_json(cli: Cli, counter: str) -> None:
    lines = [line.split()[:5] for line in cli.ok("actors", "cli-").splitlines()]
    assert lines == [["NAME", "MEMBERS", "STATES", "RESTARTS", "WORKERS"], [counter, "1", "1", "ready", "0"]]
    [member] = cli.json("actors", "cli-")
    assert (member["name"], member["state"], member["restarts"]) == (counter, "ready", 0)
    assert cli.json("call", counter, "add", "-5", "--kw", "times=2") == {"value": -10}

    failed = cli.run("call", counter, "fail", '"no way"')
    assert failed.returncode == 1
    assert "cli-counter.fail failed: ValueError: no way" in _one_line(failed)
    assert cli.run("call", counter, "add", "five").returncode == 2
    nobody = cli.run("call", "nobody", "add", "1")
    assert nobody.returncode == 4
    assert "no actor serves 'nobody'" in _one_line(nobody)
    for misspelled in (("call", "cli-conter", "add", "1"), ("actor", "cli-conter")):
        done = cli.run(*misspelled)
        assert done.returncode == 4
        assert "no actor serves 'cli-conter' in namespace 'default'; did you mean 'cli-counter'?" in _one_line(done)


def test_an_actor_is_shown_with_its_methods(cli: Cli, counter: str) -> None:
    lines = cli.ok("actor", counter, "--schemas").splitlines()
    assert lines[0].split() == ["TASK", "STATE", "RESTARTS", "WORKER", "JOB", "ENDPOINT", "LAST", "ERROR"]
    assert lines[1].split()[:3] == ["-", "ready", "0"]
    assert any("add(amount: int, *, times: int = 1)" in line and "Count." in line for line in lines)
    assert any(line.startswith("  parameters {") and '"amount": {"type": "integer"}' in line for line in lines)
    shown = cli.json("actor", counter)
    assert [member["state"] for member in shown["members"]] == ["ready"]
    add, fail, _pid = shown["methods"]
    assert (add["name"], add["doc"], fail["name"]) == ("add", "Count.", "fail")
    assert add["parameters"]["required"] == ["amount"]
    nobody = cli.run("actor", "nobody")
    assert nobody.returncode == 4
    assert "no actor serves 'nobody'" in _one_line(nobody)


def test_how_actors_are_is_shown(cli: Cli) -> None:
    pool = deploy(cli.cluster, Counter, name="cli-deployed", replicas=2)
    try:
        pids = pool.broadcast().pid().results()
        os.kill(pids[0], signal.SIGKILL)
        wait_until(lambda: any(member.last_error for member in pool.members()))
        rows = {line.split()[0]: line for line in cli.ok("actor", "cli-deployed").splitlines()[1:3]}
        assert sorted(rows) == ["0", "1"]
        assert sum("killed by SIGKILL" in row and " dead " in row for row in rows.values()) == 1
        assert "1 ready, 1 dead" in cli.ok("actors", "cli-deployed")
    finally:
        pool.shutdown()


def test_workers_and_their_jobs_are_found_by_the_beginning_of_their_ids(cli: Cli) -> None:
    job_id = cli.ok("submit", "--name", "only-this-sleeper", "--", "sleep", "600").strip()
    running = next(info for info in cli.cluster.watch(JobId(job_id)) if info.status is JobStatus.RUNNING)
    worker = str(running.worker_id)
    several = cli.run("worker", "list", "worker-")
    assert several.returncode == 4
    assert "2 workers begin with 'worker-': worker-0, worker-1; write more of it" in _one_line(several)
    assert cli.ok("worker", "logs", worker, "only-this-sleep") == ""
    assert cli.ok("worker", "kill", worker, "only-this-sleep") == f"{job_id}.0.1\n"
    shortened = cli.run("worker", "drain", "worker-")
    assert shortened.returncode == 4
    assert "no worker 'worker-' answers" in _one_line(shortened), "what sends one away takes no beginnings"
    nobody = cli.run("worker", "health", "nobody")
    assert nobody.returncode == 4
    assert "no worker 'nobody' answers" in _one_line(nobody)


def test_workers_are_listed(cli: Cli) -> None:
    names = [line.split()[:2] for line in cli.ok("workers").splitlines()[1:]]
    assert names == [["worker-0", "alive"], ["worker-1", "alive"]]
    assert {worker["info"]["worker_id"] for worker in cli.json("workers")} == {"worker-0", "worker-1"}


# ---- when it goes wrong ----------------------------------------------------------------------------------


def test_wrong_addresses_and_credentials_are_told_in_one_line(cli: Cli, tmp_path: Path) -> None:
    nobody = cli.run("--address", "nats://u:p@127.0.0.1:1", "ps")
    assert nobody.returncode == 3
    assert "no nats-server answers" in _one_line(nobody)

    right = BusAddress.parse(cli.cluster.address)
    wrong = cli.run("ps", FLUSTER_CLUSTER_ADDRESS=BusAddress(right.url, right.user, "hunter2").to_url())
    assert wrong.returncode == 3
    assert "refused the credentials" in _one_line(wrong)
    assert "hunter2" not in wrong.stderr

    file = tmp_path / "address.json"
    right.save(file)
    assert cli.run("ps", FLUSTER_CLUSTER_ADDRESS=str(file)).returncode == 0
    file.chmod(0o644)
    readable = cli.run("ps", FLUSTER_CLUSTER_ADDRESS=str(file))
    assert readable.returncode == 3
    assert "chmod 600" in _one_line(readable)


def test_what_is_not_there_is_told_in_one_line(cli: Cli) -> None:
    job = cli.run("status", "no-such-job")
    assert (job.returncode, job.stdout) == (4, "")
    assert "no job 'no-such-job'" in _one_line(job)
    namespace = cli.run("ps", "--namespace", "nowhere")
    assert namespace.returncode == 4
    assert "'nowhere'" in _one_line(namespace)
    assert cli.run("ps", "--namespace", "other").returncode == 0


def test_a_reader_that_leaves_is_no_error(cli: Cli) -> None:
    job_id = cli.ok("submit", "--", "sh", "-c", "yes | head -n 200000").strip()
    cli.cluster.wait(JobId(job_id), timeout=60)
    with cli.start("logs", job_id) as reading:
        assert _first_line(reading.stdout) == "y"
        assert reading.stdout is not None
        reading.stdout.close()
        assert reading.wait(_TIMEOUT_S) == 141
        assert reading.stderr is not None
        assert reading.stderr.read() == ""


# ---- a cluster of one's own ------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_up_runs_until_it_is_told_to_end_and_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    family = Family()
    with subprocess.Popen(
        [*_COMMAND, "up", "--namespace", "default", "--namespace", "second", "--store-dir", str(tmp_path / "a store")],
        env=family.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as up:
        line = _first_line(up.stdout)
        assert line.startswith("export FLUSTER_CLUSTER_ADDRESS=")
        script = f'{line}; exec "$@"'
        if number is signal.SIGTERM:  # once is enough
            used = subprocess.run(
                ["sh", "-c", script, "sh", *_COMMAND, "submit", "--namespace", "second", "--wait", "--", "true"],
                env=os.environ,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
            assert used.returncode == 0, used.stderr
        follow = ["submit", "--follow", "--", "sh", "-c", "echo up; exec sleep 600"]
        with subprocess.Popen(
            ["sh", "-c", script, "sh", *_COMMAND, *follow], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as following:
            assert _first_line(following.stdout) == "up"
            up.send_signal(number)
            _, errors = up.communicate(timeout=_TIMEOUT_S)
            _, said = following.communicate(timeout=_TIMEOUT_S)
    assert up.returncode == (0 if number is not signal.SIGKILL else -signal.SIGKILL), errors
    assert "Traceback" not in errors
    assert (following.returncode, said.splitlines()[-1].endswith("has ended: it is waited for no longer")) == (
        3,
        True,
    ), said
    family.wait_gone()
    assert not (tmp_path / "a store/address.json").exists()


def test_up_ends_when_its_supervisor_does() -> None:
    family = Family()
    with subprocess.Popen(
        [*_COMMAND, "up"], env=family.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as up:
        _first_line(up.stdout)
        (supervisor,) = [process for process in family.named("fluster_services.supervisor") if process.ppid() == up.pid]
        supervisor.kill()
        _, errors = up.communicate(timeout=_TIMEOUT_S)
    assert up.returncode == 3, errors
    assert "supervisor ended" in errors
    assert "Traceback" not in errors
    family.wait_gone()


def test_up_that_cannot_start_says_why_in_one_line(cluster: LocalCluster) -> None:
    port = cluster.address.rpartition(":")[2]
    done = subprocess.run(
        [*_COMMAND, "up", "--port", port], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    assert done.returncode == 3
    assert port in _one_line(done)


# ---- results --------------------------------------------------------------------------------------------------


class Trap:
    """Makes a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return self._mark.touch, ()


def test_a_result_is_shown_and_written(cli: Cli, tmp_path: Path) -> None:
    job_id = cli.cluster.launch(call(dict, [("one", 1)]))
    assert cli.ok("result", job_id).strip() == "{'one': 1}"
    assert cli.json("result", job_id) == {"job_id": job_id, "result": {"one": 1}}
    cli.ok("result", "--pickled", str(tmp_path / "file"), job_id)
    assert pickle.loads((tmp_path / "file").read_bytes()) == {"one": 1}
    assert cli.run("result", "--task", "1", job_id).returncode == 2


def test_a_result_runs_no_code_of_the_jobs_unless_that_is_asked_for(cli: Cli, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    job_id = cli.cluster.launch(call(lambda: Trap(mark)))
    refused = cli.run("result", job_id)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"what job {job_id} returned is not plain data" in refused.stderr
    cli.ok("result", "--pickled", str(tmp_path / "file"), job_id)
    assert not mark.exists()
    assert cli.ok("result", "--unpickle", job_id).strip() == "None"
    assert mark.exists()


def test_a_job_that_failed_has_no_result_to_show(cli: Cli) -> None:
    job_id = cli.cluster.launch(call(int, "no number"))
    done = cli.run("result", job_id)
    assert (done.returncode, done.stdout) == (1, "")
    assert "ended as FAILED: ValueError: invalid literal" in done.stderr
