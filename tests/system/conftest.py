from collections.abc import Iterator

import pytest

from fluster.cluster import LocalCluster
from tests.docker_engine import engine, own_engine  # noqa: F401 - fixtures
from tests.system.built_images import index  # noqa: F401 - a fixture
from tests.system.either_cluster import either  # noqa: F401 - a fixture
from tests.system.processes import Family
from tests.system.runtime_site import (  # noqa: F401 - fixtures
    any_site,
    docker_site,
    docker_template,
    shared_template,
    site,
    templates,
)

_PATIENCE_S = 120
_shared: list[LocalCluster] = []  # the one below, while it is there


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """A cluster of two workers with 8 CPUs each, for tests that do it no harm."""
    family = Family()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in family.variables.items():
            patch.setenv(name, value)
        started = LocalCluster(workers=2, cpu=16, namespaces=["other"])
    with started:
        _shared.append(started)
        yield started
        _shared.clear()
    family.wait_gone()


@pytest.fixture(scope="module", autouse=True)
def room_for_the_next_module() -> Iterator[None]:
    """What the tests of one module leave running on the shared cluster takes no room from those of the next."""
    yield
    for shared in _shared:
        left = [job.job_id for job in shared.list_jobs() if not job.status.finished()]
        for job_id in left:
            shared.terminate(job_id, reason="the tests that launched it are over")
        shared.wait(left, timeout=_PATIENCE_S)


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Iterator[Family]:
    """What is started from here belongs to it, and is gone afterwards, also when the test failed."""
    family = Family()
    for name, value in family.variables.items():
        monkeypatch.setenv(name, value)
    yield family
    family.kill()
