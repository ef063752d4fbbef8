"""Imports of what a program needs only once it has a cluster.

A module that scripts import before they start a cluster imports next to nothing itself, and names here what it will
need. `LocalCluster` imports that while its supervisor starts on another core.
"""

from __future__ import annotations

import gc
import importlib

_later: list[str] = []


def import_later(*modules: str) -> None:
    """Name modules that `import_now` is to import."""
    _later.extend(modules)


def import_now() -> None:
    """Import what was named: in a process that waits anyway, or is about to be forked."""
    collects = gc.isenabled()
    gc.disable()  # nothing of a module is garbage
    try:
        for name in _later:  # all, also when another thread is at it; these may name more
            importlib.import_module(name)
    finally:
        if collects:
            gc.enable()
