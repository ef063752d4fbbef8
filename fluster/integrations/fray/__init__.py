"""Fluster as a cluster for fray, by which Zephyr and its kin reach the one that they run on."""

try:
    from fray.actor import ActorUnavailableError as _ActorUnavailableError  # noqa: F401 - older ones have none
except ImportError as error:
    raise ImportError(
        "fluster.integrations.fray needs fray from 0.2.227 on: pip install 'fluster[zephyr]', with Python 3.12 or 3.13"
    ) from error

from fluster.integrations.fray.client import FlusterClient

__all__ = ["FlusterClient"]
