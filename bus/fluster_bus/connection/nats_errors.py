"""What nats-py raises, as Fluster's own errors, with the remedy."""

from __future__ import annotations

import nats.errors
import nats.js.errors

from fluster_bus.access.address import BusAddress
from fluster_bus.access.tls import HandshakeError
from fluster_bus.core.errors import (
    ConnectError,
    CredentialsError,
    StorageError,
    StorageTimeoutError,
    UntrustedServerError,
)


def is_refusal(error: Exception) -> bool:
    """Whether the server said that it does not take the credentials."""
    return "authorization" in str(error).lower()


def connect_error(address: BusAddress, error: Exception) -> ConnectError:
    """What the attempt to connect to `address` raises, which ended with `error`."""
    file = address.file
    if isinstance(error, HandshakeError):
        return UntrustedServerError(str(error))
    if is_refusal(error) and address.token is not None:
        return CredentialsError(
            f"{address} refused the credentials{f' in the file {file}' if file is not None else ''}: they were revoked, have expired, or "
            "are of another cluster: have new ones made with `fluster credentials add`"
        )
    if is_refusal(error):
        return CredentialsError(
            f"{address} refused the credentials"
            + (f" in the file {file}: they are of a cluster that is gone" if file is not None else "")
            + ": take the address that the cluster printed, with user and password, or the file it wrote"
        )
    reason = str(error) or "timed out"
    if file is not None:
        return ConnectError(
            f"no nats-server answers at {address}, which the file {file} names: the cluster that wrote it is "
            f"gone, or does not answer: start one, as with `fluster up`, and take the address that it prints ({reason})"
        )
    return ConnectError(f"no nats-server answers at {address}: is the cluster up? ({reason})")


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
