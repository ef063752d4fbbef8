"""Secrets of jobs: only workers read them, and they go with the job."""

import json
import os
import subprocess
import sys

import pytest

from fluster.cluster import LocalCluster
from fluster_bus.core import buckets, server_subjects
from fluster_bus.messages import EnvironmentConfig, JobId, JobRequest, JobStatus
from tests.system.job_requests import command, texts
from tests.waiting import wait_until

_VALUE = "postgres://user:hunter2@host"


@pytest.fixture(autouse=True)
def _set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_DSN", _VALUE)


def _with_secret(script: str, **fields: object) -> JobRequest:
    request = command("sh", "-c", script).model_copy(update=fields)
    return request.model_copy(update={"environment": EnvironmentConfig(secrets=["MY_DSN"])})


def _kept(cluster: LocalCluster) -> int:
    """How many jobs have secrets that are kept."""

    async def count() -> int:
        stream = buckets.secrets_stream(cluster.asynchronous.namespace)
        return int((await cluster.asynchronous.bus.jetstream.stream_info(stream)).state.messages)

    return cluster.portal.run(count)


def _stored(cluster: LocalCluster, job_id: JobId) -> bytes:
    """All that the records of a job say."""

    async def read() -> bytes:
        bucket = buckets.bucket_stream(buckets.jobs_bucket(cluster.asynchronous.namespace))
        found = b""
        for key in (job_id, buckets.task_key(job_id, 0)):
            subject = buckets.bucket_key(buckets.jobs_bucket(cluster.asynchronous.namespace), key)
            found += (
                await cluster.asynchronous.bus.request(f"{server_subjects.direct_get(bucket)}.{subject}", b"")
            ).data
        return found

    return cluster.portal.run(read)


def test_a_secret_reaches_each_attempt_and_no_record(cluster: LocalCluster) -> None:
    request = _with_secret(
        'echo "${#MY_DSN}"; exit $((FLUSTER_ATTEMPT == 1))', max_retries_failure=1, retry_backoff_s=0.0
    )
    job_id = cluster.launch(request)
    info = cluster.wait(job_id, timeout=60)
    assert info.status is JobStatus.SUCCEEDED, info.error_message
    assert texts(cluster, job_id) == [str(len(_VALUE))] * 2
    record = _stored(cluster, job_id)
    assert b"MY_DSN" in record
    assert b"hunter2" not in record
    assert "hunter2" not in info.model_dump_json()
    for file in (cluster.store_dir / "logs").iterdir():
        assert b"hunter2" not in file.read_bytes(), file
    wait_until(lambda: _kept(cluster) == 0)


def test_a_secret_of_a_job_that_is_refused_goes_too(cluster: LocalCluster) -> None:
    first = cluster.launch(command("sleep", "600", job_id="taken"))
    kept = cluster.launch(_with_secret("true", job_id=JobId("taken"), on_conflict="keep"))
    assert kept == first
    wait_until(lambda: _kept(cluster) == 0)
    cluster.terminate(first)
    cluster.wait(first, timeout=60)


def test_a_secret_that_is_not_set_is_told_before_anything_is_sent(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MY_DSN")
    with pytest.raises(ValueError, match="secrets: MY_DSN not set"):
        cluster.launch(_with_secret("true"))


def test_a_secret_is_named_on_the_command_line(cluster: LocalCluster) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-c", "from fluster.cli import main; main()"),
            *("submit", "--follow", "--secret", "MY_DSN", "--", "sh", "-c", 'echo "${#MY_DSN}"'),
        ],
        env={**os.environ, "FLUSTER_CLUSTER_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"{len(_VALUE)}\n"), done.stderr


def test_what_looks_like_a_secret_is_masked_where_an_environment_is_shown() -> None:
    environment = EnvironmentConfig(env_vars={"HF_TOKEN": "hunter2", "MODE": "full"})
    assert "hunter2" not in repr(environment)
    with pytest.raises(ValueError, match="A_TOKEN") as refused:
        EnvironmentConfig(env_vars={"A_TOKEN": "hunter2\0"})
    assert "hunter2" not in str(refused.value)
    assert "MODE" in repr(environment)
    assert json.loads(environment.to_json())["env_vars"]["HF_TOKEN"] == "hunter2"
