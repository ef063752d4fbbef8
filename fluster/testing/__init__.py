"""Actors in the process of a test: without a server, and with a clock that the test moves."""

from fluster.testing.fake_clock import FakeClock
from fluster.testing.local_actors import LocalActors

__all__ = ["FakeClock", "LocalActors"]
