"""Does what an interpreter does at its end, in a process that ends elsewhere than in its main module.

As multiprocessing does it in its children: Python has no public function for either part. `tests/pure/worker/test_interpreter_end.py`
fails when one of them changes.
"""

from __future__ import annotations

import atexit
import threading


def end_interpreter() -> None:
    """Wait for threads, close their pools, and call what `atexit` has registered. Raises what those raise."""
    threading._shutdown()  # type: ignore[attr-defined] # noqa: SLF001
    atexit._run_exitfuncs()  # noqa: SLF001
