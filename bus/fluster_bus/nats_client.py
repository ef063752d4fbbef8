"""nats-py's client, with what it does for every message made quicker."""

from __future__ import annotations

from nats.aio.client import Client


class QuickClient(Client):
    """The same, but the headers of a message, which nearly all of ours have, cost a few microseconds."""

    @staticmethod
    def _parse_header_lines(raw: bytes) -> dict[str, str]:
        """As nats-py reads them, at one go: it looks at each character of each name."""
        headers: dict[str, str] = {}
        for line in raw.decode("utf-8", "replace").split("\r\n"):
            name, separator, value = line.partition(":")
            name = name.strip()
            # A name is a token: ASCII, without white space.
            if separator and name.isascii() and len(name.split(None, 1)) < 2:
                headers[name] = value.strip()
        return headers
