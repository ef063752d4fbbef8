"""The process that serves actors: what it has for them goes when they do, however that comes about."""

from __future__ import annotations

import threading

import pytest

from fluster import ActorServer, Cluster
from fluster_bus.core import subjects
from fluster_bus.core.errors import NoRespondersError
from fluster_bus.core.roles import Role
from tests.component.actor_env import NAMESPACE, TIMEOUT_S, Calculator, Env
from tests.waiting import wait_until


@pytest.mark.parametrize("lanes", ["on", "off"])
def test_actors_end_with_the_cluster_over_which_they_are_served(
    shared: Env,
    monkeypatch: pytest.MonkeyPatch,
    lanes: str,
) -> None:
    monkeypatch.setenv("FLUSTER_LANES", lanes)
    name = f"orphans-{lanes}"
    with Cluster(shared.server.credentials(Role.OPERATOR)) as cluster:
        server = ActorServer(cluster)
        server.register(name, Calculator())
        server.serve_background()
        assert shared.pool(name).call(timeout=TIMEOUT_S).add(1) == 2
    other = shared.cluster()
    with pytest.raises(NoRespondersError):
        other.portal.run(other.asynchronous.bus.request, subjects.actor_any(NAMESPACE, name, "add"))
    wait_until(lambda: not [each for each in threading.enumerate() if each.name.startswith(name)])
    server.shutdown()
