"""Errors of the bus, the root of every error that Fluster raises, and warnings about what others wrote and cannot be used.

FlusterError
└── BusError
    ├── ConnectError            no server there, or it refused the credentials
    │   ├── CredentialsError
    │   └── UntrustedServerError  its certificate has expired, is of another host, or of an unknown authority
    ├── DisconnectedError       the connection is lost; it is being rebuilt
    ├── ClosedError             you closed this connection
    ├── RequestTimeoutError     no answer came in time
    ├── NoRespondersError       no program listens on that subject
    ├── ServiceError            a service answered with an error; `code` is stable
    │   ├── BusyError           it has too many requests of this namespace: ask again in a moment
    │   └── WireVersionError    it and this program have no version of the wire in common: one is to be updated
    ├── MessageTooLargeError
    ├── AddressError            what names the bus is not an address, or its file is not private
    │   └── NoAddressError
    ├── InvalidNameError
    ├── InvalidMessageError     what arrived is not what was agreed
    ├── StorageError            the server could not store it
    │   ├── NamespaceFullError  a namespace has used up its room there
    │   ├── NamespaceGoneError  the cluster does not have the namespace, or no longer
    │   ├── StreamNotFoundError
    │   └── StorageTimeoutError the server did not say in time whether it could
    ├── ObjectNotFoundError     no stored file has that hash, or no longer
    ├── ObjectTooLargeError
    ├── ObjectCorruptError      a stored file is not what its hash says
    ├── PayloadLostError        what a message names lay in the memory of a process that has ended, or let it go
    ├── BackupError             a backup could not be made, read or restored
    ├── KeyExistsError
    ├── RevisionConflictError   another writer changed the record first
    └── ServerStartError        the embedded server did not come up
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging

_TOLD_A_MINUTE = 20
_PERIOD_S = 60.0
_MAX_CHARACTERS = 500


class FlusterError(Exception):
    """Anything that Fluster itself raises; users' own exceptions arrive as themselves."""


class BusError(FlusterError):
    """Something went wrong between this process and the bus."""


class ConnectError(BusError):
    """No connection to the bus could be made."""


class CredentialsError(ConnectError):
    """The server refused these credentials, or they could not be read."""


class UntrustedServerError(ConnectError):
    """The connection to the server cannot be encrypted so that it is to be trusted; nothing was sent to it."""


class DisconnectedError(BusError):
    """The connection to the bus is lost at the moment; it comes back by itself."""


class ClosedError(BusError):
    """This connection was closed by its owner."""


class RequestTimeoutError(BusError, TimeoutError):
    """No answer came in time. Whether the request was carried out is not known."""


class NoRespondersError(BusError):
    """No program listens on the subject: the request was not delivered."""


class ServiceError(BusError):
    """A service answered with an error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code  # stable: a word that other versions understand as well

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.code, str(self))


class BusyError(ServiceError):
    """A service has so many requests of this namespace waiting that it did not take this one; ask again in a moment."""

    def __init__(self, message: str) -> None:
        super().__init__(type(self).__name__, message)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self),)


class WireVersionError(ServiceError):
    """A service and this program have no version of the wire in common; the text names the versions, and which to update."""

    def __init__(self, message: str) -> None:
        super().__init__(type(self).__name__, message)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self),)


_SERVICE_ERRORS: dict[str, type[BusyError | WireVersionError]] = {
    each.__name__: each for each in (BusyError, WireVersionError)
}


def service_error(code: str, message: str) -> ServiceError:
    """The error that a service answered with, as the class that it stands for."""
    kind = _SERVICE_ERRORS.get(code)
    return kind(message) if kind is not None else ServiceError(code, message)


class MessageTooLargeError(BusError, ValueError):
    """The message is larger than the server takes."""


class InvalidNameError(BusError, ValueError):
    """A name has characters that cannot be part of a subject."""


class InvalidMessageError(BusError, ValueError):
    """The bytes that arrived are not the message that was agreed."""


class StorageError(BusError):
    """The server did not store it: no room, no such stream, or no answer."""


class NamespaceFullError(StorageError):
    """The namespace has used up its share of the store: it was refused, and no other namespace's room was taken for it."""


class NamespaceGoneError(StorageError):
    """The cluster does not have the namespace, or no longer."""


class StreamNotFoundError(StorageError):
    """The stream or bucket does not exist."""


class StorageTimeoutError(StorageError, TimeoutError):
    """The server did not say in time whether it stored it: it may be slow, and have room again later."""


class ObjectNotFoundError(BusError, LookupError):
    """No stored file has that hash, or no longer."""


class ObjectTooLargeError(BusError, ValueError):
    """The file is larger than may be stored, or than the reader takes."""


class ObjectCorruptError(BusError):
    """The stored file is not what its hash says."""


class PayloadLostError(BusError):
    """The bytes that a message names can no longer be read: they lay in the memory of their sender."""


class BackupError(BusError):
    """A backup could not be made, read or restored; the text says what is to be done."""


class KeyExistsError(BusError):
    """The key is there already."""


class RevisionConflictError(BusError):
    """The record changed since it was read: read it again and decide anew."""


class ServerStartError(BusError):
    """The embedded nats-server did not come up."""


class AddressError(BusError, ValueError):
    """What should say where the bus is cannot be used."""


class NoAddressError(AddressError):
    """Nothing says where the bus is."""


# What fails in the same way however often it is tried.
HOPELESS = (NamespaceGoneError, MessageTooLargeError, ObjectTooLargeError, InvalidNameError, InvalidMessageError)


def one_bounded_line(text: object) -> str:
    """`text`, which may be another's, as one bounded line that can be encoded and shown."""
    said = str(text)
    line = "".join(each if each.isprintable() else "?" for each in " ".join(said[: 2 * _MAX_CHARACTERS].split()))
    return line if len(line) <= _MAX_CHARACTERS and len(said) <= 2 * _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]}…"


class FaultLog:
    """The warnings of one reader, each one bounded line: a writer of a million bad records fills no log with them."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._since = -_PERIOD_S
        self._told = self._left_out = 0

    def warning(self, message: str, *parts: object) -> None:
        """Log what could not be used, and why; each part of the line is cut and made printable."""
        if self._has_room():
            self._log.warning(message, *(each if isinstance(each, int) else one_bounded_line(each) for each in parts))

    def fault(self, error: BaseException, message: str, *parts: object) -> None:
        """Log an error that no reader should have met, with where it was raised."""
        if self._has_room():
            kept: list[object] = [each if isinstance(each, int) else one_bounded_line(each) for each in parts]
            self._log.error(
                f"{message}: %s", *kept, one_bounded_line(f"{type(error).__name__}: {error}"), exc_info=error
            )

    @contextmanager
    def contained(self, message: str, *parts: object) -> Iterator[None]:
        """One unit of work: what is wrong with it ends it, is logged, and goes no further.

        What befalls the reader itself, such as a lost connection, is raised.
        """
        try:
            yield
        except (InvalidMessageError, InvalidNameError) as error:
            self.warning(f"{message}: %s", *parts, error)
        except FlusterError:
            raise
        except Exception as error:
            self.fault(error, message, *parts)

    def _has_room(self) -> bool:
        now = time.monotonic()
        if now - self._since >= _PERIOD_S:
            if self._left_out:
                self._log.warning("%d more warnings of this kind were left out", self._left_out)
            self._since, self._told, self._left_out = now, 0, 0
        self._told += 1
        self._left_out += self._told > _TOLD_A_MINUTE
        return self._told <= _TOLD_A_MINUTE
