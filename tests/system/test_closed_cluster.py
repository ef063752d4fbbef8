"""A cluster object that was closed says so, whatever it is asked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from fluster.cluster import Cluster, LocalCluster
from fluster_bus.core.errors import ClosedError
from fluster_bus.messages import JobId
from tests.system.job_requests import command, sleeper

PATIENCE_S = 60

_CALLS: dict[str, Callable[[Cluster], Any]] = {
    "launch": lambda cluster: cluster.launch(command("true")),
    "wait": lambda cluster: cluster.wait(JobId("a")),
    "list_jobs": lambda cluster: cluster.list_jobs(),
    "logs": lambda cluster: next(cluster.logs(JobId("a"))),
    "lookup_endpoints": lambda cluster: cluster.lookup_endpoints("a"),
}


@pytest.fixture
def closed(cluster: LocalCluster) -> Cluster:
    with Cluster(cluster.address) as closed:
        pass
    return closed


@pytest.mark.parametrize("call", _CALLS.values(), ids=_CALLS.keys())
def test_calls_tell_that_it_was_closed(closed: Cluster, call: Callable[[Cluster], Any]) -> None:
    assert closed.closed
    with pytest.raises(ClosedError, match=r"this cluster object was closed: make another, with Cluster\(address\)"):
        call(closed)
    closed.close()


def test_a_local_cluster_that_was_shut_down_says_so() -> None:
    local = LocalCluster()
    local.shutdown()
    with pytest.raises(ClosedError, match=r"this cluster object was closed"):
        local.launch(command("true"))
    assert local.namespace == "default"


def test_an_iterator_may_be_left_behind(cluster: LocalCluster) -> None:
    with Cluster(cluster.address) as other:
        job_id = other.launch(sleeper())
        changes, dropped = other.watch(job_id), other.watch(job_id)
        assert next(changes).job_id == next(dropped).job_id == job_id
    with pytest.raises(ClosedError):
        next(changes)
    del dropped  # what its end raises is a warning, and so fails the test
    cluster.terminate(job_id)
    cluster.wait(job_id, timeout=PATIENCE_S)


def test_whoever_waits_when_it_is_closed_is_told(cluster: LocalCluster) -> None:
    job_id = cluster.launch(sleeper())
    other = Cluster(cluster.address)
    changes, seen, told = other.watch(job_id), threading.Event(), []

    def follow() -> None:
        try:
            for _ in changes:
                seen.set()
        except BaseException as error:
            told.append(error)

    following = threading.Thread(target=follow)
    following.start()
    assert seen.wait(PATIENCE_S)
    other.close()
    following.join(PATIENCE_S)
    assert not following.is_alive()
    assert [type(error) for error in told] == [ClosedError]
    cluster.terminate(job_id)
    cluster.wait(job_id, timeout=PATIENCE_S)
