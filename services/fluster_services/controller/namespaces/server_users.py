"""A controller's end of the pipe to its cluster's supervisor, which lets users of further namespaces in (`fluster_services/local_users.py`)."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.core.errors import BusError
from fluster_bus.running.coroutines import retried
from fluster_services.local_users import ADD, FORGET, JOBS_FOLDER

_ANSWERED_S = 1.0


class LocalUsers:
    """The users of a local cluster's server."""

    def __init__(self, store_dir: Path, wishes: int) -> None:
        self._folder = store_dir / JOBS_FOLDER
        self._wishes = wishes

    async def let_in(self, namespace: str) -> bool:
        """Whether the server lets in the users of that namespace, within a second: it is to be asked again if it does not yet."""
        file = self._folder / f"{namespace}.json"
        self._wish(ADD, namespace)

        async def connect(_left_s: float) -> None:
            bus = await Bus.connect(BusAddress.parse(str(file)), name="looks-whether-it-is-let-in")
            await bus.close()

        try:
            # There is no file yet, or the server reads its configuration at this moment.
            await retried(connect, on=(BusError,), timeout_s=_ANSWERED_S)
        except BusError:
            return False
        return True

    def forget(self, namespace: str) -> None:
        """The namespace is gone: its users need not be let in at the next start."""
        self._wish(FORGET, namespace)

    def _wish(self, verb: str, namespace: str) -> None:
        with suppress(BlockingIOError):  # the supervisor is stopped: what is asked again is wished again
            os.write(self._wishes, f"{verb} {namespace}\n".encode())


class ServerUsers(Protocol):
    """The users of a server with passwords that the cluster's own supervisor keeps."""

    async def let_in(self, namespace: str, /) -> bool:
        """Have the users of a namespace let in; False when that takes longer, and is to be asked again."""

    def forget(self, namespace: str, /) -> None:
        """The namespace is gone: have its users let in no more from the cluster's next start on."""
