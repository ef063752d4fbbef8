"""Fluster as a cluster for fray, by which Zephyr and its kin reach the one that they run on."""

try:
    import fray as _fray  # noqa: F401
except ImportError as error:
    raise ImportError("fluster.integrations.fray needs fray: pip install 'fluster[zephyr]'") from error

from fluster.integrations.fray.client import FlusterClient

__all__ = ["FlusterClient"]
