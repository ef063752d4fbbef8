"""What a worker is called, and where it keeps what it must find again, unless it is told otherwise."""

from __future__ import annotations

import socket
from pathlib import Path

WORKER_ID_VARIABLE, STATE_DIR_VARIABLE = "FLUSTER_WORKER_ID", "FLUSTER_STATE_DIR"


def default_worker_id() -> str:
    """The host's name, as it can stand in a subject."""
    return socket.gethostname().replace(".", "-")


def default_state_dir() -> Path:
    """In the home of who starts it."""
    return Path.home() / ".fluster" / "worker"
