"""What the tests of joblib have called."""

from __future__ import annotations

import os
from pathlib import Path

from tests.waiting import wait_until

PATIENCE_S = 60.0
WORKERS = 3


def square(number: int) -> int:
    return number * number


def where(_number: int = 0) -> int:
    return os.getpid()


def fail(number: int) -> int:
    if number == 7:
        raise LookupError(f"no {number}")
    return number


def stay(folder: Path, number: int = 0) -> int:
    """Say that it runs; return when the folder has been opened."""
    (folder / f"in-{number}-{os.getpid()}").touch()
    wait_until((folder / "open").exists, PATIENCE_S)
    return number


def arrived(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("in-*")]
