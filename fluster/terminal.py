"""Where a program's output is read: whether in a notebook, and what tasks write made safe for a terminal.

A terminal takes some of it for commands: to move, to retitle, to answer in the reader's name.
"""

from __future__ import annotations

import re
import sys
from typing import TextIO

# All that Unicode's C0, C1 and bidirectional controls have, but for what output needs: colours and weights (SGR,
# `ESC [ … m`), `\t`, `\n`, and `\r`, by which progress bars are written over.
_COLOURS = r"\x1b\[[0-9;:]*m"
_CONTROLS = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
_CONTROL = re.compile(_CONTROLS)
_EITHER = re.compile(f"{_COLOURS}|({_CONTROLS})")


def for_terminal(text: str) -> str:
    """`text` with controls shown as escapes of Python's strings; colours, tabs and ends of lines stay."""
    if _CONTROL.search(text) is None:  # as nearly always, and much sooner known
        return text
    return _EITHER.sub(lambda match: match[0] if match[1] is None else _escaped(match[1]), text)


def _escaped(control: str) -> str:
    return control.encode("unicode_escape").decode("ascii")


def shown(text: str, stream: TextIO) -> str:
    """`text` as it goes to `stream`: made safe where that is a terminal, and else as it was written."""
    return for_terminal(text) if stream.isatty() else text


def is_notebook() -> bool:
    """True in a kernel of Jupyter."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None
