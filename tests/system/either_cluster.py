"""Clusters whose workers are processes of this machine, or each in a container: users do the same with both."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from fluster.cluster import LocalCluster
from tests.docker_engine import Engine
from tests.system.vm_site import docker_backend, vms

CPUS = 8.0  # of each worker


@dataclass(frozen=True)
class EitherCluster:
    """A cluster of two workers, and a folder that they and this process see."""

    cluster: LocalCluster
    shared: Path
    engine: Engine | None  # that has the workers' containers; None when they are processes

    @property
    def is_one_machine(self) -> bool:
        """Whether the workers see all that this process sees."""
        return self.engine is None

    def folder(self) -> Path:
        """A new one in the shared one."""
        return Path(tempfile.mkdtemp(dir=self.shared))


@pytest.fixture(scope="module", params=["processes", "containers"])
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EitherCluster]:
    shared = tmp_path_factory.mktemp("shared")
    if request.param == "processes":
        with LocalCluster(workers=2, cpu=2 * CPUS) as cluster:
            yield EitherCluster(cluster, shared, None)
        return
    engine = cast("Engine", request.getfixturevalue("engine"))
    with LocalCluster(workers=2, backend=docker_backend(engine, cpus=CPUS, memory="8GB", folders=[shared])) as cluster:
        yield EitherCluster(cluster, shared, engine)
    assert vms(engine) == []
