"""A folder that is there as a whole or not at all, and that only its owner can read."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fluster_bus.core.errors import BackupError

_LOCK = "lock"


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to be filled, which becomes `folder` when the body ends well, and else is removed.

    What one that was killed has left beside it is removed by the next. Raises BackupError where `folder` is there already, or
    cannot be written.
    """
    draft = folder.with_name(f".{folder.name}.partial")
    with _explained(folder):
        if folder.exists():
            raise BackupError(f"{folder} is there already: name another folder, or remove it")
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(draft / _LOCK, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            _hold(lock, folder)
            _empty(draft)
            try:
                yield draft
                (draft / _LOCK).unlink()
                _sync(draft)
                draft.rename(folder)
                _sync(folder.parent)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
        finally:
            os.close(lock)


@contextmanager
def private_file(path: Path) -> Iterator[BinaryIO]:
    """A new file for its owner alone, on the disk when the body ends. Raises OSError."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BackupError(
            f"the backup {folder} cannot be written: {error.strerror}; nothing of it is left: make room or rights there, or name "
            "another folder"
        ) from error


def _hold(lock: int, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BackupError(f"another one writes the backup {folder} at this moment: name another folder") from error


def _empty(draft: Path) -> None:
    for left in draft.iterdir():
        if left.is_dir():
            shutil.rmtree(left)
        elif left.name != _LOCK:
            left.unlink()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
