"""What a task runs whose job is to be an actor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluster.actors.server import ActorServer


def host(name: str, actor_class: type[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Make the actor and serve it until this task is told to end. What the constructor raises ends the task."""
    from fluster.cluster import current_cluster

    def factory() -> object:
        return actor_class(*args, **kwargs)

    server = ActorServer(current_cluster())
    server.register(name, factory(), factory=factory)
    server.serve()
