"""Encrypted connections to servers: whose certificates a program trusts, and why it does not take one."""

from __future__ import annotations

import ipaddress
import re
import ssl
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from fluster_bus.core.errors import AddressError

CA_VARIABLE = "FLUSTER_CA"
SCHEME = "tls"
CA_FILE = "ca.pem"  # in folders of keys: the certificates by which servers are known

_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----[\s\w+/=]+?-----END CERTIFICATE-----")
_MAX_FILE_BYTES = 1 << 20
# What OpenSSL says of a certificate (X509_V_ERR_…).
_NOT_YET, _EXPIRED = {9}, {10}
_UNKNOWN_AUTHORITY = {2, 18, 19, 20, 21}
_OTHER_HOST = {62, 64}


class HandshakeError(OSError):
    """A server at which no encrypted connection can be made that is to be trusted; the text has the remedy."""


def certificates_in(text: str) -> str:
    """The certificates in `text`, which may hold more; "" when there are none."""
    return "".join(f"{each}\n" for each in _CERTIFICATE.findall(text))


def read_certificates(path: Path) -> str:
    """The certificates in a PEM file. Raises AddressError."""
    try:
        with path.open("rb") as file:
            found = certificates_in(file.read(_MAX_FILE_BYTES).decode("ascii", "replace"))
    except OSError as error:
        raise AddressError(f"the certificates in {path} cannot be read: {error.strerror}") from error
    if not found:
        raise AddressError(
            f"the file {path} holds no certificate: name one in PEM, of the authority that signed those of the servers"
        )
    return found


def client_context(ca: str | None) -> ssl.SSLContext:
    """For connections to servers whose certificates one of `ca` signed, or one that this machine trusts. Raises AddressError."""
    return ssl.create_default_context() if ca is None else _context(ca)


@lru_cache(maxsize=8)
def _context(ca: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cadata=ca)
    except ssl.SSLError as error:
        raise AddressError(
            f"the certificates of the servers' authority are damaged: copy them anew ({error.reason})"
        ) from error


def check_offer(server: str, info: Mapping[str, object]) -> bool:
    """Whether the connection to `server`, which greeted with `info`, is to be encrypted.

    Raises HandshakeError where it should be, and the server does not offer it: what follows are credentials.
    """
    if info.get("tls_required"):
        return True
    if not server.startswith(f"{SCHEME}://"):
        return False
    if not info.get("tls_available"):
        raise HandshakeError(
            f"the server at {server} does not encrypt connections: give it a certificate, or "
            "address it by nats:// on a network that you have to yourself"
        )
    return True


def handshake_error(server: str, error: ssl.SSLError) -> HandshakeError:
    """Why the connection to `server` cannot be encrypted, with the remedy."""
    code = getattr(error, "verify_code", None)
    if code in _EXPIRED:
        text = (
            f"the certificate of the server at {server} has expired: renew it there, and compare the clock of this "
            "machine"
        )
    elif code in _NOT_YET:
        text = f"the certificate of the server at {server} is not valid yet: compare the clocks of this machine and of the one that made it"
    elif code in _OTHER_HOST:
        text = (
            f"the certificate of the server at {server} is for other hosts: address it by a name that stands in the certificate, or "
            f"have one made that is for {_host(server)}, too"
        )
    elif code in _UNKNOWN_AUTHORITY:
        text = (
            f"the certificate of the server at {server} is signed by an authority that is not known here: name the file of the "
            f"authority's certificate by {CA_VARIABLE}, or as `ca` in the address file"
        )
    elif code is not None:
        text = f"the certificate of the server at {server} is not taken: {getattr(error, 'verify_message', error)}"
    else:
        text = f"no encrypted connection can be made to the server at {server}: {error.reason or error}"
    return HandshakeError(text)


def plain_servers(servers: Sequence[str]) -> list[str]:
    """Those whose connections leave this machine, and are not encrypted."""
    return [each for each in servers if not each.startswith(f"{SCHEME}://") and not _is_loopback(_host(each))]


def is_address(host: str) -> bool:
    """Whether a server is named by its IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _host(server: str) -> str:
    return urlsplit(server).hostname or ""


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)
