"""Importing nats-py without aiohttp, which it takes along wherever that is installed, for web sockets."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_AIOHTTP = "aiohttp"
_TRANSPORT, _FOR_WEB_SOCKETS = "nats.aio.transport", (_AIOHTTP, "multidict")


@contextmanager
def without_web_sockets() -> Iterator[None]:
    """Nothing that this thread imports meanwhile takes aiohttp along.

    It is half of the import of nats-py, and 9 MiB in the processes of a small cluster, which has no web sockets. Whoever uses
    nats-py for some gets aiohttp then.
    """
    hidden = _Hidden()
    sys.meta_path.insert(0, hidden)
    try:
        yield
    finally:
        hidden.thread = None  # whoever changed the finders meanwhile may yet put it back
        if hidden in sys.meta_path:
            sys.meta_path.remove(hidden)
        transport: Any = sys.modules.get(_TRANSPORT)
        if hidden.was_asked_for and transport is not None and transport.aiohttp is None:
            for name in _FOR_WEB_SOCKETS:
                setattr(transport, name, _Later(name))


class _Hidden:
    """To one thread aiohttp is not installed."""

    def __init__(self) -> None:
        self.was_asked_for = False  # and would have been found
        self.thread: int | None = threading.get_ident()

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        if name == _AIOHTTP and threading.get_ident() == self.thread and self._others_find(name):
            self.was_asked_for = True
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    def _others_find(self, name: str) -> bool:
        thread, self.thread = self.thread, None
        try:
            return importlib.util.find_spec(name) is not None
        finally:
            self.thread = thread


class _Later:
    """A module that is imported when it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)
