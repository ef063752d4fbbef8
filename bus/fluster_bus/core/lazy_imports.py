"""Imports that wait until they are needed.

Modules of a package are imported when one of their names is asked for. And a module that scripts import before they start
a cluster imports next to nothing itself, and names here what it will need. `LocalCluster` imports that while its supervisor starts on another core.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence

_later: list[str] = []


def lazy_names(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], object]:
    """The `__getattr__` of a package that has names of its modules {within it: names}, each imported when one of them
    is asked for.
    """
    module_of = {name: f"{package}.{module}" for module, names in modules.items() for name in names}

    def find(name: str) -> object:
        if name not in module_of:
            raise _missing(package, name)
        return _keep(package, name, getattr(importlib.import_module(module_of[name]), name))

    return find


def lazy_exports(package: str, names: Sequence[str], sources: Sequence[str]) -> Callable[[str], object]:
    """The `__getattr__` of a package that exports these names of modules, each found in the first of them that has it.

    Those modules are imported that come before it, too.
    """

    def find(name: str) -> object:
        if name in names:
            for source in sources:
                found = getattr(importlib.import_module(source), name, None)
                if found is not None:
                    return _keep(package, name, found)
        raise _missing(package, name)

    return find


def _keep(package: str, name: str, found: object) -> object:
    setattr(sys.modules[package], name, found)
    return found


def _missing(package: str, name: str) -> AttributeError:
    return AttributeError(f"module {package!r} has no attribute {name!r}")


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
