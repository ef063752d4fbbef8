"""Importing what is Fluster's own, and nobody else's."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

from fluster_bus.connection.web_sockets import without_web_sockets
from fluster_services.forking.shared_memory import keep_shared

_DISABLE_PLUGINS, _ALL = "PYDANTIC_DISABLE_PLUGINS", "__all__"


def import_own(*modules: str) -> None:
    """Have them in memory. For a single thread.

    Pydantic's plugins are for the models of users. It would search every installed package for some at the first model, which takes
    5 to 15 ms; a task that defines one does that now.
    """
    with _without_plugins(), without_web_sockets():
        for module in modules:
            importlib.import_module(module)


def import_kept(*modules: str, is_shared: bool = True) -> None:
    """As `import_own`, for good: in memory that is shared with what is forked from here, or for this process alone."""
    gc.disable()
    import_own(*modules)
    keep = keep_shared if is_shared else gc.freeze
    keep()
    gc.enable()


@contextmanager
def _without_plugins() -> Iterator[None]:
    before = os.environ.get(_DISABLE_PLUGINS)
    os.environ[_DISABLE_PLUGINS] = _ALL
    try:
        yield
    finally:
        if before is None:
            del os.environ[_DISABLE_PLUGINS]
        else:
            os.environ[_DISABLE_PLUGINS] = before
