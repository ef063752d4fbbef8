"""Names of a package whose modules are imported when a name is asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def lazy_names(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], object]:
    """The `__getattr__` of a package that has names of its modules {within it: names}, each imported when one of them
    is asked for.
    """
    module_of = {name: f"{package}.{module}" for module, names in modules.items() for name in names}

    def find(name: str) -> object:
        if name not in module_of:
            raise _missing(package, name)
        return _keep(package, name, getattr(import_module(module_of[name]), name))

    return find


def lazy_exports(package: str, names: Sequence[str], sources: Sequence[str]) -> Callable[[str], object]:
    """The `__getattr__` of a package that exports these names of modules, each found in the first of them that has it.

    Those modules are imported that come before it, too.
    """

    def find(name: str) -> object:
        if name in names:
            for source in sources:
                found = getattr(import_module(source), name, None)
                if found is not None:
                    return _keep(package, name, found)
        raise _missing(package, name)

    return find


def _keep(package: str, name: str, found: object) -> object:
    setattr(sys.modules[package], name, found)
    return found


def _missing(package: str, name: str) -> AttributeError:
    return AttributeError(f"module {package!r} has no attribute {name!r}")
