"""pytest's plugin: the fixture `fluster_cluster`, a cluster on this machine for as long as the tests run.

pytest imports this in every run of every project that has Fluster installed, so it imports nothing that is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from fluster import LocalCluster

Number = TypeVar("Number", int, float)

_WORKERS = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fluster")
    group.addoption(
        "--fluster-workers",
        type=int,
        metavar="N",
        help="workers of the cluster that the fixture fluster_cluster starts (as the setting fluster_workers)",
    )
    group.addoption(
        "--fluster-cpu",
        type=float,
        metavar="N",
        help="CPUs that they offer together, whatever the machine has (as the setting fluster_cpu)",
    )
    parser.addini("fluster_workers", f"workers of the cluster that the fixture fluster_cluster starts ({_WORKERS})")
    parser.addini("fluster_cpu", "CPUs that they offer together (16, or four for each core of the machine)")


@pytest.fixture(scope="session")
def fluster_cluster(pytestconfig: pytest.Config) -> Iterator[LocalCluster]:
    """A cluster on this machine, which all tests share and which ends with them."""
    from fluster import LocalCluster

    workers = _setting(pytestconfig, "fluster_workers", int)
    cpu = _setting(pytestconfig, "fluster_cpu", float)
    with LocalCluster(workers=_WORKERS if workers is None else workers, cpu=cpu) as cluster:
        yield cluster


def _setting(config: pytest.Config, name: str, kind: Callable[[str], Number]) -> Number | None:
    """What the command line says, or else the configuration; None when neither says anything."""
    asked: Number | None = config.getoption(name)
    text = config.getini(name)
    if asked is not None or not text:
        return asked
    try:
        return kind(text)
    except ValueError as error:
        raise pytest.UsageError(f"{name} = {text}: give a number") from error
