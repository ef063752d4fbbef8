"""Actors in the process of a test: without a server, and with a clock that the test moves."""

from fluster.testing.local_actors import FakeClock, LocalActors

__all__ = ["FakeClock", "LocalActors"]
