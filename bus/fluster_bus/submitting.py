"""How a job is submitted: its request as a message in the queue, or stored, with a message that says where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fluster_bus import subjects
from fluster_bus.errors import MessageTooLargeError, ObjectNotFoundError
from fluster_bus.messages.jobs import JobRequest
from fluster_bus.messages.submissions import StoredRequest
from fluster_bus.object_kinds import PAYLOADS
from fluster_bus.objects import ObjectStore
from fluster_bus.stream_bounds import MAX_INLINE_BYTES
from fluster_bus.streams import append_data

if TYPE_CHECKING:
    from fluster_bus.bus import Bus


async def submit(bus: Bus, namespace: str, request: JobRequest, *, message_id: str) -> int:
    """The job's place in the queue of submissions. Sent twice under one `message_id` it is there once.

    Raises NamespaceFullError where as many submissions of the namespace wait as may, MessageTooLargeError, StorageError, BusError.
    """
    data = request.to_json()
    if len(data) > bus.max_payload:
        raise MessageTooLargeError(
            f"the request has {len(data):,} bytes, over the server's limit of {bus.max_payload:,}: pass a path or a name, and load "
            "the data inside the job"
        )
    if len(data) > MAX_INLINE_BYTES:
        stored = await store_request(bus, namespace, data)
        names = {"name": request.name, "job_id": request.job_id, "submission": request.submission}
        data = stored.model_copy(update=names).to_json()
    return await append_data(bus, subjects.jobs_submit(namespace), data, message_id=message_id)


async def store_request(bus: Bus, namespace: str, data: bytes) -> StoredRequest:
    """What may be submitted in the place of the request with this JSON. Raises StorageError, BusError."""
    sha256 = await ObjectStore(bus, namespace, PAYLOADS).put(data)
    return StoredRequest(stored_request=sha256, size=len(data))


async def read_request(bus: Bus, namespace: str, stored: StoredRequest) -> bytes:
    """The JSON of a stored request. Only for services.

    Raises ObjectNotFoundError, ObjectTooLargeError where there is more than it says, ObjectCorruptError, BusError.
    """
    store = ObjectStore(bus, namespace, PAYLOADS)
    try:
        return await store.get(stored.stored_request, max_bytes=stored.size)
    except ObjectNotFoundError:
        # A copy at another server may be behind the one that took it.
        await store.settle()
        return await store.get(stored.stored_request, max_bytes=stored.size)
