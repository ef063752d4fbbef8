"""What a task runs whose job is to be an actor. A client that deploys it has no use for the rest."""

from __future__ import annotations

from collections.abc import Mapping

from fluster.actors.definition.definition import options_of


def host(name: str, actor_class: type[object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    """Make the actor and serve it until this task is asked to end. What the constructor raises ends the task."""
    from fluster.actors.server.server import ActorServer
    from fluster.cluster import current_cluster
    from fluster.cluster.refs import resolved
    from fluster_bus.core import codec

    # Each instance gets arguments that no other has changed.
    pickled = codec.encode((args, kwargs)) if options_of(actor_class).max_restarts else b""

    def make(args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        args, kwargs = resolved(args, kwargs)
        return actor_class(*args, **kwargs)

    def make_again() -> object:
        again_args, again_kwargs = codec.decode(pickled)
        return make(again_args, again_kwargs)

    server = ActorServer(current_cluster())
    server.register(name, make(args, kwargs), factory=make_again if pickled else None)
    server.serve()
