"""On a shared cluster the actors that a program made by fray end with the program."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from fluster import JobStatus
from tests.optional import import_or_skip
from tests.system.daemons import Daemons
from tests.system.processes import Family
from tests.waiting import wait_until

import_or_skip("zephyr", "`make setup-zephyr` installs it")

HELPER = "fluster.owner_helper"
PROGRAM = """
import sys
from fluster import Cluster
from fluster.integrations.fray import FlusterClient
from fray.types import ResourceConfig

class Counter:
    def count(self):
        return 1

client = FlusterClient(Cluster())
small = ResourceConfig(cpu=0.1, ram="64m")
first = client.create_actor_group(Counter, name="first", count=1, resources=small)
first.wait_ready()
first.shutdown()
print("made", flush=True)
sys.stdin.readline()
second = client.create_actor_group(Counter, name="second", count=1, resources=small)
second.wait_ready()
print("made", flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_groups_of_a_program_end_when_it_is_killed(tmp_path: Path, family: Family) -> None:
    with Daemons(tmp_path, Family()) as daemons:
        daemons.start_controller()
        daemons.start_worker()
        program = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM)],
            env=family.environment(FLUSTER_CLUSTER_ADDRESS=daemons.address),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with daemons.connect() as cluster, program:
            assert program.stdin is not None
            assert program.stdout is not None
            assert program.stdout.readline() == "made\n"
            wait_until(lambda: not family.named(HELPER))  # nothing is owned
            program.stdin.write("\n")
            program.stdin.flush()
            assert program.stdout.readline() == "made\n"
            program.kill()
            (job,) = cluster.list_jobs(limit=1)
            info = cluster.wait(job.job_id, timeout=60)
            assert info.status is JobStatus.KILLED
            assert "has ended" in info.error_message
            wait_until(lambda: not family.named(HELPER))  # it has told the end
