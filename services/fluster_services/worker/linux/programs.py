"""Finds the programs that come with packages of this Python."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def find_program(name: str) -> Path | None:
    """The program next to this Python, else the one on PATH."""
    # Not resolved: in a virtual environment this is a link to a Python that lies elsewhere.
    found = shutil.which(name, path=Path(sys.executable).parent) or shutil.which(name)
    return None if found is None else Path(found).absolute()
