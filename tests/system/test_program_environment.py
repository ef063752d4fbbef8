"""Tasks of a cluster of this machine have the environment of the program that started it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fluster.cluster import Cluster
from tests.system.job_requests import command, texts
from tests.system.processes import Family

_TIMEOUT_S = 120
_GIVEN = {
    "OMP_NUM_THREADS": "1",
    "MY_API_KEY": "k",
    "FLUSTER_SOMETHING": "x",
    "SLURM_JOB_ID": "7",
    "CUDA_VISIBLE_DEVICES": "3",
}
_PROGRAM = """
import os
from fluster import Entrypoint, JobRequest, LocalCluster

def look():
    return {name: os.environ.get(name) for name in %r}

with LocalCluster() as cluster:
    os.environ["OMP_NUM_THREADS"] = "later"
    os.environ["LATER"] = "1"
    print(cluster.result(cluster.launch(JobRequest(name="look", entrypoint=Entrypoint(callable=look)))))
"""


def test_tasks_get_what_the_program_had_when_it_started_the_cluster(family: Family) -> None:
    looked_at = [*_GIVEN, "LATER", "PYTHONPATH"]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM % looked_at],
        env=family.environment(PYTHONPATH=os.pathsep.join(sys.path), **_GIVEN),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = {"OMP_NUM_THREADS": "1", "MY_API_KEY": "k", "CUDA_VISIBLE_DEVICES": "3"}
    assert done.stdout == f"{ {name: expected.get(name) for name in looked_at} }\n"


def test_tasks_of_fluster_up_get_what_its_shell_has_without_secrets(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "from fluster.cli import main; main()", "up", "--store-dir", str(tmp_path / "store")],
        env=family.environment(PYTHONPATH=os.pathsep.join(sys.path), **_GIVEN),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as up:
        assert up.stdout is not None
        address = up.stdout.readline().strip().partition("=")[2]
        for name in _GIVEN:
            monkeypatch.delenv(name, raising=False)
        with Cluster(address) as cluster:
            job_id = cluster.launch(command("sh", "-c", "echo $OMP_NUM_THREADS-$MY_API_KEY-$SLURM_JOB_ID"))
            cluster.wait(job_id, timeout=_TIMEOUT_S)
            assert texts(cluster, job_id) == ["1--"]
        up.send_signal(signal.SIGINT)
        up.communicate(timeout=_TIMEOUT_S)
