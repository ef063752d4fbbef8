"""The secrets of a namespace's jobs: written by whoever submits them, read by workers alone, removed when the job ends."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fluster_bus.core import subjects
from fluster_bus.core.errors import BusError, ObjectNotFoundError, StorageError
from fluster_bus.core.stream_bounds import SECRETS_KEPT_S
from fluster_bus.running.retries import retried
from fluster_bus.storage.stored_messages import StoredMessages

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus

MAX_SECRETS_BYTES = 64 << 10  # of one job
_REMOVAL_TIMEOUT_S = 600.0  # after a long absence of the bus they go with the rest, by their age


@dataclass(frozen=True)
class SecretStore:
    """Those of the jobs of a namespace, by how their submission is named."""

    bus: Bus
    namespace: str

    def name_of(self, submission: str) -> str:
        """The subject of those of one job; it does not tell whose they are."""
        return subjects.secrets(self.namespace, hashlib.blake2s(submission.encode(), digest_size=16).hexdigest())

    async def put(self, submission: str, values: Mapping[str, str]) -> None:
        """Store {variable: value} of one job; doing it again changes nothing. Raises StorageError, BusError."""
        await self._messages.append(self.name_of(submission), json.dumps(dict(values)).encode())

    async def get(self, submission: str) -> dict[str, str]:
        """What was put. Only services can. Raises ObjectNotFoundError, StorageError, BusError."""
        found = await self._messages.last(self.name_of(submission))
        values = json.loads(found.data) if found is not None else None
        if not isinstance(values, dict):
            raise ObjectNotFoundError(
                f"its secrets are not kept any more: they go when a job ends, or after a time, {SECRETS_KEPT_S / 86_400:g} days "
                "unless the cluster is set to another; submit it again"
            )
        return {str(name): str(value) for name, value in values.items()}

    async def remove(self, submission: str) -> None:
        """Remove those of one job. Only services can. Raises BusError."""
        await self.remove_named(self.name_of(submission))

    async def remove_named(self, name: str) -> None:
        """The same, by the name under which they are kept. Raises BusError."""
        request = json.dumps({"filter": name}).encode()
        await self.bus.request(subjects.stream_purge(subjects.secrets_stream(self.namespace)), request)

    async def names(self) -> set[str]:
        """Under which names there are some. Only services can ask. Raises BusError."""
        stream = subjects.secrets_stream(self.namespace)
        request = json.dumps({"subjects_filter": subjects.secrets(self.namespace)}).encode()
        told = json.loads((await self.bus.request(subjects.stream_info(stream), request)).data)
        if "error" in told:
            raise StorageError(f"stream {stream} tells nothing of itself: {told['error'].get('description')}")
        return set(told["state"].get("subjects") or ())

    @property
    def _messages(self) -> StoredMessages:
        return StoredMessages(self.bus, subjects.secrets_stream(self.namespace))


async def remove_secrets(store: SecretStore, submission: str) -> None:
    """Remove those of one job, once the bus lets them be removed."""
    await retried(lambda _left_s: store.remove(submission), on=(BusError,), timeout_s=_REMOVAL_TIMEOUT_S)
