"""What a program needs only when it has a cluster.

It is imported while its LocalCluster comes up, on the other core; so the modules of what a script imports before it
starts one import next to nothing themselves, and name here what they will need.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence

_later: list[str] = []


def import_later(*modules: str) -> None:
    """Have the modules in memory by the time that a cluster is there."""
    _later.extend(modules)


def import_now() -> None:
    """Import them, and build the messages that they use, in a process that has to wait anyway or is about to be copied."""
    collects = gc.isenabled()
    gc.disable()  # nothing of a module is garbage
    try:
        for name in _later:  # all, also when another thread is at it; these may name more
            importlib.import_module(name)
        from fluster_bus.messages.parts.model import build_all

        build_all()
    finally:
        if collects:
            gc.enable()


def names_of(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], object]:
    """The `__getattr__` of a package that has names of its modules {within it: names}, each imported when one of them
    is asked for.
    """
    module_of = {name: f"{package}.{module}" for module, names in modules.items() for name in names}

    def find(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(module_of[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    return find
