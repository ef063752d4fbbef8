"""The end of an attempt's output, as it stands in the message about a job that failed."""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_LINES = 20
MAX_BYTES = 4096
_MAX_LINE_CHARACTERS = 500
_CUT = "…"
# ECMA-48: control sequences (colours, cursor), strings up to their terminator (titles, links), and two-byte escapes.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]?|[\]PX^_].*?(?:\x07|\x1b\\|$)|[ -/]*[0-~]?)|\x9b[0-?]*[ -/]*[@-~]?")


def last_words(lines: Sequence[str]) -> str:
    """The last of `lines`, 20 at most and 4 KiB together, without what could steer a terminal."""
    kept: list[str] = []
    size = 0
    for line in reversed(lines[-MAX_LINES:]):
        text = _plain(line)
        size += len(text.encode()) + 1
        if size > MAX_BYTES:
            break
        kept.append(text)
    return "\n".join(reversed(kept)).strip("\n")


def _plain(line: str) -> str:
    shown = _ESCAPES.sub("", line).rstrip("\r").rpartition("\r")[2]  # what a terminal would show of a progress bar
    text = "".join(each if each.isprintable() else " " for each in shown).rstrip()
    return text if len(text) <= _MAX_LINE_CHARACTERS else text[:_MAX_LINE_CHARACTERS] + _CUT
