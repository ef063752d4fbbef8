"""nats-py's client, with what it does for every message made quicker."""

from __future__ import annotations

from nats.aio.client import Client

from fluster_bus.wire import parse_headers


class QuickClient(Client):
    """The same, but the headers of a message, which nearly all of ours have, cost a few microseconds."""

    @staticmethod
    def _parse_header_lines(raw: bytes) -> dict[str, str]:
        """As nats-py reads them, at one go: it looks at each character of each name."""
        return parse_headers(raw)
