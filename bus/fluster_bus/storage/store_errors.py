"""What nats-py raises about streams, as Fluster's own errors: a store that is silent is worth another try, one that refuses is not."""

from __future__ import annotations

import nats.errors
import nats.js.errors

from fluster_bus.core.errors import StorageError, StorageTimeoutError

_NOT_YET = 10008  # "JetStream system temporarily unavailable"


def store_error(what: str, error: Exception) -> StorageError:
    """The error to raise where `what` was to happen to a stream."""
    if _is_silent(error):
        return StorageTimeoutError(f"{what}: the server's store did not answer in time")
    return StorageError(f"{what}: {error}")


def _is_silent(error: Exception) -> bool:
    if isinstance(error, nats.js.errors.ServiceUnavailableError):
        return error.err_code in (None, _NOT_YET)
    return isinstance(error, TimeoutError | nats.errors.NoRespondersError)
