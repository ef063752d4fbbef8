"""Forking: daemons, templates and keepers are forked from a process that has imported what they need.

So a start takes milliseconds, and the memory of imported modules is shared. A forked child ends by itself, never in the frames
that it was forked in.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from fluster_services.immortal_objects import keep_shared

_DISABLE_PLUGINS, _ALL = "PYDANTIC_DISABLE_PLUGINS", "__all__"


def import_own(*modules: str) -> None:
    """Have them in memory. For a single thread.

    Pydantic's plugins are for the models of users. It would search every installed package for some at the first model, which takes
    5 to 15 ms; a task that defines one does that now.
    """
    with _without_plugins():
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


def run_and_exit(body: Callable[[], object]) -> NoReturn:
    """Run `body` as all that this child does, and end with the status that it leaves with, or with 1 and what it raised.

    What the parent has registered for its own end is not run.
    """
    status = 1
    try:
        try:
            body()
            status = 0
        except SystemExit as leaving:
            status = _status_of(leaving)
        except BaseException:
            import traceback

            traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _status_of(leaving: SystemExit) -> int:
    """As Python has it: the number, or 1 and the text."""
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code
    sys.stderr.write(f"{leaving.code}\n")
    return 1
