"""The configuration language of nats-server."""

from __future__ import annotations


def quoted(text: str) -> str:
    """`text` as a string of the server's configuration language."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
