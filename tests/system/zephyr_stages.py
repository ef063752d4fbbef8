"""Functions of pipelines, which their workers import."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fluster.cluster import current_task


def double(number: int) -> int:
    return number * 2


def is_third(number: int) -> bool:
    return number % 3 == 0


def spread(number: int) -> list[int]:
    return [number] * (number % 4)


def last_digit(number: int) -> int:
    return number % 10


def total(key: int, numbers: Iterator[int]) -> tuple[int, int]:
    return key, sum(numbers)


def row(number: int) -> dict[str, Any]:
    return {"id": number, "name": f"row {number}", "even": number % 2 == 0}


def row_id(found: dict[str, Any]) -> int:
    value: int = found["id"]
    return value


def lines_of(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines()


def first(_key: object, items: Iterator[Any]) -> Any:
    return next(items)


def fail_at_seven(number: int) -> int:
    if number == 7:
        raise LookupError("seven is not to be had")
    return number


class DieOnce:
    """Kills the process that first comes to one of the numbers."""

    def __init__(self, marker: Path, number: int) -> None:
        self._marker = marker
        self._number = number

    def __call__(self, number: int) -> int:
        if number == self._number and not self._marker.exists():
            self._marker.write_text(str(os.getpid()), encoding="utf-8")
            os.kill(os.getpid(), signal.SIGKILL)
        return number


class StayOnce:
    """The task that first comes to one of the numbers says on which worker it is, and goes no further."""

    def __init__(self, marker: Path, number: int) -> None:
        self._marker = marker
        self._number = number

    def __call__(self, number: int) -> int:
        if number == self._number and not self._marker.exists():
            draft = self._marker.with_name("draft")
            draft.write_text(current_task().worker_id, encoding="utf-8")
            draft.rename(self._marker)
            threading.Event().wait()
        return number
