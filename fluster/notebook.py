"""Whether this program is a notebook's."""

from __future__ import annotations

import sys


def is_notebook() -> bool:
    """True in a kernel of Jupyter."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None
