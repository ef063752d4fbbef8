"""What jobs that wait cost the controller."""

import os
from pathlib import Path

import psutil
import pytest

from fluster_bus.messages import Capacity, ResourceConfig
from fluster_bus.messages.parts.resources import GIB
from tests.system.daemons import Daemons
from tests.system.job_requests import call
from tests.system.processes import Family

JOBS = 1_000
FINISHED, MOST_BYTES_FINISHED = 1_800, 6_000  # so many that what a heap has to spare, some 0.3 MB, counts for little
MOST_BYTES_A_JOB = 28_000  # of 300 MB for 10,000, less what an idle controller takes


@pytest.mark.parametrize("payload_bytes", [0, 30_000])
def test_10_000_queued_jobs_fit_into_300_mb(family: Family, tmp_path: Path, payload_bytes: int) -> None:
    with Daemons(tmp_path, family) as daemons:
        daemons.start_controller()
        process = psutil.Process(daemons.running["controller"].pid)
        with daemons.connect() as cluster:
            requests = [call(len, os.urandom(payload_bytes), resources=ResourceConfig.with_cpu(1)) for _ in range(JOBS)]
            cluster.launch_many(requests[:100])  # what it needs once
            before = process.memory_info().rss
            for start in range(100, JOBS, 100):
                cluster.launch_many(requests[start : start + 100])
            assert (process.memory_info().rss - before) / (JOBS - 100) < MOST_BYTES_A_JOB


def test_a_finished_job_takes_6_kb(family: Family, tmp_path: Path) -> None:
    with Daemons(tmp_path, family) as daemons:
        daemons.start_controller()
        daemons.start_worker(total=Capacity(cpu=100, memory=64 * GIB))
        process = psutil.Process(daemons.running["controller"].pid)
        with daemons.connect() as cluster:

            def run(count: int) -> None:
                for _ in range(0, count, 50):
                    cluster.wait(cluster.launch_many([call(len, b"") for _ in range(50)]), timeout=60)

            run(200)  # what it needs once
            before = process.memory_info().rss
            run(FINISHED)
            assert (process.memory_info().rss - before) / FINISHED < MOST_BYTES_FINISHED
