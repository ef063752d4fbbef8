"""Which release of Fluster this is. It stands in a file, which is read once for all that are forked later."""

from __future__ import annotations

from importlib.metadata import version

VERSION = version("fluster")
