"""Serving an object of fray's kind as an actor of Fluster's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fray.actor import ActorContext, _reset_current_actor, _set_current_actor
from fray.current_client import _current_client_var, set_current_client

from fluster.actors import ActorServer, actor
from fluster.actors.definition.definition import HOOKS, check_class, methods_of
from fluster.cluster import current_cluster, current_task
from fluster.integrations.fray.handles import FlusterActorHandle
from fluster_bus.messages import EnvironmentConfig

if TYPE_CHECKING:
    from fluster.integrations.fray.client import FlusterClient

LAST_CALLS_S = 5.0  # for those that an actor still has when it asks for its end


def host(
    actor_name: str,
    group_name: str,
    actor_class: type,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    *,
    max_concurrency: int,
    environment: EnvironmentConfig,
) -> None:
    """What each task of a group runs: make the actor, and serve it until it or the cluster ends it.

    Raises what the constructor raised, and the first of the errors with which the actor asked for its end.
    """
    from fluster.integrations.fray.client import FlusterClient

    client = FlusterClient(current_cluster(), environment=environment)
    index = current_task().task
    ending = threading.Event()
    context = ActorContext(
        handle=FlusterActorHandle(actor_name, index, client), index=index, group_name=group_name, shutdown_event=ending
    )
    server = ActorServer(client.cluster)
    serve(server, actor_name, made(context, client, actor_class, args, kwargs), client, max_concurrency)

    def end_when_asked() -> None:
        ending.wait()
        server.shutdown(LAST_CALLS_S)

    threading.Thread(target=end_when_asked, name=f"end of {actor_name}", daemon=True).start()
    try:
        server.serve()
    finally:
        ending.set()  # for threads of the actor's own
    if context._errors:  # noqa: SLF001 - by which fray's backends know
        raise context._errors[0]  # noqa: SLF001


def made(
    context: ActorContext,
    client: FlusterClient,
    actor_class: type,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> object:
    """An instance whose constructor found `current_actor()` and `current_client()`."""
    token = _set_current_actor(context)
    try:
        with set_current_client(client):
            return actor_class(*args, **kwargs)
    finally:
        _reset_current_actor(token)


def serve(server: ActorServer, actor_name: str, instance: object, client: FlusterClient, max_concurrency: int) -> None:
    """Have `server` serve the methods of `instance`, on threads where `current_client()` is this client.

    So it is also that of the handles among the arguments, which the instance may use on threads of its own.
    """
    methods = {name: _unbound(getattr(instance, name)) for name in methods_of(type(instance))}
    served = actor(max_concurrency=max_concurrency)(type(type(instance).__name__, (), methods))()
    server.register(actor_name, served, initializer=lambda: _current_client_var.set(client))


def _unbound(method: Callable[..., object]) -> Callable[..., object]:
    def call(_served: object, /, *args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return call


def check_servable(actor_class: type) -> None:
    """Raise TypeError for a class that could not be called."""
    check_class(actor_class)
    if not methods_of(actor_class):
        raise TypeError(f"{actor_class.__name__} has no method that could be called: no name without underscore")
    hooks = sorted(name for name in HOOKS if hasattr(actor_class, name))
    if hooks:
        raise TypeError(
            f"{actor_class.__name__} has a method {hooks[0]!r}, a name that Fluster keeps for itself: rename it"
        )
