"""Warnings about what others wrote and cannot be used: each is one bounded line, and of many only the first are logged."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from fluster_bus.core.errors import FlusterError, InvalidMessageError, InvalidNameError

_TOLD_A_MINUTE = 20
_PERIOD_S = 60.0
_MAX_CHARACTERS = 500


def one_bounded_line(text: object) -> str:
    """`text`, which may be another's, as one bounded line that can be encoded and shown."""
    said = str(text)
    line = "".join(each if each.isprintable() else "?" for each in " ".join(said[: 2 * _MAX_CHARACTERS].split()))
    return line if len(line) <= _MAX_CHARACTERS and len(said) <= 2 * _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]}…"


class FaultLog:
    """The warnings of one reader: a writer of a million bad records fills no log with them."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._since = -_PERIOD_S
        self._told = self._left_out = 0

    def warning(self, message: str, *parts: object) -> None:
        """Log what could not be used, and why; each part of the line is cut and made printable."""
        if self._has_room():
            self._log.warning(message, *(each if isinstance(each, int) else one_bounded_line(each) for each in parts))

    def fault(self, error: BaseException, message: str, *parts: object) -> None:
        """Log an error that no reader should have met, with where it was raised."""
        if self._has_room():
            kept: list[object] = [each if isinstance(each, int) else one_bounded_line(each) for each in parts]
            self._log.error(
                f"{message}: %s", *kept, one_bounded_line(f"{type(error).__name__}: {error}"), exc_info=error
            )

    @contextmanager
    def contained(self, message: str, *parts: object) -> Iterator[None]:
        """One unit of work: what is wrong with it ends it, is logged, and goes no further.

        What befalls the reader itself, such as a lost connection, is raised.
        """
        try:
            yield
        except (InvalidMessageError, InvalidNameError) as error:
            self.warning(f"{message}: %s", *parts, error)
        except FlusterError:
            raise
        except Exception as error:
            self.fault(error, message, *parts)

    def _has_room(self) -> bool:
        now = time.monotonic()
        if now - self._since >= _PERIOD_S:
            if self._left_out:
                self._log.warning("%d more warnings of this kind were left out", self._left_out)
            self._since, self._told, self._left_out = now, 0, 0
        self._told += 1
        self._left_out += self._told > _TOLD_A_MINUTE
        return self._told <= _TOLD_A_MINUTE
