"""What `deploy` does about a name that is taken, how long its actors live, and what is left of one that did not come up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Literal

import pytest

from fluster import (
    ActorDiedError,
    ActorNameTakenError,
    ActorNotFoundError,
    ActorPool,
    ActorTimeoutError,
    AsyncCluster,
    Cluster,
    EnvironmentConfig,
    LocalCluster,
    ResourceConfig,
    actor,
    current_cluster,
    deploy,
)
from fluster_bus.core.names import JobId, unique_name
from tests.system.job_requests import call
from tests.system.processes import Family
from tests.waiting import wait_until

PATIENCE_S = 60.0


@actor(environment=EnvironmentConfig(env_vars={"WHOSE": "the class's"}), resources=ResourceConfig(cpu=0.5))
class Speaker:
    def __init__(self, word: str = "hello", *, delay_s: float = 0.0) -> None:
        self.word = word
        time.sleep(delay_s)

    def say(self) -> str:
        return self.word

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


@pytest.fixture
def name() -> str:
    return unique_name("speaker")


def unfinished(cluster: Cluster, name: str) -> list[JobId]:
    return [job.job_id for job in cluster.list_jobs() if job.name == name and not job.status.finished()]


def test_run_edit_and_run_again(cluster: LocalCluster, name: str) -> None:
    first = deploy(cluster, Speaker, "first", name=name)
    with pytest.raises(ActorNameTakenError, match='say if_exists="get" or "replace"'):
        deploy(cluster, Speaker, "second", name=name)
    same = deploy(cluster, Speaker, "second", name=name, if_exists="get")
    assert same.call().say() == "first"
    same.shutdown()  # it did not start them
    assert first.call().say() == "first"
    with deploy(cluster, Speaker, "second", name=name, if_exists="replace") as second:
        assert second.call().say() == "second"
        assert len(unfinished(cluster, name)) == 1
    assert unfinished(cluster, name) == []
    with pytest.raises((ActorNotFoundError, ActorDiedError)):
        second.call().say()
    with pytest.raises(ValueError, match="if_exists='take' is not known: choose 'error' or 'get' or 'replace'"):
        deploy(cluster, Speaker, if_exists="take")  # type: ignore[call-overload]


@pytest.mark.anyio
async def test_it_is_the_same_for_programs_that_await(cluster: LocalCluster, name: str) -> None:
    async with await AsyncCluster.connect(cluster.address) as awaited:
        async with await deploy(awaited, Speaker, "first", name=name, lifetime="detached") as pool:
            assert await pool.call().say() == "first"
        with pytest.raises(ActorTimeoutError):
            await deploy(awaited, Speaker, name=name, delay_s=60, timeout=0.5)
    assert unfinished(cluster, name) == []


def test_a_deployment_that_takes_too_long_is_taken_back(cluster: LocalCluster, name: str) -> None:
    with pytest.raises(
        TimeoutError, match=r"was not there within 1 s, and .* taken back: .*1 of 1 tasks run on worker-"
    ) as caught:
        deploy(cluster, Speaker, name=name, delay_s=60, timeout=1)
    assert (caught.value.__cause__, caught.value.__suppress_context__) == (None, True), "one traceback is shown"
    assert unfinished(cluster, name) == []


def test_so_is_one_that_is_interrupted(cluster: LocalCluster, name: str, tmp_path: Path) -> None:
    program = f"""
        import time
        from fluster import Cluster, actor, deploy

        class Slow:
            def __init__(self):
                time.sleep(60)
            def nothing(self): ...

        deploy(Cluster(), Slow, name={name!r}, lifetime="detached")
    """
    family = Family()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=family.environment(FLUSTER_CLUSTER_ADDRESS=cluster.address),
        stderr=subprocess.PIPE,
    )
    try:
        wait_until(lambda: unfinished(cluster, name), PATIENCE_S)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        family.kill()
    assert errors.decode().rstrip().endswith("KeyboardInterrupt")
    assert unfinished(cluster, name) == []


def test_actors_have_an_environment_and_resources(cluster: LocalCluster, name: str) -> None:
    with deploy(cluster, Speaker, name=name) as speakers:
        assert speakers.call().variable("WHOSE") == "the class's"
    environment = EnvironmentConfig(env_vars={"WHOSE": "the deployment's"})
    with deploy(cluster, Speaker, name=name, environment=environment, resources=ResourceConfig(cpu=2)) as speakers:
        assert speakers.call().variable("WHOSE") == "the deployment's"
        workers = cluster.list_workers
        wait_until(lambda: any(each.info.total.cpu - each.free.cpu == 2 for each in workers()), PATIENCE_S)
    with pytest.raises(TypeError, match="environment='x': give an EnvironmentConfig"):
        deploy(cluster, Speaker, environment="x")  # type: ignore[call-overload]


@pytest.mark.parametrize(("lifetime", "left"), [(None, 0), ("detached", 1)])
def test_what_a_job_deploys_lives_as_long_as_it_says(
    cluster: LocalCluster, name: str, lifetime: Literal["detached"] | None, left: int
) -> None:
    def job() -> str:
        return str(deploy(current_cluster(), Speaker, name=name, lifetime=lifetime).call().say())

    assert cluster.result(cluster.launch(call(job)), timeout=PATIENCE_S) == "hello"
    wait_until(lambda: len(unfinished(cluster, name)) == left, PATIENCE_S)
    pool: ActorPool[Speaker] = ActorPool(cluster, name)
    if left:
        assert pool.call().say() == "hello"
    for job_id in unfinished(cluster, name):
        cluster.terminate(job_id)


def test_the_command_line_deploys_what_lives_on(cluster: LocalCluster, name: str, tmp_path: Path) -> None:
    source = tmp_path / "own_counters.py"
    source.write_text("class Counter:\n    def __init__(self, start, *, step=1):\n        self.value = start\n        self.step = step\n"
                      "    def add(self):\n        self.value += self.step\n        return self.value\n")  # fmt: skip

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        script = "from fluster.cli import main; main()"
        environment = {**os.environ, "FLUSTER_CLUSTER_ADDRESS": cluster.address}
        return subprocess.run(
            [sys.executable, "-c", script, *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    target = ["deploy", "own_counters:Counter", "41", "--name", name, "--kw", "step=2"]
    deployed = run(*target)
    assert deployed.stdout.split() == unfinished(cluster, name), deployed.stderr
    assert run("call", name, "add").stdout == "43\n"
    assert run(*target, "--if-exists", "get").stdout == deployed.stdout
    taken = run(*target)
    assert taken.returncode != 0
    assert "--if-exists" in taken.stderr
    assert run("cancel", deployed.stdout.strip()).returncode == 0
    wait_until(lambda: not unfinished(cluster, name), PATIENCE_S)
    for words, why in ((["own_counters:Nothing"], "has no class 'Nothing'"), (["nothing:X"], "no module 'nothing'")):
        wrong = run("deploy", *words)
        assert (wrong.returncode, why in wrong.stderr) == (2, True), wrong.stderr
    source.write_text("class Mute:\n    pass\n\nclass Bad:\n    def __init__(self):\n        raise LookupError('no data')\n"
                      "    def add(self):\n        pass\n")  # fmt: skip
    for words, why in ((["own_counters:Mute"], "has no method that could be"), (["own_counters:Bad"], "no data")):
        wrong = run("deploy", *words)
        assert (wrong.returncode, why in wrong.stderr) == (1, True), wrong.stderr
