"""Names of images, and what they were when they were used."""

from __future__ import annotations

import pytest

from fluster_bus.messages import JobId, JobRequest, Namespace, WorkerId
from fluster_bus.messages.jobs import Entrypoint, JobStatus
from fluster_bus.messages.parts.images import UsedImage, digest_of, engine_name, split_name
from fluster_services import job_lifecycle, lifecycle

A, B = (f"sha256:{letter * 64}" for letter in "ab")


@pytest.mark.parametrize(
    ("name", "repository", "version"),
    [
        ("python", "python", "latest"),
        ("python:3.12-slim", "python", "3.12-slim"),
        ("localhost:5000/a/b", "localhost:5000/a/b", "latest"),
        ("localhost:5000/a/b:1", "localhost:5000/a/b", "1"),
        (f"python@{A}", "python", A),
        (f"localhost:5000/a:1@{A}", "localhost:5000/a", A),
    ],
)
def test_a_name_is_split_into_repository_and_version(name: str, repository: str, version: str) -> None:
    assert split_name(name) == (repository, version)


def test_engines_are_not_told_a_tag_before_a_digest() -> None:
    assert engine_name(f"python:3.12@{A}") == f"python@{A}"
    assert engine_name("python:3.12") == "python:3.12"


@pytest.mark.parametrize("name", ["python:3", "docker.io/library/python:3", "library/python", f"python:3@{A}"])
def test_the_digest_is_that_of_the_registry_of_the_name(name: str) -> None:
    assert digest_of(name, [f"other.example.org/python@{B}", f"python@{A}"]) == A


def test_an_image_that_was_built_here_has_none() -> None:
    assert digest_of("mine:1", []) is None
    used = UsedImage(name="mine:1", id=A)
    assert (str(used), used.exact) == (f"mine:1 ({A})", None)


def test_it_is_shown_with_its_digest_and_pulled_by_that() -> None:
    used = UsedImage(name="python:3", id=A, digest=B)
    assert (str(used), used.exact) == (f"python:3@{B}", f"python@{B}")
    assert used.is_same(UsedImage(name="x", id=A))
    assert used.is_same(UsedImage(name="x", id=B, digest=B))
    assert not used.is_same(UsedImage(name="x", id=B, digest=A))


def test_the_record_of_a_task_keeps_it_for_the_next_attempt() -> None:
    request = JobRequest(name="j", entrypoint=Entrypoint(command=("true",)), max_retries_failure=1)
    (task,) = job_lifecycle.new_tasks(job_lifecycle.new_job(Namespace("ns"), JobId("j"), request, order=1, now=0))
    worker, used = WorkerId("w"), UsedImage(name="python:3", id=A, digest=B)
    claimed = lifecycle.claim(task, attempt=1, worker_id=worker, now=1)
    assert claimed is not None
    running = lifecycle.run(claimed, attempt=1, worker_id=worker, now=2, image=used)
    assert running is not None
    assert running.transitions[-1].reason == f"started, in image python:3@{B}"
    ended = lifecycle.end(running, attempt=1, worker_id=worker, now=3, state=JobStatus.FAILED, reason="exit code 1")
    assert ended is not None
    again = lifecycle.retry(ended, now=4)
    assert again is not None
    assert (again.state, again.image) == (JobStatus.PENDING, used)
