"""Whether the server's disk is full, and was: decided here, without any I/O."""

from __future__ import annotations

from fluster_bus.core.roles import MAX_PAYLOAD_BYTES
from fluster_bus.server import MIN_FREE_BYTES


class StoreRoom:
    """Tells when a nats-server is to be started anew: a stream that it could not write once stays closed until then."""

    def __init__(self) -> None:
        self._was_full = False

    def see(self, free_bytes: int) -> bool:
        """True once there is room again, after a time in which the largest message would not have found any."""
        if free_bytes < MAX_PAYLOAD_BYTES:
            self._was_full = True
        elif self._was_full and free_bytes >= MIN_FREE_BYTES:
            self._was_full = False
            return True
        return False
