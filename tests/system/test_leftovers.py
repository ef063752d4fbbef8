"""Which processes a dead keeper has left behind."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest

from fluster_bus.running.fence_clock import fence_clock
from fluster_services.worker.linux.processes import leftovers

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere nothing tells")
NOBODY = 1 << 30  # no process has this number


@pytest.fixture
def mark() -> str:
    return f"FLUSTER_TEST_LEFTOVER={uuid.uuid4().hex}"


def running(script: str, *environment: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        ["sh", "-c", script], env={**os.environ, **dict(each.split("=", 1) for each in environment)}
    )
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def executing(mark: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that executes a program, and in it the same again, without end."""
    yield from running('exec sh -c "$AGAIN"', mark, 'AGAIN=exec sh -c "$AGAIN"')


@pytest.fixture
def unmarked() -> Iterator[subprocess.Popen[bytes]]:
    """A process of a session that is not its own."""
    yield from running("exec sleep 1000")


def test_one_that_is_just_executing_a_program_is_found(executing: subprocess.Popen[bytes], mark: str) -> None:
    found = [leftovers(NOBODY, 0.0, mark) for _ in range(100)]  # of which some 6 meet it between two programs
    assert [each for each in found if each != [executing.pid]] == []


def test_the_main_process_is_found_before_it_leads_a_session(unmarked: subprocess.Popen[bytes], mark: str) -> None:
    assert leftovers(unmarked.pid, fence_clock(), mark) == [unmarked.pid]


def test_a_stranger_with_the_number_of_the_main_process_is_left_alone(
    unmarked: subprocess.Popen[bytes], mark: str
) -> None:
    assert leftovers(unmarked.pid, fence_clock() - 60, mark) == []
