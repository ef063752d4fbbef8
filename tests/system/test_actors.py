"""Actors and worker pools on a LocalCluster: real processes, real deaths."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fluster import (
    ActorContext,
    ActorDiedError,
    ActorNameTakenError,
    ActorNotFoundError,
    ActorPool,
    AsyncCluster,
    JobFailedError,
    JobStatus,
    LocalCluster,
    MailboxFullError,
    ResourceConfig,
    WorkerPool,
    actor,
    current_cluster,
    current_task,
    deploy,
)
from fluster_bus.core import codec
from fluster_bus.core.names import unique_name
from tests.system.job_requests import call
from tests.system.processes import Family
from tests.waiting import wait_until

PATIENCE_S = 60.0


class CounterError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


@actor
class Counter:
    def __init__(self, start: int = 0, *, lowest: int = 0) -> None:
        if start < lowest:
            raise CounterError(start)
        self.value = start

    def add(self, amount: int = 1) -> int:
        self.value += amount
        return self.value

    def pid(self) -> int:
        return os.getpid()

    def context(self, ctx: ActorContext) -> ActorContext:
        return ActorContext.from_environment()

    def sleep(self, entered: str, opened: str) -> str:
        Path(entered).touch()
        wait_until(Path(opened).exists, PATIENCE_S)
        return "slept"

    def modules(self) -> set[str]:
        return set(sys.modules)

    def exit(self, code: int) -> None:
        os._exit(code)

    def bear(self, name: str) -> int:
        return deploy(current_cluster(), Counter, name=name).call().pid()


class Exiting:
    def __init__(self) -> None:
        os._exit(7)

    def nothing(self) -> None: ...


def unfinished(cluster: LocalCluster) -> set[str]:
    return {info.job_id for info in cluster.list_jobs() if not info.status.finished()}


@pytest.fixture
def name() -> str:
    return unique_name("actor")


@pytest.fixture
def counters(cluster: LocalCluster, name: str) -> Iterator[ActorPool[Counter]]:
    pool = deploy(cluster, Counter, 10, name=name, replicas=2)
    yield pool
    pool.shutdown()


# ---- deployed -------------------------------------------------------------------------------------------


def test_each_actor_has_a_process_of_its_own_and_knows_its_task(counters: ActorPool[Counter]) -> None:
    assert counters.size == 2
    assert [counters.call().add(), counters.call().add(), counters.call().add(5)] == [11, 11, 16]
    assert len(set(counters.broadcast().pid().results())) == 2
    contexts = counters.broadcast().context().results()
    assert {context.job_id for context in contexts} == {counters.job_id}
    assert {context.task for context in contexts} == {0, 1}
    assert {member.task for member in counters.members()} == {0, 1}


def test_an_actor_imports_nothing_of_what_is_the_same_for_all(
    cluster: LocalCluster, counters: ActorPool[Counter]
) -> None:
    """It would cost each of them the time, and memory of its own; and all of them what none has a use for."""

    def modules() -> set[str]:
        return set(sys.modules)

    job_id = cluster.launch(call(modules))
    cluster.wait(job_id, raise_on_failure=True)
    same_for_all = cluster.result(job_id)
    assert not same_for_all & {"difflib", "encodings.idna"}
    imported = counters.call().modules() - same_for_all
    ours = (
        "fluster",
        "fluster_bus",
        "fluster_services",
        "nats",
        "pydantic",
        "uvloop",
        "concurrent",
        "encodings",
    )
    assert [name for name in sorted(imported) if name.partition(".")[0] in ours] == []


def test_an_actor_asks_for_little_unless_told_otherwise(cluster: LocalCluster, name: str) -> None:
    @actor(resources=ResourceConfig.with_cpu(1_000))
    class Greedy(Counter): ...

    with pytest.raises(JobFailedError, match="UNSCHEDULABLE"):
        deploy(cluster, Greedy, name=name)

    class Little:  # local, so that no process has to import this module
        def pid(self) -> int:
            return os.getpid()

    many = deploy(cluster, Little, name=name, replicas=20)  # more than there are CPUs
    assert len(set(many.broadcast().pid().results(PATIENCE_S))) == 20
    many.shutdown()


def test_what_a_constructor_raises_is_raised_and_nothing_is_left(cluster: LocalCluster, name: str) -> None:
    before = unfinished(cluster)
    with pytest.raises(CounterError) as caught:
        deploy(cluster, Counter, -1, name=name, replicas=2)
    assert caught.value.value == -1
    assert "in __init__" in caught.value.__notes__[0]
    assert unfinished(cluster) == before
    with pytest.raises(ActorDiedError, match="exit code 7"):
        deploy(cluster, Exiting, name=name)
    assert unfinished(cluster) == before


def test_arguments_are_checked_before_anything_is_started(cluster: LocalCluster, name: str) -> None:
    before = {info.job_id for info in cluster.list_jobs()}
    with pytest.raises(TypeError, match=r"Counter\(start.* cannot be made from these arguments"):
        deploy(cluster, Counter, strat=3, name=name)
    with pytest.raises(TypeError, match=r"max_restarts belongs into @actor"):
        deploy(cluster, Counter, name=name, max_restarts=1)
    with pytest.raises(TypeError, match=r"write deploy\(cluster, Counter, …\)"):
        deploy(cluster, Counter(3))  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="takes a cluster first"):
        deploy(Counter, cluster)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="cannot be pickled"):
        deploy(cluster, Counter, threading.Lock(), name=name)
    assert {info.job_id for info in cluster.list_jobs()} == before


def test_a_name_is_taken_by_one_deployment(cluster: LocalCluster, counters: ActorPool[Counter], name: str) -> None:
    with pytest.raises(ActorNameTakenError, match=rf"by 2 of job {counters.job_id}"):
        deploy(cluster, Counter, name=name)
    counters.shutdown()
    again = deploy(cluster, Counter, name=name)
    assert again.call().add() == 1
    again.shutdown()
    assert cluster.lookup_endpoints(name) == []


def test_a_killed_actor_fails_its_calls_at_once_and_the_others_go_on(
    counters: ActorPool[Counter], tmp_path: Path
) -> None:
    entered, opened = tmp_path / "entered", tmp_path / "opened"
    victim, survivor = counters.members()
    direct = counters.asynchronous.submit_to
    victims_pid = direct(victim.endpoint_id, "pid", codec.encode(((), {}))).result(PATIENCE_S)
    out = direct(victim.endpoint_id, "sleep", codec.encode(((str(entered), str(opened)), {})))
    queued = direct(victim.endpoint_id, "add", codec.encode(((), {})))
    pid = direct(survivor.endpoint_id, "pid", codec.encode(((), {}))).result(PATIENCE_S)
    wait_until(entered.exists, PATIENCE_S)
    os.kill(victims_pid, signal.SIGKILL)
    began = time.monotonic()
    for future in (out, queued):
        with pytest.raises(ActorDiedError, match=r"ended \(killed by SIGKILL.*may have run"):
            future.result(PATIENCE_S)
    assert time.monotonic() - began < 10, "it is told, not found out by silence"
    assert [counters.call().pid() for _ in range(3)] == [pid] * 3
    assert counters.size == 1


def test_an_actor_that_exits_is_told_from_one_that_answers(counters: ActorPool[Counter]) -> None:
    with pytest.raises(ActorDiedError, match=r"ended \(exit code 3\)"):
        counters.call().exit(3)
    assert counters.call().add() == 11


def test_a_shutdown_lets_calls_finish(counters: ActorPool[Counter], tmp_path: Path) -> None:
    entered, opened = tmp_path / "entered", tmp_path / "opened"
    out = counters.submit().sleep(str(entered), str(opened))
    wait_until(entered.exists, PATIENCE_S)
    ending = threading.Thread(target=counters.shutdown)
    ending.start()
    opened.touch()
    assert out.result(PATIENCE_S) == "slept"
    ending.join(PATIENCE_S)
    with pytest.raises(ActorNotFoundError):
        counters.call().add()


def test_pools_travel(cluster: LocalCluster, counters: ActorPool[Counter]) -> None:
    def use(pool: ActorPool[Counter], twin: ActorPool[Counter]) -> list[int]:
        return [pool.call().add(100), twin.broadcast().add(0).results()[0]]

    with WorkerPool(cluster, 1) as workers:
        assert workers.submit(use, counters, counters).result(PATIENCE_S) == [110, 110]


def test_what_a_job_deploys_ends_with_it(cluster: LocalCluster, name: str) -> None:
    parent = deploy(cluster, Counter, name=name)
    child = unique_name("child")
    pid = parent.call(timeout=PATIENCE_S).bear(child)
    assert pid != parent.call().pid()
    pool: ActorPool[Counter] = ActorPool(cluster, child)
    pool.wait_for_size(1)
    parent.shutdown()
    wait_until(lambda: cluster.lookup_endpoints(child) == [])
    wait_until(lambda: not psutil.pid_exists(pid))


@pytest.mark.parametrize("end", ["raises", "dies"])
def test_a_job_that_deploys_actors_and_has_workers_survives_its_own_retry(
    cluster: LocalCluster, name: str, tmp_path: Path, end: str
) -> None:
    pids = tmp_path / "pids"

    def job() -> tuple[int, list[int]]:
        earlier = [int(line) for line in pids.read_text().split()] if pids.exists() else []
        living = [pid for pid in earlier if psutil.pid_exists(pid)]
        actor_pid = deploy(current_cluster(), Counter, name=name).call().pid()
        workers = WorkerPool(current_cluster(), 1)
        pids.write_text(f"{actor_pid} {workers.submit(os.getpid).result()}")
        if current_task().attempt < 2 and end == "raises":
            raise RuntimeError("the first attempt fails")
        if current_task().attempt < 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return current_task().attempt, living

    launched = cluster.launch(call(job, max_retries_failure=1, retry_backoff_s=0.01))
    assert cluster.result(launched, timeout=PATIENCE_S) == (2, [])


def test_a_job_calls_actors(cluster: LocalCluster, counters: ActorPool[Counter], name: str) -> None:
    def job() -> None:
        pool: ActorPool[Counter] = ActorPool(current_cluster(), name)
        assert pool.broadcast().add(7).results() == [17, 17]

    info = cluster.wait(cluster.launch(call(job)), timeout=PATIENCE_S)
    assert info.status is JobStatus.SUCCEEDED, info.error_message
    assert counters.call().add(0) == 17


@pytest.mark.anyio
async def test_deploying_is_awaited_with_an_async_cluster(cluster: LocalCluster, name: str) -> None:
    async with await AsyncCluster.connect(cluster.address) as awaited:
        pool = await deploy(awaited, Counter, 3, name=name, replicas=2)
        assert await pool.broadcast().add(1).results() == [4, 4]
        assert await pool.call().add(1) == 5
        with pytest.raises(CounterError):
            await deploy(awaited, Counter, -1, name=unique_name("actor"))
        await pool.shutdown()
    assert cluster.lookup_endpoints(name) == []


# ---- from scripts ---------------------------------------------------------------------------------------

SCRIPT = """
    import os, sys
    from fluster import ActorServer, Cluster, WorkerPool, deploy

    class OwnError(Exception):
        pass

    class Own:
        def fail(self): raise OwnError("mine")
        def make(self): return Own()

    def square(x): return x * x

    if __name__ == "__main__":
        with Cluster() as cluster:
            pool = deploy(cluster, Own, name=sys.argv[1])
            try:
                pool.call().fail()
            except OwnError as error:
                print("caught", error)
            print(type(pool.call().make()) is Own)
            factor = 3
            with WorkerPool(cluster, 1) as workers:
                print([each.result() for each in workers.map(lambda x: square(x) * factor, range(4))])
            pool.shutdown()
"""


def test_what_a_script_defines_travels_by_value(cluster: LocalCluster, name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run(
        [sys.executable, str(script), name],
        env={**os.environ, "FLUSTER_CLUSTER_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "caught mine\nTrue\n[0, 3, 12, 27]\n"), done.stderr


SERVER = """
    import sys, threading
    from fluster import ActorServer, Cluster

    class Served:
        def hello(self, name):
            return f"hello {name}"

        def wait_long(self):
            print("waits", flush=True)
            threading.Event().wait()

    with Cluster() as cluster:
        server = ActorServer(cluster)
        server.register(sys.argv[1], Served())
        server.serve()
    print("ended")
"""


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_in_a_script(
    cluster: LocalCluster, name: str, tmp_path: Path, family: Family, end: signal.Signals
) -> None:
    script = tmp_path / "serve.py"
    script.write_text(textwrap.dedent(SERVER))
    environment = family.environment(FLUSTER_CLUSTER_ADDRESS=cluster.address)
    server = subprocess.Popen([sys.executable, str(script), name], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        pool: ActorPool[Any] = ActorPool(cluster, name)
        pool.wait_for_size(1)
        assert pool.call().hello("you") == "hello you"
        assert pool.members()[0].job_id is None
        out = pool.submit().wait_long() if end is signal.SIGKILL else None
        if out is not None:
            assert server.stdout is not None
            assert server.stdout.readline() == "waits\n"
        server.send_signal(end)
        output, _ = server.communicate(timeout=PATIENCE_S)
        if end is signal.SIGTERM:
            assert (server.returncode, output) == (0, "ended\n")
            assert cluster.lookup_endpoints(name) == []
        # At once, unless the call came before the bus had noticed the death: then by the lease.
        with pytest.raises((ActorNotFoundError, ActorDiedError)):
            pool.call(timeout=PATIENCE_S).hello("you")
        if out is not None:
            with pytest.raises(ActorDiedError, match="may have run"):
                out.result(PATIENCE_S)
    finally:
        server.kill()
        server.communicate()


# ---- worker pools ---------------------------------------------------------------------------------------


def square(number: int) -> int:
    return number * number


def meet(folder: str, others: int) -> int:
    """Return when `others` have come as well: they run at the same time."""
    (Path(folder) / str(os.getpid())).touch()
    wait_until(lambda: len(list(Path(folder).iterdir())) >= others, PATIENCE_S)
    return os.getpid()


def fail(text: str) -> None:
    raise ValueError(text)


def test_a_worker_pool_maps_in_order(cluster: LocalCluster) -> None:
    with WorkerPool(cluster, 2, name_prefix="mapper") as pool:
        futures = pool.map(square, range(500))  # before there is any worker
        assert [future.result(PATIENCE_S) for future in futures] == [number * number for number in range(500)]
        pool.wait_for_workers()
        assert (pool.size, pool.num_workers) == (2, 2)
        assert pool.name.startswith("mapper-")
        with pytest.raises(ValueError, match="mine") as caught:
            pool.submit(fail, "mine").result(PATIENCE_S)
        assert "in fail" in caught.value.__notes__[0]
        with pytest.raises(TypeError, match="cannot be pickled"):
            pool.submit(square, threading.Lock())  # type: ignore[arg-type, unused-awaitable]
        with pytest.raises(TypeError, match="cannot be called"):
            pool.submit(3)  # type: ignore[arg-type, unused-awaitable]
    with pytest.raises(RuntimeError, match="was shut down"):
        pool.submit(square, 3)  # type: ignore[unused-awaitable]
    assert cluster.lookup_endpoints(pool.name) == []


def test_tasks_run_side_by_side(cluster: LocalCluster, tmp_path: Path) -> None:
    with WorkerPool(cluster, 3) as pool:
        pids = {future.result(PATIENCE_S) for future in [pool.submit(meet, str(tmp_path), 3) for _ in range(3)]}
        assert len(pids) == 3


def test_a_pool_that_never_fits_says_so(cluster: LocalCluster) -> None:
    with WorkerPool(cluster, 1, ResourceConfig.with_cpu(1_000)) as pool:
        with pytest.raises(ActorDiedError, match="UNSCHEDULABLE"):
            pool.wait_for_workers(timeout=PATIENCE_S)
        assert pool.size == 0


def test_without_waiting_what_has_not_begun_is_cancelled(cluster: LocalCluster, tmp_path: Path) -> None:
    pool = WorkerPool(cluster, 1)
    pool.wait_for_workers()
    futures = [pool.submit(meet, str(tmp_path), 2) for _ in range(3)]
    wait_until(lambda: len(list(tmp_path.iterdir())) == 1)
    pool.shutdown(wait=False)
    with pytest.raises(ActorDiedError):
        futures[0].result(PATIENCE_S)
    assert [future.cancelled() for future in futures] == [False, True, True]


def test_many_tasks_fit_no_mailbox_and_are_all_done(cluster: LocalCluster) -> None:
    with WorkerPool(cluster, 2) as pool:
        try:
            results = [future.result(PATIENCE_S) for future in pool.map(square, range(25_000))]
        except MailboxFullError as error:  # the point of this test
            raise AssertionError("the pool sent more than its workers hold") from error
        assert results == [number * number for number in range(25_000)]
