"""Processes that could not be killed: remembered until they are gone."""

from __future__ import annotations

from collections.abc import Sequence

from fluster_services.worker.contract.outcome import describe_survivors
from fluster_services.worker.linux.processes import start_ticks

_MAX_ATTEMPTS = 100


class Survivors:
    """What is left of the attempts of one worker, and should not be."""

    def __init__(self) -> None:
        self._left: dict[str, list[tuple[int, str | None]]] = {}  # {attempt: (pid, when it was started)}

    def add(self, key: str, pids: Sequence[int]) -> None:
        """These processes of an attempt have survived; the oldest are forgotten where there are very many."""
        self._left[key] = [(pid, start_ticks(pid)) for pid in pids]
        while len(self._left) > _MAX_ATTEMPTS:
            del self._left[next(iter(self._left))]

    def problems(self) -> list[str]:
        """What still is there, one line for each attempt."""
        there = {key: [each for each in found if _is_there(*each)] for key, found in self._left.items()}
        self._left = {key: found for key, found in there.items() if found}
        return [f"of {key}, {describe_survivors([pid for pid, _ in found])}" for key, found in self._left.items()]


def _is_there(pid: int, started: str | None) -> bool:
    """Whether that very process is there: its number may be another's by now."""
    return started is not None and start_ticks(pid) == started
