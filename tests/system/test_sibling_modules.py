"""Callables from modules that the script can import, and the worker cannot."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import cloudpickle  # type: ignore[import-untyped, unused-ignore]
import pytest

from fluster.cluster import LocalCluster
from fluster.worker_pool import WorkerPool
from fluster_bus.messages import EnvironmentConfig, JobStatus
from tests.system.job_requests import call, texts

PATIENCE_S = 60


@pytest.fixture
def sibling(cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of a folder that was no part of the search path when the cluster was started."""
    assert cluster.list_workers()
    (tmp_path / "sibling.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("sibling")
    del sys.modules["sibling"]


def test_a_module_that_the_worker_lacks_is_told_with_what_can_be_done(
    cluster: LocalCluster, sibling: ModuleType
) -> None:
    job_id = cluster.launch(call(sibling.double, 2))
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'sibling': .*pass its folder as workspace"):
        cluster.result(job_id, timeout=PATIENCE_S)
    info = cluster.poll(job_id)
    assert info.status is JobStatus.FAILED
    assert info.error_message.startswith(
        "ModuleNotFoundError: No module named 'sibling': the job's callable needs it, and the worker has none. If it is "
        "yours, pass its folder as workspace=…, define the callable in the script that you start, or call "
        "cloudpickle.register_pickle_by_value(sibling) before the launch; if it is a package, name it in pip_packages=…"
    )
    written = "\n".join(texts(cluster, job_id, "stderr"))
    assert written.count("Traceback") == 1, "what it was raised from says nothing more"


def test_a_pool_tells_it_too_and_takes_its_environment(cluster: LocalCluster, sibling: ModuleType) -> None:
    told = r"^No module named 'sibling': the pool's function needs it, .*register_pickle_by_value\(sibling\) before it"
    with WorkerPool(cluster, 1) as pool:
        with pytest.raises(ModuleNotFoundError, match=told):
            pool.submit(sibling.double, 2).result(PATIENCE_S)
        with pytest.raises(ModuleNotFoundError, match=told):
            pool.map(sibling.double, [2]).results(PATIENCE_S)
    environment = EnvironmentConfig(workspace=Path(str(sibling.__file__)).parent)
    with WorkerPool(cluster, 1, environment=environment) as pool:
        assert pool.submit(sibling.double, 2).result(PATIENCE_S) == 4


def test_a_workspace_has_it(cluster: LocalCluster, sibling: ModuleType) -> None:
    workspace = Path(str(sibling.__file__)).parent
    job_id = cluster.launch(call(sibling.double, 2, environment=EnvironmentConfig(workspace=workspace)))
    assert cluster.result(job_id, timeout=PATIENCE_S) == 4


def test_a_module_that_is_pickled_by_value_travels_along(cluster: LocalCluster, sibling: ModuleType) -> None:
    cloudpickle.register_pickle_by_value(sibling)
    try:
        request = call(sibling.double, 2)
    finally:
        cloudpickle.unregister_pickle_by_value(sibling)
    assert cluster.result(cluster.launch(request), timeout=PATIENCE_S) == 4


def test_what_a_callable_itself_does_not_find_is_told_as_python_does(cluster: LocalCluster) -> None:
    def work() -> None:
        import no_such_module  # type: ignore[import-not-found] # noqa: F401

    job_id = cluster.launch(call(work))
    info = cluster.wait(job_id, timeout=PATIENCE_S)
    assert info.error_message.startswith("ModuleNotFoundError: No module named 'no_such_module'; its last words")
