"""Where the bus is and who asks: a URL with credentials, or a file that only its owner can read."""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, unquote

from fluster_bus.access.signed_credentials import is_signed_file, read_user_token, signed_file_text, signed_file_values
from fluster_bus.access.tls import CA_VARIABLE, certificates_in, read_certificates
from fluster_bus.core import subjects
from fluster_bus.core.errors import AddressError, CredentialsError, NoAddressError
from fluster_bus.core.names import SYSTEM_NAMESPACE
from fluster_bus.core.roles import Role

ADDRESS_VARIABLE = "FLUSTER_CLUSTER_ADDRESS"
CREDENTIALS_VARIABLE = "FLUSTER_CREDENTIALS"

DEFAULT_PORT = 4222
_SCHEMES = ("nats", "tls")
_EXAMPLE = "nats://user:password@host:4222"
_FORM = 'write {"url": …, "user": …, "password": …}, or take the file that `fluster credentials add` wrote'
_HOST = re.compile(r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+")
# A user becomes one token of the subjects on which its replies arrive.
_USER = re.compile(r"[^\s.*>\x00-\x1f]{1,256}")
_ANYBODY = "anybody"  # stands for the user of a server that asks for none
_PRIVATE = 0o600
_MAX_FILE_BYTES = 1 << 16
_MAX_SERVERS = 32  # that others are added to
_PROOFS = ("user", "password", "token", "seed")
_CA = "ca"
_KEYS = {"url", *_PROOFS, _CA}


@dataclass(frozen=True)
class BusAddress:
    """The servers of a bus, `url` without credentials and comma-separated, and whom to be there."""

    url: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)  # signed by the cluster; in place of a password
    seed: str | None = field(default=None, repr=False)  # of the key that the token names
    ca: str | None = field(default=None, repr=False)  # PEM, of the authority of the servers' certificates
    file: Path | None = field(default=None, repr=False, compare=False)  # where all of this stands, for messages

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", ",".join(_server(part, self.url) for part in self.url.split(",")))
        if len({server.partition("://")[0] for server in self.servers}) > 1:
            raise AddressError(f"{self.url!r} mixes nats:// and tls://: name all servers with one of them")
        if (self.token is None) != (self.seed is None):
            raise AddressError(f"the address {self.url} has only one of token and seed: give both or neither")
        if self.token is not None:
            object.__setattr__(self, "user", read_user_token(self.token).name)
        elif (self.user is None) != (self.password is None):
            raise AddressError(f"the address {self.url} has only one of user and password: give both, or none")
        if self.user is not None and not _USER.fullmatch(self.user):
            raise AddressError(f"invalid user {self.user!r}: blanks, '.', '*' and '>' cannot be part of it")

    def __str__(self) -> str:
        """The servers and the user; never the password."""
        return self._joined(None if self.user is None else quote(self.user, safe=""))

    @property
    def servers(self) -> list[str]:
        """The URL of each server, without credentials."""
        return self.url.split(",")

    def with_servers(self, found: Iterable[str]) -> Self:
        """This address with more servers of the same group, `found` as host:port; what is none is left out, as are too many."""
        scheme = self.url.partition("://")[0]
        servers = self.servers
        for each in found:
            try:
                url = _server(f"{scheme}://{each}", each)
            except AddressError:
                continue  # the servers told it of each other: it ends nothing here
            if url not in servers and len(servers) < _MAX_SERVERS:
                servers.append(url)
        return self if servers == self.servers else replace(self, url=",".join(servers))

    @property
    def may_encrypt(self) -> bool:
        """Whether connections are encrypted, or can be if a server wants it, by what this address says."""
        return self.ca is not None or self.url.startswith("tls://")

    @property
    def refusals_believed(self) -> int:
        """After so many in a row the credentials are not good.

        A server that has just joined a group refuses each token for some microseconds, as it hears from another server for the
        first time of the account that it does not know yet (nats-server 2.15, `processRemoteSub`: it registers an account without
        an issuer, and then marks it as one to be fetched).
        """
        return 1 if self.token is None else 2

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Those that the user is confined to; none for users of the whole cluster."""
        if self.token is not None:
            return read_user_token(self.token).namespaces
        _role, _, namespace = (self.user or "").partition("_")  # as in roles.User.name
        return (namespace,) if namespace else ()

    @property
    def home(self) -> str | None:
        """The namespace at whose inbox the user hears replies; None for users who hear them as the cluster's own."""
        if self.token is not None and read_user_token(self.token).tagged("role") in ((Role.WORKER,), (Role.GATEWAY,)):
            return None  # they serve namespaces, and belong to none
        return next(iter(self.namespaces), None)

    def inbox_prefix(self, namespace: str | None = None) -> str:
        """Below this the user hears replies from `namespace`; by default from its own, or from the cluster's services."""
        user = self.user or _ANYBODY
        if self.token is not None and read_user_token(self.token).tagged("role") == (Role.WORKER,):
            user = subjects.worker_user(user)
        return subjects.inbox_prefix(user, namespace or self.home or SYSTEM_NAMESPACE)

    def proof(self, nonce: str | None) -> dict[str, str]:
        """Fields of the CONNECT message for a server that greeted with `nonce`; without one there is nothing to sign.

        Raises CredentialsError for a damaged seed.
        """
        if self.token is not None and self.seed is not None:
            if nonce is None:
                return {"jwt": self.token}
            from fluster_bus.access.keys import Key  # costs 10 ms, which those with passwords need not pay

            signature = Key(self.seed).sign(nonce.encode())
            return {"jwt": self.token, "sig": base64.urlsafe_b64encode(signature).rstrip(b"=").decode("ascii")}
        return {} if self.user is None or self.password is None else {"user": self.user, "pass": self.password}

    def to_url(self) -> str:
        """One line, password included, that `parse` and the `nats` command take."""
        if self.user is None or self.password is None:
            return self.url
        return self._joined(f"{quote(self.user, safe='')}:{quote(self.password, safe='')}")

    def _joined(self, credentials: str | None) -> str:
        if credentials is None:
            return self.url
        return ",".join(server.replace("://", f"://{credentials}@", 1) for server in self.servers)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The address in a URL (`nats://user:password@host:port`, several with commas) or in the file of that path.

        The authority of the servers' certificates stands in the file, or in that which FLUSTER_CA names. Raises AddressError, which
        never shows a password.
        """
        return cls._parse(text.strip()).with_ca_of(os.environ)

    @classmethod
    def _parse(cls, text: str) -> Self:
        if "://" in text:
            return cls._from_url(text)
        if not text or "@" in text or ":" in text:
            # Never tried as a path: it is more likely a URL without its scheme, password and all.
            raise AddressError(f"invalid address {_masked(text)!r}: write {_EXAMPLE}, or the path of a file")
        return cls._from_file(Path(text))

    def with_ca_of(self, environ: Mapping[str, str]) -> Self:
        """This address, with the certificates in the file that FLUSTER_CA names unless it has some. Raises AddressError."""
        file = environ.get(CA_VARIABLE, "").strip()
        if self.ca is not None or not file:
            return self
        try:
            return replace(self, ca=read_certificates(Path(file)))
        except AddressError as error:
            raise AddressError(f"{CA_VARIABLE}: {error}") from error

    @classmethod
    def _from_url(cls, text: str) -> Self:
        servers: list[str] = []
        credentials: set[str] = set()
        scheme = text.partition("://")[0]
        for part in text.split(","):
            own_scheme, _, rest = part.rpartition("://")
            user_and_password, at, host = rest.rpartition("@")
            servers.append(f"{own_scheme or scheme}://{host.rstrip('/')}")
            if at:
                credentials.add(user_and_password)
        if len(credentials) > 1:
            raise AddressError(
                f"{_masked(text)!r} has different credentials for its servers: give one user and password; "
                "commas in a password are written %2C"
            )
        user, password = None, None
        if credentials:
            user, colon, password = credentials.pop().partition(":")
            if not user or not colon or not password:
                raise AddressError(f"{_masked(text)!r} has only one of user and password: write {_EXAMPLE}")
        try:
            return cls(
                ",".join(servers), unquote(user) if user else None, None if password is None else unquote(password)
            )
        except AddressError as error:
            # The parts of a malformed URL are not what they seem: what looks like a port may be a password.
            raise AddressError(f"invalid address {_masked(text)!r}: write {_EXAMPLE}") from error

    @classmethod
    def _from_file(cls, path: Path) -> Self:
        values = _read(path)
        if "url" not in values:
            raise AddressError(
                f'the file {path} names no server: add "url", or set {ADDRESS_VARIABLE} to a URL and {CREDENTIALS_VARIABLE} to the file'
            )
        address = cls._from_url(values["url"])
        address = replace(address, file=path, ca=values.get(_CA))
        return address if values.keys() <= {"url", _CA} else address.with_credentials(path)

    def with_credentials(self, path: Path) -> Self:
        """This address with the user and password, or the token and seed, of the file at `path`. Raises AddressError."""
        values = _read(path)
        ca = values.get(_CA, self.ca)
        if {"token", "seed"} <= values.keys():
            try:
                return replace(self, user=None, password=None, token=values["token"], seed=values["seed"], ca=ca)
            except CredentialsError as error:
                raise AddressError(f"the file {path}: {error}") from error
        if {"user", "password"} <= values.keys():
            return replace(self, user=values["user"], password=values["password"], token=None, seed=None, ca=ca)
        raise AddressError(f"the file {path} lacks the user or the password: give both, or a token and a seed")

    def save(self, path: Path) -> None:
        """Write a file that `parse` takes and only its owner can read; for signed credentials `nats --creds` takes it, too.

        Raises AddressError.
        """
        if self.token is not None and self.seed is not None:
            return write_private(path, signed_file_text(self.url, self.token, self.seed, self.ca))
        return write_private(path, json.dumps(self.values(), indent=2) + "\n")

    def values(self) -> dict[str, Any]:
        """All that this says, secrets too, for another process: `BusAddress(**values)` is the same."""
        values = {name: getattr(self, name) for name in ("url", *_PROOFS, _CA)}
        return {key: value for key, value in values.items() if value is not None}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """What FLUSTER_CLUSTER_ADDRESS says, with the user and password of the file FLUSTER_CREDENTIALS if that is set.

        Raises NoAddressError when neither names a server, AddressError when one of them cannot be used.
        """
        text, file = environ.get(ADDRESS_VARIABLE, "").strip(), environ.get(CREDENTIALS_VARIABLE, "").strip()
        if not text and not file:
            raise NoAddressError(
                f"{ADDRESS_VARIABLE} is not set, and no `fluster up` of this user runs here: start one, or set the variable to a "
                f"URL, as in {_EXAMPLE}, or to a file of credentials"
            )
        try:
            address = cls._parse(text) if text else cls._from_file(Path(file))
        except AddressError as error:
            raise AddressError(f"{ADDRESS_VARIABLE if text else CREDENTIALS_VARIABLE}: {error}") from error
        try:
            address = address.with_credentials(Path(file)) if file and text else address
        except AddressError as error:
            raise AddressError(f"{CREDENTIALS_VARIABLE}: {error}") from error
        return address.with_ca_of(environ)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read; it replaces an older one in one step. Raises AddressError."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise AddressError(f"the credentials cannot be written to {path}: {error.strerror}") from error


def _server(part: str, whole: str) -> str:
    """One server's URL with its port. Raises AddressError."""
    scheme, _, host_and_port = part.strip().partition("://")
    if scheme not in _SCHEMES:
        raise AddressError(f"{_masked(whole)!r} begins with none of {', '.join(f'{s}://' for s in _SCHEMES)}")
    host, colon, port = host_and_port.rpartition(":")
    if not colon or host_and_port.endswith("]"):
        host, port = host_and_port, str(DEFAULT_PORT)
    if not _HOST.fullmatch(host) or not re.fullmatch(r"\d{1,5}", port) or not 0 < int(port) < 1 << 16:
        raise AddressError(f"invalid address {_masked(whole)!r}: write {_EXAMPLE}")
    return f"{scheme}://{host}:{port}"


def _masked(text: str) -> str:
    """`text` without what may be a password: all before the last `@`, and ports that are none."""
    head, at, tail = text.rpartition("@")
    if at:
        scheme = re.match(r"[a-z+]*://", head)
        text = f"{scheme[0] if scheme else ''}***@{tail}"
    return re.sub(r"(?<!:):(?!//|\d{1,5}(?:[,/]|$))[^,/\]]*(?=[,/]|$)", ":***", text)


def _read(path: Path) -> dict[str, str]:
    """The values of a file of credentials. Raises AddressError."""
    try:
        with path.open("rb") as file:
            # Of the open file: a path may name another one a moment later.
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(_MAX_FILE_BYTES)
    except FileNotFoundError as error:
        if path.suffix in {".json", ".creds"}:
            raise AddressError(
                f"the file {path} does not exist: what wrote it, such as a `fluster up`, has ended or is elsewhere; start "
                "one, and set the address to what it prints"
            ) from error
        raise AddressError(f"{str(path)!r} is neither a URL ({_EXAMPLE}) nor a file of credentials") from error
    except OSError as error:
        raise AddressError(
            f"the credentials in {path} cannot be read: {error.strerror}{_whose(path, error)}"
        ) from error
    if os.name == "posix" and mode & 0o077:
        raise AddressError(
            f"others may read the credentials in {path} (mode {mode:o}): run `chmod 600 {path}`, "
            "and change the password if others use this machine"
        )
    try:
        values = signed_file_values(data) if is_signed_file(data) else json.loads(data)
    except ValueError as error:
        raise AddressError(f"the file {path} holds no credentials: {_FORM}") from error
    if not isinstance(values, dict) or not all(isinstance(values.get(key, ""), str) for key in _KEYS):
        raise AddressError(f"the file {path} holds no credentials: {_FORM}")
    known = {key: values[key] for key in _KEYS & values.keys()}
    if _CA in known and not certificates_in(known[_CA]):
        known[_CA] = read_certificates(path.parent / known[_CA])
    return known


def _whose(path: Path, error: OSError) -> str:
    """Whose file it is, when that is why it cannot be read."""
    if not isinstance(error, PermissionError):
        return ""
    try:
        return f": they belong to user {path.stat().st_uid}, and this is user {os.geteuid()}"
    except OSError:  # nor may it be looked at
        return ""
