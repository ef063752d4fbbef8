"""Processes that could not be killed are reported until they are gone."""

import subprocess
import sys

import pytest

from fluster_services.worker.presence.wellness import Survivors


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells when processes were started")
def test_they_are_a_problem_as_long_as_they_are_there() -> None:
    survivors = Survivors()
    with subprocess.Popen(["sleep", "600"]) as process:
        survivors.add("default.job.0.1", [process.pid, 1 << 22])  # the other one has gone since
        told = f"of default.job.0.1, process {process.pid} survives SIGKILL, so it hangs in the kernel and keeps what it has"
        assert survivors.problems() == [told]
        process.kill()
    assert survivors.problems() == []


def test_there_are_never_very_many() -> None:
    survivors = Survivors()
    for number in range(1_000):
        survivors.add(str(number), [1])
    assert len(survivors._left) == 100  # noqa: SLF001 - bounded memory
