"""The fray client, beyond what fray's own tests ask of one."""

import importlib
import importlib.util
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluster.cluster import LocalCluster
from fluster_bus.messages import EnvironmentConfig
from tests.optional import import_or_skip
from tests.waiting import wait_until

import_or_skip("zephyr", "`make setup-zephyr` installs it")

from fray.client import JobAlreadyExists, JobFailed
from fray.current_client import set_current_client
from fray.types import ActorConfig, Entrypoint, JobRequest, JobStatus, ResourceConfig

from fluster.integrations.fray import ActorUnavailableError, FlusterClient
from fluster.integrations.fray.groups import FlusterActorGroup
from tests.system import fray_actors
from tests.system.either_cluster import EitherCluster
from tests.system.fray_actors import Broken, Counter, Delegate, Introspective, Meeting, Quitter, Unserved

pytestmark = pytest.mark.slow

SMALL = ResourceConfig(cpu=0.1, ram="64m")

SHAPES = """
import os
from fray.current_client import current_client
from fray.types import ResourceConfig

class Inner:
    def sides(self):
        return int(os.environ["SIDES"])

class Outer:
    def inner_sides(self):
        return current_client().create_actor(Inner, name="inner", resources=ResourceConfig(cpu=0.1, ram="64m")).sides()

def check():
    assert Outer().inner_sides() == 4
"""


@pytest.fixture(scope="module")
def cluster(either: EitherCluster) -> LocalCluster:
    return either.cluster


@pytest.fixture(scope="module", autouse=True)
def huge(cluster: LocalCluster) -> FlusterActorGroup:
    """Actors that no worker could ever have. It takes the cluster some seconds to be sure of that."""
    return FlusterClient(cluster).create_actor_group(
        Counter, name="huge", count=1, resources=ResourceConfig(cpu=1000, ram="64m")
    )


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[FlusterClient]:
    client = FlusterClient(cluster)
    yield client
    client.shutdown()


def _job(name: str, function: Any, *args: object, **options: Any) -> JobRequest:
    return JobRequest(name=name, entrypoint=Entrypoint.from_callable(function, args), resources=SMALL, **options)


# ---- actors -------------------------------------------------------------------------------------------------


def test_handles_find_their_actor_again(client: FlusterClient) -> None:
    counter = client.create_actor(Counter, 5, name="counter", resources=SMALL)
    other = client.create_actor(Introspective, name="other", resources=SMALL)
    value, returned = other.add_at(counter, 1)
    assert (value, returned) == (6, counter)
    assert returned.add(1) == 7
    with set_current_client(client):
        again = pickle.loads(pickle.dumps(counter))
    assert again.add.remote(1).result() == 8
    with pytest.raises(AttributeError):
        counter._value  # noqa: B018, SLF001 - that it is refused is what is tested
    with pytest.raises(AttributeError, match="substract"):
        counter.substract(1)


def test_actors_know_who_they_are(client: FlusterClient) -> None:
    group = client.create_actor_group(
        Introspective, name="known", count=2, resources=SMALL, actor_config=ActorConfig(max_concurrency=4)
    )
    handles = group.wait_ready()
    assert sorted(handle.who() for handle in handles) == [(0, "known"), (1, "known")]
    assert [handle.handle() for handle in handles] == handles
    calls = [handle.has_client.remote() for handle in handles for _ in range(8)]
    assert all(call.result() for call in calls)
    assert not handles[0].has_context()  # that is for the constructor alone


def test_groups_travel(client: FlusterClient) -> None:
    group = client.create_actor_group(Counter, name="group", count=2, resources=SMALL)
    with set_current_client(client):
        again = pickle.loads(pickle.dumps(group))
    assert again.job_id == group.job_id
    other = client.create_actor(Introspective, name="other", resources=SMALL)
    assert other.ready_of(group) == 2
    inner = other.counters(2)  # made over there, as a child of that job
    assert [handle.add(1) for handle in inner.wait_ready()] == [1, 1]
    assert client.cluster.poll(inner.job_id).parent is not None


def test_each_actor_is_discovered_once(client: FlusterClient) -> None:
    group = client.create_actor_group(Counter, name="group", count=3, resources=SMALL)
    found = group.wait_ready(count=1)
    assert len(found) == 1
    assert group.wait_ready(count=1) == found
    wait_until(lambda: group.ready_count == 3)
    found += group.discover_new()
    assert len(set(found)) == 3
    assert group.discover_new() == []
    assert set(group.wait_ready()) == set(found)
    assert not group.is_done()
    group.shutdown()
    assert group.is_done()
    with pytest.raises(ActorUnavailableError):
        found[2].add.remote(1).result()
    with pytest.raises(RuntimeError, match="3 of 4 actors were there"):
        group.wait_ready(count=4)


def test_a_future_can_be_waited_for_again(client: FlusterClient) -> None:
    meeting = client.create_actor(
        Meeting, 1, name="meeting", resources=SMALL, actor_config=ActorConfig(max_concurrency=2)
    )
    future = meeting.wait.submit()
    with pytest.raises(TimeoutError):
        future.result(timeout=0.05)
    assert not future.done()
    meeting.open()
    assert future.result(timeout=60) == "opened"
    assert future.result() == "opened"


def test_ctrl_c_ends_waiting(client: FlusterClient) -> None:
    if importlib.util.find_spec("polars") is not None:  # Zephyr's own from 0.2.227 on
        importlib.import_module("polars")  # after which CPython's own locks do not see it
    meeting = client.create_actor(
        Meeting, 1, name="meeting", resources=SMALL, actor_config=ActorConfig(max_concurrency=2)
    )
    future = meeting.wait.submit()
    interrupting = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT])
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        future.result()
    interrupting.join()
    meeting.open()
    assert future.result(timeout=60) == "opened"


def test_a_hundred_calls_at_once(client: FlusterClient) -> None:
    meeting = client.create_actor(
        Meeting, 100, name="meeting", resources=SMALL, actor_config=ActorConfig(max_concurrency=100)
    )
    calls = [meeting.meet.remote() for _ in range(100)]
    assert sorted(call.result(timeout=60) for call in calls) == list(range(100))


def test_an_actor_may_end_itself(client: FlusterClient) -> None:
    group = client.create_actor_group(Quitter, name="quitter", count=1, resources=SMALL)
    (quitter,) = group.wait_ready()
    assert quitter.quit() == "bye"
    assert client.cluster.wait(group.job_id, timeout=60).status == "SUCCEEDED"
    assert group.is_done()


def test_recorded_errors_fail_the_job_and_are_retried(client: FlusterClient) -> None:
    once = client.create_actor_group(Quitter, name="quitter", count=1, resources=SMALL)
    assert once.wait_ready()[0].fail("no more") == 1
    info = client.cluster.wait(once.job_id, timeout=60)
    assert info.status == "FAILED"
    assert "RuntimeError: no more" in info.error_message

    twice = client.create_actor_group(
        Quitter, name="quitter", count=1, resources=SMALL, actor_config=ActorConfig(max_task_retries=1)
    )
    (quitter,) = twice.wait_ready()
    assert quitter.fail("once more") == 1
    assert wait_until(lambda: _answer(quitter)) == 2


def _answer(quitter: Any) -> int | None:
    try:
        attempt: int = quitter.fail("not")
    except ActorUnavailableError:
        return None
    return attempt if attempt == 2 else None


def test_a_killed_actor_is_found_by_the_same_handle(client: FlusterClient) -> None:
    counter = client.create_actor(
        Counter, name="counter", resources=SMALL, actor_config=ActorConfig(max_task_retries=1)
    )
    mark = counter.mark()
    with pytest.raises(ActorUnavailableError):
        counter.be_killed()

    def mark_again() -> str | None:
        try:
            found: str = counter.mark()
        except ActorUnavailableError:
            return None
        return found

    assert wait_until(mark_again) != mark


def test_a_constructor_s_error_is_raised_and_nothing_is_left(client: FlusterClient) -> None:
    with pytest.raises(LookupError, match="no such model"):
        client.create_actor(Broken, name="broken", resources=SMALL)
    group = client.create_actor_group(Broken, name="broken", count=2, resources=SMALL)
    with pytest.raises(LookupError, match="no such model"):
        group.wait_ready()
    assert group.is_done()


def test_it_is_said_why_actors_are_not_there(client: FlusterClient) -> None:
    wide = ResourceConfig(cpu=8, ram="64m")  # all of a worker, of which there are two
    group = client.create_actor_group(Counter, name="wide", count=3, resources=wide)
    assert len(group.wait_ready(count=2)) == 2
    with pytest.raises(TimeoutError, match=r"2 of 3 actors of wide-\w+ are there after 0.5 s: .*CPU"):
        group.wait_ready(timeout=0.5)


def test_what_cannot_travel_is_said_at_once(client: FlusterClient) -> None:
    with pytest.raises(TypeError, match="cannot be pickled"):
        client.create_actor(Counter, threading.Lock(), name="counter", resources=SMALL)
    counter = client.create_actor(Counter, name="counter", resources=SMALL)
    with pytest.raises(TypeError, match="cannot be pickled"):
        counter.add.remote(threading.Lock())
    for method in (counter.lock, counter.numbers):
        with pytest.raises(TypeError, match="cannot be pickled"):
            method.remote().result()
    with pytest.raises(KeyError, match="itself"):
        counter.fail.remote("itself").result()
    assert counter.add(1) == 1


def test_classes_that_cannot_be_called_are_refused(client: FlusterClient) -> None:
    with pytest.raises(TypeError, match="'on_start', a name that Fluster keeps for itself"):
        client.create_actor(Unserved, name="unserved")
    with pytest.raises(TypeError, match="no method"):
        client.host_actor(object, name="nothing")


def test_hosting_in_this_process(client: FlusterClient) -> None:
    hosted = client.host_actor(Introspective, name="hosted")
    other = client.create_actor(Introspective, name="other", resources=SMALL)
    assert hosted.handle.who() == (0, "hosted")
    assert hosted.handle.has_client()
    counter = client.host_actor(Counter, 7, name="counter")
    assert other.add_at(counter.handle, 1) == (8, counter.handle)
    counter.shutdown()
    with pytest.raises(ActorUnavailableError):
        counter.handle.add(1)


def test_handles_given_to_a_hosted_actor_are_of_its_cluster(
    client: FlusterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_other() -> None:
        raise AssertionError("nobody asked for another cluster")

    monkeypatch.setattr("fluster.integrations.fray.client.current_cluster", no_other)
    counter = client.create_actor(Counter, name="counter", resources=SMALL)
    hosted = client.host_actor(Delegate, name="hosted")
    assert hosted.handle.add_to([counter], 2) == [2]


def test_code_travels_to_actors_and_to_theirs(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shapes.py").write_text(SHAPES, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    shapes = importlib.import_module("shapes")
    client = FlusterClient(cluster, environment=EnvironmentConfig(workspace=tmp_path, env_vars={"SIDES": "4"}))
    try:
        assert client.create_actor(shapes.Outer, name="outer", resources=SMALL).inner_sides() == 4
        assert client.submit(_job("outer-job", shapes.check)).wait(timeout=60) == JobStatus.SUCCEEDED
    finally:
        client.shutdown()
        del sys.modules["shapes"]


def test_shutdown_ends_the_actors(cluster: LocalCluster) -> None:
    client = FlusterClient(cluster)
    counter = client.create_actor(Counter, name="counter", resources=SMALL)
    hosted = client.host_actor(Counter, name="hosted").handle
    client.shutdown()
    for handle in (counter, hosted):
        with pytest.raises(ActorUnavailableError):
            handle.add(1)
    assert cluster.list_workers()


def test_clients_travel(client: FlusterClient) -> None:
    with set_current_client(client):
        assert pickle.loads(pickle.dumps(client)) is client
    with pytest.raises(TypeError, match="takes a Cluster"):
        FlusterClient("nats://somewhere")  # type: ignore[arg-type]


# ---- jobs ---------------------------------------------------------------------------------------------------


def test_a_job_of_a_name_is_adopted_or_told(client: FlusterClient) -> None:
    first = client.submit(_job("one.of.its.name", fray_actors.sleep, 30))
    assert client.submit(_job("one.of.its.name", fray_actors.sleep, 0)).job_id == first.job_id
    with pytest.raises(JobAlreadyExists) as raised:
        client.submit(_job("one.of.its.name", fray_actors.sleep, 0), adopt_existing=False)
    assert raised.value.job_name == "one.of.its.name"
    raised.value.handle.terminate()
    with pytest.raises(JobFailed, match="stopped"):
        first.wait(timeout=60)
    assert first.wait(raise_on_failure=False) == JobStatus.STOPPED
    # One that has ended gives its name away.
    for adopt in (False, True):
        assert client.submit(_job("one.of.its.name", fray_actors.sleep, 0), adopt).wait(60) == JobStatus.SUCCEEDED


def test_a_job_s_error_reaches_who_waits(client: FlusterClient) -> None:
    job = client.submit(_job("failing", fray_actors.fail, "this"))
    with pytest.raises(KeyError, match="this"):
        job.wait(timeout=60)
    binary = JobRequest(name="binary", entrypoint=Entrypoint.from_binary("false", []), resources=SMALL)
    with pytest.raises(JobFailed, match="failed"):
        client.submit(binary).wait(timeout=60)
    with pytest.raises(TypeError, match="cannot be pickled"):
        client.submit(_job("unpicklable", fray_actors.say, threading.Lock()))


def test_waiting_for_a_job_may_be_given_up(client: FlusterClient) -> None:
    job = client.submit(_job("sleeping", fray_actors.sleep, 30))
    with pytest.raises(TimeoutError):
        job.wait(timeout=0.05)
    assert job.wait(timeout=0.05, raise_on_failure=False) in (JobStatus.PENDING, JobStatus.RUNNING)
    job.terminate()


def test_logs_are_the_last_lines(client: FlusterClient) -> None:
    job = client.submit(_job("talking", fray_actors.say, 10, replicas=2))
    job.wait(timeout=60)
    assert job.logs(max_lines=3)[-1] == "line 9"
    assert (len(job.logs(max_lines=3)), len(job.logs())) == (3, 20)


def test_jobs_have_jobs_of_their_own(client: FlusterClient) -> None:
    outer = client.submit(_job("outer", fray_actors.launch_another, "outer"))
    assert outer.wait(timeout=60) == JobStatus.SUCCEEDED
    with set_current_client(client):
        assert pickle.loads(pickle.dumps(outer)).status() == JobStatus.SUCCEEDED


def test_what_fits_nowhere_is_refused(huge: FlusterActorGroup) -> None:
    with pytest.raises(ValueError, match="UNSCHEDULABLE"):
        huge.wait_ready()
