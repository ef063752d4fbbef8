"""The command `fluster`."""

from fluster.cli.app import main

__all__ = ["main"]
