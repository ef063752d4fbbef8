"""What is said while something is built that an attempt needs, and the failure that quotes it."""

from __future__ import annotations

import re
import time
from collections import deque

from fluster_services.worker.contract.faults import LaunchError

MAX_LINES = 500
MAX_LINE_BYTES = 2_000
_REASON_LINES, _REASON_CHARACTERS = 20, 4_000
_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

Line = tuple[float, str]  # (time, text)


def without_codes(text: str) -> str:
    """`text` without what a terminal would take for colours."""
    return _TERMINAL_CODES.sub("", text)


class BuildOutput:
    """What was said while something was built: the last lines of it."""

    def __init__(self) -> None:
        self.lines: deque[Line] = deque(maxlen=MAX_LINES)
        self.said = 0  # how many there were
        self.doing = ""  # now, in a few words
        self._of_command = 0  # since the last command began

    def add(self, text: str) -> None:
        self.lines.append((time.time(), without_codes(text)))
        self.said += 1
        self._of_command += 1

    def begin(self, command: str) -> None:
        """What is added from here on, `command` says."""
        self.add(f"$ {command}")
        self.doing = without_codes(command)
        self._of_command = 0

    def take(self, other: BuildOutput) -> None:
        """Add what was said elsewhere."""
        self.lines.extend(other.lines)
        self.said += other.said
        self.doing, self._of_command = other.doing, other._of_command

    def since(self, number: int) -> tuple[list[Line], int]:
        """The lines after the first `number`, and how many of those were dropped."""
        new = self.said - number
        kept = list(self.lines)[max(0, len(self.lines) - new) :]
        return kept, new - len(kept)

    def last_words(self) -> str:
        """Of the last command, as much as fits into the reason of a failure."""
        count = min(self._of_command, _REASON_LINES)
        texts = [text for _time, text in self.lines]
        return "\n".join(texts[len(texts) - count :])[-_REASON_CHARACTERS:]


class BuildError(LaunchError):
    """What an attempt needs could not be made; `output` is what was said meanwhile."""

    def __init__(self, message: str, output: BuildOutput | None = None) -> None:
        super().__init__(message)
        self.output = output or BuildOutput()
