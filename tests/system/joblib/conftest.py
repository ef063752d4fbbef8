from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from joblib import parallel_config

from fluster import Cluster, LocalCluster, WorkerPool
from fluster.cluster.refs import Ref
from fluster.integrations.joblib import FlusterBackend, register
from tests.system.joblib.calls import WORKERS

register()


@pytest.fixture(scope="module")
def pool(cluster: LocalCluster) -> Iterator[WorkerPool]:
    with WorkerPool(cluster, WORKERS) as pool:
        yield pool


@pytest.fixture
def backend(pool: WorkerPool) -> Iterator[FlusterBackend]:
    with parallel_config(backend="fluster", pool=pool) as config:
        yield config["backend"]


@pytest.fixture
def puts(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Ref[Any]]]:
    """The Refs that are made."""
    made: list[weakref.ref[Ref[Any]]] = []
    put = Cluster.put

    def noted(cluster: Cluster, value: Any) -> Ref[Any]:
        ref = put(cluster, value)
        made.append(weakref.ref(ref))
        return ref

    monkeypatch.setattr(Cluster, "put", noted)
    return made
