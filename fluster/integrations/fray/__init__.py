"""Fluster as a cluster for fray, by which Zephyr and its kin reach the one that they run on."""

try:
    from fray.actor import HostedActor as _HostedActor  # noqa: F401 - older ones have none
except ImportError as error:
    raise ImportError(
        "fluster.integrations.fray needs fray, 0.2.20.dev202606180959 or newer: pip install 'fluster[zephyr]'"
    ) from error

from fluster.integrations.fray.client import FlusterClient
from fluster.integrations.fray.versions import ActorUnavailableError

__all__ = ["ActorUnavailableError", "FlusterClient"]
