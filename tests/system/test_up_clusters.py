"""What is found without an address: the `fluster up` of this machine and user, and the LocalCluster that a program has open."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fluster import ActorPool, Cluster, LocalCluster, current_cluster, deploy
from fluster.cluster import local
from fluster.cluster.local import open_local_cluster
from fluster.errors import ClusterStartError
from fluster_bus.core.errors import NoAddressError
from tests.system.processes import Family

_COMMAND = [sys.executable, "-c", "from fluster.cli import main; main()"]


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: Family) -> None:
    """Nothing says where a cluster is, and none is up."""
    monkeypatch.delenv("FLUSTER_CLUSTER_ADDRESS", raising=False)
    monkeypatch.setenv("FLUSTER_RUN_DIR", str(tmp_path / "run"))


@contextmanager
def up(*options: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([*_COMMAND, "up", *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("export ")
            yield process
        finally:
            process.send_signal(signal.SIGTERM)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*_COMMAND, *arguments], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.usefixtures("shell")
def test_the_one_that_is_up_is_found_and_ended(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with up("--store-dir", str(tmp_path / "store")) as cluster:
        listed = run("workers", "--output", "json")
        assert listed.returncode == 0, listed.stderr
        assert "taking the `fluster up` that runs" in listed.stderr
        with Cluster() as joined:
            assert len(joined.list_workers()) == 1
        assert str(tmp_path / "store/address.json") in capfd.readouterr().err
        (row,) = json.loads(run("local", "--output", "json").stdout)
        assert row["pid"] == cluster.pid

        second = run("up", "--store-dir", str(tmp_path / "store"))
        assert second.returncode == 3
        assert f"is in use by another cluster (process {cluster.pid})" in " ".join(second.stderr.split())
        with pytest.raises(ClusterStartError, match="is in use by another cluster"):
            LocalCluster(store_dir=tmp_path / "store")

        assert run("local", "--stop", "1").returncode == 4
        assert run("local", "--stop-all").stdout.split() == [str(cluster.pid)]
        assert cluster.wait(60) == 0
    assert json.loads(run("local", "--output", "json").stdout) == []
    gone = run("--address", str(tmp_path / "store/address.json"), "ps")
    assert gone.returncode == 3
    assert "does not exist: what wrote it, such as a `fluster up`, has ended" in gone.stderr


@pytest.mark.usefixtures("shell")
def test_of_several_none_is_taken_and_one_that_was_killed_is_forgotten(capfd: pytest.CaptureFixture[str]) -> None:
    with up() as first:
        with up() as second:
            with pytest.raises(NoAddressError, match="2 clusters of this user are up: set it to one of"):
                Cluster()
            second.kill()
            second.wait()
        with Cluster() as joined:
            assert len(joined.list_workers()) == 1
        assert json.loads(run("local", "--output", "json").stdout)[0]["pid"] == first.pid


class Counter:
    def add(self, amount: int) -> int:
        return amount


@pytest.mark.usefixtures("shell")
def test_the_open_local_cluster_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_current", None)
    monkeypatch.setattr(local, "_start_local", lambda: pytest.fail("a second cluster was started"))
    with LocalCluster() as cluster:
        assert current_cluster() is cluster
        pool: ActorPool[Counter] = pickle.loads(pickle.dumps(deploy(cluster, Counter)))
        assert pool.call().add(5) == 5
        pid = os.fork()
        if pid == 0:  # a child has none of its parent's connections
            os._exit(0 if open_local_cluster() is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
