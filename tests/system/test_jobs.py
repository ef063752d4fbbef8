"""Jobs on a LocalCluster, as users meet them."""

import asyncio
import importlib
import json
import os
import pickle
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pydantic
import pytest

from fluster.cluster import AsyncCluster, Cluster, LocalCluster
from fluster.errors import JobFailedError, JobNotFoundError, JobRefusedError, JobTimeoutError
from fluster_bus.core.errors import CredentialsError, InvalidNameError, MessageTooLargeError
from fluster_bus.messages import (
    Entrypoint,
    EnvironmentConfig,
    JobId,
    JobRequest,
    JobStatus,
    Namespace,
    ResourceConfig,
)
from tests.system.job_requests import READY, call, command, followed, sleeper, texts, wait_ready
from tests.waiting import wait_until

PATIENCE_S = 60

pytestmark = pytest.mark.anyio


def finish(cluster: Cluster, request: JobRequest) -> Any:
    return cluster.wait(cluster.launch(request), timeout=PATIENCE_S)


# ---- how a job goes ---------------------------------------------------------------------------------------


def test_a_callable_runs_to_its_end(cluster: LocalCluster, tmp_path: Path) -> None:
    file = tmp_path / "result"

    def work(left: int, *, right: int) -> None:
        file.write_text(str(left + right))

    request = JobRequest(name="sum", entrypoint=Entrypoint(callable=work, args=(40,), kwargs={"right": 2}))
    job_id = cluster.launch(request)
    info = cluster.wait(job_id, timeout=PATIENCE_S)
    assert info.status is JobStatus.SUCCEEDED
    assert file.read_text() == "42"
    assert (info.job_id, info.name, info.namespace, info.exit_code) == (job_id, "sum", cluster.namespace, 0)
    assert info.error_message == ""
    assert info.worker_id in {status.info.worker_id for status in cluster.list_workers()}
    assert info.submitted_at is not None
    assert info.started_at is not None
    assert info.finished_at is not None
    assert info.submitted_at <= info.started_at <= info.finished_at
    (task,) = info.tasks
    assert (task.status, task.attempt, task.failures, task.preemptions) == (JobStatus.SUCCEEDED, 1, 0, 0)
    assert cluster.poll(job_id) == info
    assert info in cluster.list_jobs()


def test_a_command_runs_to_its_end(cluster: LocalCluster) -> None:
    job_id = cluster.launch(command("sh", "-c", "echo $0 $1; echo oops >&2", "one", "two words"))
    assert cluster.wait(job_id, timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
    assert texts(cluster, job_id) == ["one two words"]
    assert texts(cluster, job_id, "stderr") == ["oops"]


def test_a_job_is_seen_running(cluster: LocalCluster) -> None:
    job_id = cluster.launch(sleeper())
    wait_ready(cluster, job_id)
    info = wait_until(lambda: found if (found := cluster.poll(job_id)).status is JobStatus.RUNNING else None)
    assert info is not None
    assert info.started_at is not None
    assert info.finished_at is None
    assert info.exit_code is None
    assert [each.job_id for each in cluster.list_jobs(states=[JobStatus.RUNNING])] == [job_id]
    cluster.terminate(job_id)
    assert cluster.wait(job_id, timeout=PATIENCE_S).status is JobStatus.KILLED


def test_a_jobs_models_have_the_plugins_that_are_installed_for_them(cluster: LocalCluster, tmp_path: Path) -> None:
    """The processes that a task is a copy of have made models before, of their own."""
    (tmp_path / "noticing-1.dist-info").mkdir()
    (tmp_path / "noticing-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: noticing\nVersion: 1\n")
    (tmp_path / "noticing-1.dist-info" / "entry_points.txt").write_text("[pydantic]\nnoticing = noticing:plugin\n")
    (tmp_path / "noticing.py").write_text(
        "noticed = []\n"
        "class plugin:\n"
        "    def new_schema_validator(schema, schema_type, *_):\n"
        "        noticed.append(schema_type.__name__)\n"
        "        return None, None, None\n"
    )

    def work() -> list[str]:
        sys.path.insert(0, str(tmp_path))
        pydantic.create_model("Point", x=(int, 0))
        noticed: list[str] = importlib.import_module("noticing").noticed
        return noticed

    assert cluster.result(cluster.launch(call(work)), timeout=PATIENCE_S) == ["Point"]


def test_a_job_can_use_the_cluster_it_runs_on(cluster: LocalCluster) -> None:
    def work() -> None:
        from fluster.cluster import current_cluster

        inner = current_cluster()
        info = inner.wait(inner.launch(command("sh", "-c", "echo $FLUSTER_NAMESPACE")), timeout=PATIENCE_S)
        print(info.parent, info.status, *texts(inner, info.job_id))

    job_id = cluster.launch(call(work))
    assert cluster.wait(job_id, timeout=PATIENCE_S, raise_on_failure=True)
    assert texts(cluster, job_id) == [f"{job_id} SUCCEEDED default"]


# ---- failure ------------------------------------------------------------------------------------------------


def _connect_elsewhere(namespace: str) -> None:
    from fluster import Cluster

    Cluster(namespace=namespace)


def test_a_job_is_told_at_once_that_its_credentials_are_for_another_namespace(cluster: LocalCluster) -> None:
    job_id = cluster.launch(call(_connect_elsewhere, "other"))
    with pytest.raises(CredentialsError, match="cannot be used in namespace 'other' with these credentials"):
        cluster.result(job_id, timeout=60)


def test_an_exception_is_told_with_its_message(cluster: LocalCluster) -> None:
    def fail() -> None:
        raise ValueError("intentional failure")

    job_id = cluster.launch(call(fail))
    info = cluster.wait(job_id, timeout=PATIENCE_S)
    assert info.status is JobStatus.FAILED
    assert "intentional failure" in info.error_message
    assert info.exit_code == 1
    assert info.error is not None
    assert info.error.type == "ValueError"
    assert "in fail" in info.error.traceback
    assert info.error.pickled is not None
    error = pickle.loads(info.error.pickled)
    assert isinstance(error, ValueError)
    assert "intentional failure" in str(error)
    assert any("intentional failure" in text for text in texts(cluster, job_id, "stderr"))
    with pytest.raises(JobFailedError, match="intentional failure") as raised:
        cluster.wait(job_id, raise_on_failure=True)
    assert raised.value.info == info
    assert pickle.loads(pickle.dumps(raised.value)).info == info


@pytest.mark.parametrize(
    ("script", "exit_code", "message"),
    [
        ("echo what went wrong >&2; exit 3", 3, "what went wrong"),
        ("kill -KILL $$", None, "SIGKILL"),
        ("exec /no/such/program", 127, "no/such/program"),
    ],
)
def test_a_command_that_fails_tells_why(
    cluster: LocalCluster, script: str, exit_code: int | None, message: str
) -> None:
    info = finish(cluster, command("sh", "-c", script))
    assert (info.status, info.exit_code) == (JobStatus.FAILED, exit_code)
    assert message in info.error_message


def test_a_command_that_does_not_exist_is_named(cluster: LocalCluster) -> None:
    info = finish(cluster, command("no-such-program"))
    assert (info.status, info.exit_code) == (JobStatus.FAILED, 127)
    assert "'no-such-program' was not found" in info.error_message


def test_a_failing_task_is_tried_again_within_its_budget(cluster: LocalCluster, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    script = f"echo $FLUSTER_ATTEMPT >> {ledger}; test $FLUSTER_ATTEMPT -ge 3"
    info = finish(cluster, command("sh", "-c", script, max_retries_failure=2))
    assert info.status is JobStatus.SUCCEEDED
    assert ledger.read_text().split() == ["1", "2", "3"]
    assert (info.tasks[0].attempt, info.tasks[0].failures) == (3, 2)
    info = finish(cluster, command("sh", "-c", "exit 1", max_retries_failure=1))
    assert info.status is JobStatus.FAILED
    assert (info.tasks[0].attempt, info.tasks[0].failures) == (2, 2)


def test_one_failing_task_fails_the_job(cluster: LocalCluster) -> None:
    script = "test $FLUSTER_TASK_INDEX != 1 && exec sleep 600; echo bad >&2; exit 4"
    info = finish(cluster, command("sh", "-c", script, replicas=3))
    assert info.status is JobStatus.FAILED
    assert info.error_message.startswith("task 1: ")
    assert "bad" in info.error_message
    assert [task.status for task in info.tasks] == [JobStatus.KILLED, JobStatus.FAILED, JobStatus.KILLED]
    assert info.exit_code == 4


# ---- what a task finds around it ----------------------------------------------------------------------------


def test_tasks_are_told_who_they_are(cluster: LocalCluster, tmp_path: Path) -> None:
    def tell() -> None:
        import json
        import os
        import pathlib

        pathlib.Path(tmp_path, os.environ["FLUSTER_TASK_INDEX"]).write_text(json.dumps(dict(os.environ)))

    request = call(
        tell,
        replicas=3,
        ports=("http", "side-car"),
        environment=EnvironmentConfig(env_vars={"GREETING": "héllo wörld", "FLUSTER_JOB_ID": "forged"}),
    )
    info = finish(cluster, request)
    assert info.status is JobStatus.SUCCEEDED
    ports: set[int] = set()
    for task in info.tasks:
        seen = json.loads((tmp_path / str(task.task)).read_text())
        assert seen["FLUSTER_JOB_ID"] == info.job_id
        assert seen["FLUSTER_TASK_INDEX"] == str(task.task)
        assert seen["FLUSTER_NUM_TASKS"] == "3"
        assert seen["FLUSTER_ATTEMPT"] == "1"
        assert seen["FLUSTER_ATTEMPT_ID"] == f"default.{info.job_id}.{task.task}.1"
        assert seen["FLUSTER_WORKER_ID"] == task.worker_id
        assert seen["FLUSTER_NAMESPACE"] == "default"
        assert seen["FLUSTER_CLUSTER_ADDRESS"] == seen["FLUSTER_CONTROLLER_ADDRESS"]
        assert "@" not in seen["FLUSTER_CLUSTER_ADDRESS"]
        assert Path(seen["FLUSTER_CREDENTIALS"]).stat().st_mode & 0o777 == 0o600
        assert seen["GREETING"] == "héllo wörld"
        assert "FLUSTER_TEST_FAMILY" not in seen, "the daemons' environment is none of the task's"
        ports |= {int(seen["FLUSTER_PORT_HTTP"]), int(seen["FLUSTER_PORT_SIDE_CAR"])}
    assert all(1024 < port < 65536 for port in ports)


def test_a_port_can_be_listened_on(cluster: LocalCluster) -> None:
    script = "import os, socket; socket.create_server(('127.0.0.1', int(os.environ['FLUSTER_PORT_HTTP'])))"
    info = finish(cluster, command("python3", "-c", script, ports=("http",)))
    assert info.status is JobStatus.SUCCEEDED, info.error_message


def test_a_job_imports_what_its_client_can_import(cluster: LocalCluster) -> None:
    def work() -> None:
        import tests.waiting  # noqa: F401 - it is there

    assert finish(cluster, call(os.path.join, "a", "b")).status is JobStatus.SUCCEEDED
    assert finish(cluster, call(work)).status is JobStatus.SUCCEEDED


# ---- logs ---------------------------------------------------------------------------------------------------


def test_logs_keep_each_streams_order(cluster: LocalCluster) -> None:
    def work() -> None:
        import sys

        for number in range(200):
            print("out", number)
            print("err", number, file=sys.stderr)

    job_id = cluster.launch(call(work))
    cluster.wait(job_id, timeout=PATIENCE_S)
    lines = list(cluster.logs(job_id))
    assert [line.text for line in lines if line.stream == "stdout"] == [f"out {number}" for number in range(200)]
    assert [line.text for line in lines if line.stream == "stderr"] == [f"err {number}" for number in range(200)]
    assert {(line.job_id, line.task, line.attempt) for line in lines} == {(job_id, 0, 1)}


def test_ten_thousand_lines_arrive_while_they_are_followed(cluster: LocalCluster) -> None:
    job_id = cluster.launch(command("seq", "10000"))
    followed = [line.text for line in cluster.logs(job_id, follow=True)]
    assert followed == [str(number) for number in range(1, 10_001)]
    assert cluster.poll(job_id).status is JobStatus.SUCCEEDED, "following ends with the job, not before"
    assert texts(cluster, job_id) == followed


def test_lines_are_seen_while_the_job_runs(cluster: LocalCluster, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    job_id = cluster.launch(command("sh", "-c", f"printf 'one\\ntwo\\n'; cat {gate}; printf 'no end'"))
    with followed(cluster, job_id) as lines:
        assert [next(lines).text, next(lines).text] == ["one", "two"]
        assert cluster.poll(job_id).status in {JobStatus.BUILDING, JobStatus.RUNNING}
        gate.write_text("three\n")
        assert [line.text for line in lines] == ["three", "no end"]


def test_one_tasks_lines_can_be_picked(cluster: LocalCluster) -> None:
    job_id = cluster.launch(command("sh", "-c", "echo $FLUSTER_TASK_INDEX", replicas=3))
    cluster.wait(job_id, timeout=PATIENCE_S)
    assert sorted(texts(cluster, job_id)) == ["0", "1", "2"]
    assert [line.text for line in cluster.logs(job_id, task=2)] == ["2"]


def test_odd_output_does_not_break_the_log(cluster: LocalCluster) -> None:
    job_id = cluster.launch(command("python3", "-c", r"import os; os.write(1, b'\xff\x00\xe2\x82\n' + b'x' * 300000)"))
    assert cluster.wait(job_id, timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
    assert sum(text.count("x") for text in texts(cluster, job_id)) == 300_000


# ---- being stopped ------------------------------------------------------------------------------------------


def test_a_running_job_is_stopped_politely(cluster: LocalCluster) -> None:
    def work() -> None:
        def leave(*_: object) -> None:
            os.write(1, b"bye\n")  # a print within the other print, which may not have returned, would be an error
            raise SystemExit

        signal.signal(signal.SIGTERM, leave)
        print(READY)
        signal.pause()

    job_id = cluster.launch(call(work))
    wait_ready(cluster, job_id)
    cluster.terminate(job_id, reason="no longer needed")
    info = cluster.wait(job_id, timeout=PATIENCE_S)
    assert info.status is JobStatus.KILLED
    assert info.error_message == "no longer needed"
    assert [line.text for line in cluster.logs(job_id)] == [READY, "bye"]
    cluster.terminate(job_id, reason="again")
    assert cluster.poll(job_id) == info


def test_a_job_that_waits_for_room_is_stopped_at_once(cluster: LocalCluster) -> None:
    whole_worker = ResourceConfig.with_cpu(8)
    holders = cluster.launch_many([sleeper(resources=whole_worker) for _ in range(2)])
    for holder in holders:
        wait_ready(cluster, holder)
    waiting, next_in_line = cluster.launch_many([command("true", resources=whole_worker) for _ in range(2)])
    assert cluster.poll(waiting).status is JobStatus.PENDING
    cluster.terminate(waiting)
    info = cluster.wait(waiting, timeout=PATIENCE_S)
    assert info.status is JobStatus.KILLED
    assert info.worker_id is None
    assert cluster.poll(next_in_line).status is JobStatus.PENDING
    cluster.terminate(holders[0])
    assert cluster.wait(next_in_line, timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
    cluster.terminate(holders[1])
    cluster.wait(holders, timeout=PATIENCE_S)


def test_a_job_is_stopped_whatever_it_was_about_to_do(cluster: LocalCluster) -> None:
    """Terminated as it is recorded, offered, claimed, built or started."""
    began = time.monotonic()
    seed = random.Random(7)
    for _ in range(25):
        job_id = cluster.launch(sleeper())
        threading.Event().wait(seed.uniform(0, 0.02))
        cluster.terminate(job_id)
        assert cluster.wait(job_id, timeout=PATIENCE_S).status is JobStatus.KILLED
    assert time.monotonic() - began < 30, "a wish must not wait for the worker's next look at its records"


@pytest.mark.parametrize("ending", ["succeeds", "fails", "is terminated"])
def test_children_end_with_their_parent(cluster: LocalCluster, tmp_path: Path, ending: str) -> None:
    def parent() -> None:
        from fluster.cluster import current_cluster

        inner = current_cluster()

        def child() -> None:
            inner = current_cluster()
            print(inner.launch(sleeper(name="grandchild")))
            threading.Event().wait()

        child_id = inner.launch(call(child, name="child"))
        wait_ready(inner, child_id)
        (grandchild_id,) = texts(inner, child_id)
        wait_ready(inner, JobId(grandchild_id))
        print(child_id, grandchild_id)
        if ending == "fails":
            raise SystemExit(1)
        if ending == "is terminated":
            threading.Event().wait()

    parent_id = cluster.launch(call(parent, name="parent"))
    with followed(cluster, parent_id) as lines:
        children = [JobId(text) for text in next(lines).text.split()]
    if ending == "is terminated":
        cluster.terminate(parent_id)
    parent_info, *infos = cluster.wait([parent_id, *children], timeout=PATIENCE_S)
    assert (
        parent_info.status
        is {
            "succeeds": JobStatus.SUCCEEDED,
            "fails": JobStatus.FAILED,
            "is terminated": JobStatus.KILLED,
        }[ending]
    )
    assert [info.status for info in infos] == [JobStatus.KILLED, JobStatus.KILLED]
    assert parent_id in infos[0].error_message
    assert [info.parent for info in infos] == [parent_id, children[0]]


# ---- waiting ------------------------------------------------------------------------------------------------


def test_a_wait_that_is_over_leaves_the_job_alone(cluster: LocalCluster) -> None:
    job_id = cluster.launch(sleeper())
    with pytest.raises(JobTimeoutError, match=job_id) as raised:
        cluster.wait(job_id, timeout=0.05)
    assert isinstance(raised.value, TimeoutError)
    assert not cluster.poll(job_id).status.finished()
    cluster.terminate(job_id)
    cluster.wait(job_id, timeout=PATIENCE_S)


def test_many_wait_for_one_job(cluster: LocalCluster, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    job_id = cluster.launch(command("cat", str(gate)))
    with ThreadPoolExecutor(8) as threads:
        waits = [threads.submit(cluster.wait, job_id, timeout=PATIENCE_S) for _ in range(8)]
        gate.write_text("go")
        assert {wait.result().status for wait in waits} == {JobStatus.SUCCEEDED}


def test_several_jobs_are_waited_for_in_the_order_asked(cluster: LocalCluster) -> None:
    job_ids = cluster.launch_many([command("sh", "-c", f"exit {number}") for number in range(6)])
    infos = cluster.wait(job_ids[::-1], timeout=PATIENCE_S)
    assert [info.job_id for info in infos] == job_ids[::-1]
    assert [info.exit_code for info in infos] == [5, 4, 3, 2, 1, 0]
    assert cluster.wait([]) == []
    with pytest.raises(JobFailedError):
        cluster.wait(job_ids, raise_on_failure=True)


# ---- what is refused ----------------------------------------------------------------------------------------


def test_unknown_jobs_are_said_to_be_unknown(cluster: LocalCluster) -> None:
    nobody = JobId("nobody")
    for ask in (cluster.poll, cluster.wait, cluster.terminate, lambda job: list(cluster.logs(job))):
        with pytest.raises(JobNotFoundError, match="no job 'nobody' in namespace 'default'"):
            ask(nobody)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "a.b"}, "invalid job name 'a.b'"),
        ({"name": ""}, "invalid job name ''"),
        ({"name": "x" * 129}, "invalid job name"),
        ({"job_id": "a b"}, "invalid job id 'a b'"),
        ({"replicas": 0}, "replicas"),
        ({"ports": ("a", "a")}, "each once"),
        ({"resources": {"cpu": -1}}, "cpu"),
        ({"entrypoint": {"command": []}}, "names no program"),
        ({"entrypoint": {}}, "either callable"),
        ({"environment": {"env_vars": {"A=B": "c"}}}, "'A=B'"),
    ],
)
def test_a_wrong_request_is_refused_where_it_is_made(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JobRequest.model_validate({"name": "job", "entrypoint": {"command": ["true"]}, **fields})


def test_a_callable_that_is_too_large_is_refused_where_it_is_made() -> None:
    with pytest.raises(ValueError, match="over the limit of 4,194,304"):
        Entrypoint(callable=len, args=(b"x" * (5 << 20),))
    with pytest.raises(TypeError, match="cannot be pickled"):
        Entrypoint(callable=len, args=(threading.Lock(),))


def test_a_request_that_no_message_holds_is_refused(cluster: LocalCluster) -> None:
    with pytest.raises(MessageTooLargeError, match="over the server's limit"):
        cluster.launch(command("echo", "x" * (9 << 20)))


def test_a_request_that_no_record_holds_is_refused(cluster: LocalCluster) -> None:
    """It fits into a message, but not together with what becomes of it."""
    with pytest.raises(JobRefusedError, match="bytes, over the limit"):
        cluster.launch(command("echo", "x" * ((8 << 20) - 2_000)))
    assert finish(cluster, command("true")).status is JobStatus.SUCCEEDED


def test_a_large_job_fails_with_a_large_error(cluster: LocalCluster) -> None:
    payload = os.urandom(4_100_000)

    def fail(data: bytes) -> None:
        raise ValueError("x" * 200_000)

    info = finish(cluster, call(fail, payload))
    assert info.status is JobStatus.FAILED
    assert info.error_message.startswith("ValueError: xxx")


def test_a_job_id_is_taken_once(cluster: LocalCluster) -> None:
    job_id = JobId(f"mine-{os.getpid()}-{time.time_ns()}")
    assert cluster.launch(command("true", job_id=job_id)) == job_id
    assert cluster.wait(job_id, timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
    with pytest.raises(JobRefusedError, match=job_id):
        cluster.launch(command("false", job_id=job_id))
    assert cluster.poll(job_id).status is JobStatus.SUCCEEDED


def test_many_large_errors_can_be_listed(cluster: LocalCluster) -> None:
    """Together they are more than one message holds."""

    def fail() -> None:
        import os

        raise ValueError("x" * 16_000, os.urandom(150_000))

    with Cluster(cluster.address, "other") as other:
        job_ids = other.launch_many([call(fail) for _ in range(60)])
        infos = other.wait(job_ids, timeout=PATIENCE_S)
        assert {info.status for info in infos} == {JobStatus.FAILED}
        assert all("xxx" in info.error_message for info in infos)
        assert {info.job_id for info in other.list_jobs()} >= set(job_ids)


# ---- endpoints ----------------------------------------------------------------------------------------------


def serving(name: str, then: str) -> JobRequest:
    def serve() -> None:
        import os
        import signal
        import threading

        from fluster.cluster import current_cluster

        current_cluster().register_endpoint(
            name, f"somewhere.{os.getpid()}", metadata={"task": os.environ["FLUSTER_TASK_INDEX"]}
        )
        print(READY)
        if then == "waits":
            threading.Event().wait()
        elif then == "dies":
            os.kill(os.getpid(), signal.SIGKILL)

    return call(serve, name="serving")


def test_endpoints_of_jobs_are_found(cluster: LocalCluster) -> None:
    keeper = cluster.register_endpoint("service-a", "mine", metadata={"who": "the test"})
    job_ids = cluster.launch_many([serving("service-a", "waits") for _ in range(3)])
    for job_id in job_ids:
        wait_ready(cluster, job_id)
    found = cluster.lookup_endpoints("service-a")
    assert {endpoint.job_id for endpoint in found} == {None, *job_ids}
    assert {endpoint.metadata.get("task") for endpoint in found} == {None, "0"}
    assert cluster.lookup_endpoints("service") == []
    assert len(cluster.list_endpoints("service-")) == 4
    cluster.unregister_endpoint(keeper.endpoint_id)
    assert {endpoint.job_id for endpoint in cluster.lookup_endpoints("service-a")} == set(job_ids)
    for job_id in job_ids:
        cluster.terminate(job_id)
    cluster.wait(job_ids, timeout=PATIENCE_S)
    assert cluster.lookup_endpoints("service-a") == []


@pytest.mark.parametrize("then", ["ends", "dies"])
def test_endpoints_go_with_their_job(cluster: LocalCluster, then: str) -> None:
    job_id = cluster.launch(serving("service-b", then))
    info = cluster.wait(job_id, timeout=PATIENCE_S)
    assert texts(cluster, job_id) == [READY]
    assert info.status is (JobStatus.SUCCEEDED if then == "ends" else JobStatus.FAILED)
    assert cluster.lookup_endpoints("service-b") == []


def test_the_endpoint_of_a_young_job_is_kept(cluster: LocalCluster) -> None:
    """The controller may hear of an endpoint before it hears that its job runs."""

    def work(number: int) -> None:
        import asyncio

        from fluster.cluster import AsyncCluster

        async def main() -> None:
            async with await AsyncCluster.connect() as inner:
                await inner.register_endpoint("young", f"of {number}")
                for _ in range(10):
                    assert await inner.registry.find("none") is None  # as long as some requests take
                    found = await inner.lookup_endpoints("young")
                    assert any(endpoint.address == f"of {number}" for endpoint in found), "it was removed"

        asyncio.run(main())

    small = ResourceConfig.with_cpu(0.25, memory="128MiB")
    infos = cluster.wait(cluster.launch_many([call(work, n, resources=small) for n in range(16)]), timeout=60)
    assert [info.error_message for info in infos if info.status is not JobStatus.SUCCEEDED] == []
    assert cluster.lookup_endpoints("young") == []


# ---- who asks -----------------------------------------------------------------------------------------------


async def test_the_same_is_awaited(cluster: LocalCluster) -> None:
    async with await AsyncCluster.connect(cluster.address) as awaited:
        job_id = await awaited.launch(command("sh", "-c", "echo one; echo two"))
        assert [line.text async for line in awaited.logs(job_id, follow=True)] == ["one", "two"]
        info = await awaited.wait(job_id, timeout=PATIENCE_S)
        assert info.status is JobStatus.SUCCEEDED
        assert await awaited.poll(job_id) == info
        assert info in await awaited.list_jobs()
        several = await awaited.launch_many([sleeper(), sleeper()])
        with pytest.raises(JobTimeoutError):
            await awaited.wait(several, timeout=0.05)
        await asyncio.gather(*(awaited.terminate(each) for each in several))
        assert {each.status for each in await awaited.wait(several, timeout=PATIENCE_S)} == {JobStatus.KILLED}
        endpoint = await awaited.register_endpoint("awaited", "here")
        assert await awaited.lookup_endpoints("awaited") == [endpoint]
        assert len(await awaited.list_endpoints("await")) == 1
        await awaited.unregister_endpoint(endpoint.endpoint_id)
        assert await awaited.lookup_endpoints("awaited") == []
        assert len(await awaited.list_workers()) == 2
        with pytest.raises(JobNotFoundError):
            await awaited.poll(JobId("nobody"))


async def test_the_blocking_cluster_works_below_a_running_loop(cluster: LocalCluster) -> None:
    """As in a notebook: the caller's own loop has nothing to do with it."""
    job_id = cluster.launch(command("echo", "hello"))
    assert cluster.wait(job_id, timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
    assert [line.text for line in cluster.logs(job_id)] == ["hello"]


def test_many_threads_share_a_cluster(cluster: LocalCluster) -> None:
    def work(number: int) -> list[str]:
        job_ids = [cluster.launch(command("echo", f"{number}.{each}")) for each in range(5)]
        return [text for info in cluster.wait(job_ids, timeout=PATIENCE_S) for text in texts(cluster, info.job_id)]

    with ThreadPoolExecutor(8) as threads:
        for number, found in enumerate(threads.map(work, range(8))):
            assert found == [f"{number}.{each}" for each in range(5)]


def test_namespaces_do_not_see_each_other(cluster: LocalCluster) -> None:
    with Cluster(cluster.address, "other") as other:
        job_id = other.launch(command("sh", "-c", "echo $FLUSTER_NAMESPACE"))
        assert other.wait(job_id, timeout=PATIENCE_S).namespace == Namespace("other")
        assert texts(other, job_id) == ["other"]
        other.register_endpoint("over-there", "x")
        with pytest.raises(JobNotFoundError):
            cluster.poll(job_id)
        assert cluster.lookup_endpoints("over-there") == []


@pytest.mark.slow
def test_no_task_is_forgotten_when_there_is_little_room(cluster: LocalCluster) -> None:
    """Each of these waits for the one before: a wake-up that is lost would leave the rest waiting."""
    whole_worker = ResourceConfig.with_cpu(8)
    job_ids = cluster.launch_many([call(int, resources=whole_worker) for _ in range(150)])
    infos = cluster.wait(job_ids, timeout=60)
    assert {info.status for info in infos} == {JobStatus.SUCCEEDED}


def test_a_job_that_is_signalled_tells_by_which(cluster: LocalCluster) -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    info = finish(cluster, call(die))
    assert info.status is JobStatus.FAILED
    assert "SIGSEGV" in info.error_message


@pytest.mark.parametrize("job_id", ["x" * 5_000, "", "a b", "*", ">"])
def test_what_is_no_job_id_is_refused_and_the_connection_lives_on(cluster: LocalCluster, job_id: str) -> None:
    with pytest.raises(InvalidNameError, match="job id"):
        cluster.wait(JobId(job_id), timeout=60)
    assert cluster.list_workers()
