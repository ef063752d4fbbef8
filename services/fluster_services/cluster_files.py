"""Files and folders of clusters on this machine: those that only their owner can read, and those that killed clusters left.

A cluster's temporary folder holds passwords, logs and what its tasks left. While it runs its supervisor holds a lock in it, which
the system takes away with the process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "fluster-"
LOCK_FILE = "lock"


def sweep(*, but: Path) -> None:
    """Remove the temporary folders of this user's clusters that no living process holds; never the one that this process does.

    A look at its own lock would give that back.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if folder.name == but.name:
            continue
        with contextlib.suppress(OSError):  # it is another's, or another sweeps it
            if _is_own(folder):
                _remove_unheld(folder)


def _is_own(folder: Path) -> bool:
    return not folder.is_symlink() and folder.is_dir() and folder.stat().st_uid == os.geteuid()


def _remove_unheld(folder: Path) -> None:
    # Of one that is just being made the lock is empty, or not there yet. Nothing is created here: "r+" opens what there is.
    with (folder / LOCK_FILE).open("r+", encoding="utf-8") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if file.read().strip():
            shutil.rmtree(folder, ignore_errors=True)


_OWNER_ONLY = 0o600


def open_private(path: str, flags: int) -> int:
    """An `opener` of `open`, whatever the umask; a file that is there already keeps its mode."""
    return os.open(path, flags, _OWNER_ONLY)
