"""What folders take on their disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_BLOCK_BYTES = 512  # of st_blocks, whatever the file system


def size_of(folder: Path) -> int:
    """All that `sizes` finds."""
    return sum(sizes(folder))


def sizes(folder: Path, *, spared: Path | None = None) -> Iterator[int]:
    """The bytes of each thing in `folder`, one by one, without what is on other disks, and without the file `spared`.

    A file with several names in it counts once, one that goes meanwhile not at all.
    """
    try:
        own = os.lstat(folder)
    except FileNotFoundError:
        return
    yield own.st_blocks * _BLOCK_BYTES
    known: set[int] = set()  # of those with several names
    waiting = [str(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                yield from _sizes_in(entries, own.st_dev, waiting, known, str(spared))
        except OSError:  # it goes at this moment, or may not be looked into
            continue


def _sizes_in(
    entries: Iterator[os.DirEntry[str]], device: int, waiting: list[str], known: set[int], spared: str
) -> Iterator[int]:
    for entry in entries:
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        if status.st_dev != device or status.st_ino in known or entry.path == spared:
            continue
        if entry.is_dir(follow_symlinks=False):
            waiting.append(entry.path)
        elif status.st_nlink > 1:
            known.add(status.st_ino)
        yield status.st_blocks * _BLOCK_BYTES
