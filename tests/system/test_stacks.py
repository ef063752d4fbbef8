"""Where a task that hangs is, as its owner asks."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from fluster import AsyncCluster
from fluster.cluster.jobs.job_requests import ask_stack
from fluster.errors import JobNotFoundError, StackError
from fluster_bus.messages import JobId
from tests.system.job_requests import call, command, wait_ready
from tests.system.test_cli import Cli, cli  # noqa: F401 - a fixture


def _hang() -> None:
    def waits_for_the_lock_of_another() -> None:
        print("ready", flush=True)
        time.sleep(600)

    waits_for_the_lock_of_another()


@pytest.fixture
def hanging(cli: Cli) -> Iterator[JobId]:  # noqa: F811
    job_id = cli.cluster.launch(call(_hang, name="hanging", replicas=2))
    wait_ready(cli.cluster, job_id, lines=2)
    yield job_id
    cli.cluster.terminate(job_id)


def test_it_is_shown_for_all_tasks_or_one(cli: Cli, hanging: JobId) -> None:  # noqa: F811
    shown = cli.ok("stack", hanging)
    assert shown.count("waits_for_the_lock_of_another (") == 2
    assert "task_process.py" not in shown
    assert "runpy" not in shown
    assert "\ntask 1, attempt 1, on worker-" in shown
    assert (
        "supervisor" not in shown.split("thread")[0]
    )  # whose command line it has, as a copy of a process of Fluster's
    (told,) = cli.json("stack", hanging, "--task", "1")
    assert (told["task"], told["attempt"], told["cut"]) == (1, 1, False)
    threads = [thread for process in told["processes"] for thread in process["threads"]]
    (main,) = [thread for thread in threads if thread["name"] == "MainThread"]
    frame = main["frames"][0]
    assert (frame["function"].split(".")[-1], frame["file"]) == ("waits_for_the_lock_of_another", __file__)


def test_a_program_asks_for_it_too(cli: Cli, hanging: JobId) -> None:  # noqa: F811
    cluster = cli.cluster
    found = cluster.stack(hanging)
    assert (found.job_id, found.running, [each.task for each in found.tasks]) == (hanging, 2, [0, 1])
    threads = [thread for process in found.tasks[0].processes for thread in process.threads]
    (innermost,) = [thread.frames[0].function for thread in threads if thread.name == "MainThread"]
    assert innermost.endswith("waits_for_the_lock_of_another")
    with pytest.raises(ValueError, match=r"task=2: job .* has 2, from 0 on"):
        cluster.stack(hanging, task=2)
    with pytest.raises(JobNotFoundError):
        cluster.stack(JobId("zzz"))

    async def ask() -> list[int]:
        async with await AsyncCluster.connect(cluster.address) as same:
            return [each.task for each in (await same.stack(hanging, task=1)).tasks]

    assert asyncio.run(ask()) == [1]
    ended = cluster.launch(command("true"))
    cluster.wait(ended, timeout=60)
    with pytest.raises(StackError, match="does not run, so it has no stack: it is SUCCEEDED"):
        cluster.stack(ended)


def test_the_python_below_a_shell_is_found(cli: Cli) -> None:  # noqa: F811
    script = "import time\ndef far_below():\n  print('ready', flush=True)\n  time.sleep(600)\nfar_below()"
    job_id = cli.cluster.launch(command("sh", "-c", 'python3 -c "$0"; true', script))
    wait_ready(cli.cluster, job_id)
    shown = cli.ok("stack", job_id)
    assert "no Python was found in it" in shown
    assert "far_below (<string>:4)" in shown
    cli.cluster.terminate(job_id)


def test_what_has_no_stack_says_why(cli: Cli) -> None:  # noqa: F811
    job_id = cli.ok("submit", "--wait", "--", "true").strip()
    for arguments, why in (
        ((job_id,), "does not run, so it has no stack: it is SUCCEEDED"),
        ((job_id, "--task", "7"), "--task=7"),
        (("zzz",), "no job 'zzz'"),
    ):
        done = cli.run("stack", *arguments)
        assert done.returncode != 0
        assert why in done.stderr


def test_it_is_asked_by_the_namespace_of_the_job_alone(cli: Cli, hanging: JobId) -> None:  # noqa: F811
    cluster = cli.cluster
    bus = cluster.asynchronous.bus
    with pytest.raises(StackError, match=r"task 2 of job .* does not exist: the job has 2 tasks"):
        cluster.portal.run(ask_stack, bus, cluster.namespace, hanging, 2)
    done = cli.run("--namespace", "other", "stack", hanging)
    assert (done.returncode, "no job" in done.stderr) == (4, True), done.stderr
