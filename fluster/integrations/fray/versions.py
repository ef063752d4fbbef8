"""What fray has had only since 0.2.227, and 0.2.20, the newest for Python 3.11, has not."""

from types import SimpleNamespace

from fray import types as fray

__all__ = ["ANY_REGION", "ActorUnavailableError", "in_full"]

try:
    from fray.actor import ActorUnavailableError
except ImportError:

    class ActorUnavailableError(RuntimeError):  # type: ignore[no-redef]
        """Raised when an actor is not there at the moment."""


ANY_REGION: str = getattr(fray, "ANY_REGION", "*")

# {field: its default}, of what is asked for with a JobRequest, a ResourceConfig or an EnvironmentConfig.
_LATER = {
    "processes_per_task": 1,
    "max_task_failures": 0,
    "timeout": None,
    "target_cluster": None,
    "container_profile": None,
    "secrets": None,
    "setup_scripts": None,
    "sync_packages": None,
}


def in_full(asked: fray.JobRequest | fray.ResourceConfig | fray.EnvironmentConfig) -> SimpleNamespace:
    """All that is asked for, whichever version asks: what that could not ask for is at its default."""
    return SimpleNamespace(**{**_LATER, **vars(asked)})
