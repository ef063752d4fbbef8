"""The certificates of a cluster's servers in a folder, each beside what else its server needs, and the authority that signs them.

FOLDER/ca.pem                  by which servers are known: for everybody
FOLDER/ca-key.pem              signs new ones, and stays here
FOLDER/servers/NAME/           is copied to the server of that name
    server.pem                 its key and its certificate
    ca.pem                     by which it knows the other servers
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fluster_bus.access.address import write_private
from fluster_bus.access.tls import CA_FILE, certificates_in
from fluster_bus.core.errors import AddressError, CredentialsError, InvalidNameError
from fluster_bus.server_sections import SERVER_FILE
from fluster_bus.trust.certificates import (
    LIFE,
    Certificate,
    CertificateInfo,
    checked_host,
    new_authority,
    new_server,
    read_certificate,
)

_KEY_FILE, _LOCK_FILE, _SERVERS = "ca-key.pem", "certificates.lock", "servers"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\n?", re.DOTALL)


@dataclass(frozen=True)
class StoredCertificate:
    """The certificate of a server, or of the authority (whose name is empty), with its file."""

    name: str
    info: CertificateInfo
    file: Path


class CertificateFolder:
    """Those in one folder. Two processes may use it at once. Raises CredentialsError where it cannot be used."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def is_there(self) -> bool:
        """Whether an authority of certificates lies in the folder."""
        return (self._folder / _KEY_FILE).exists() or (self._folder / CA_FILE).exists()

    def of_server(self, name: str) -> Path:
        """The folder of that server. Raises InvalidNameError."""
        if _NAME.fullmatch(name) is None:
            raise InvalidNameError(f"{name!r} is not a name of a server: use letters, digits, '.', '_' or '-'")
        return self._folder / _SERVERS / name

    def ensure(self, name: str, hosts: Sequence[str], *, now: datetime | None = None) -> Path:
        """The folder of a server whose certificate is for `hosts`, at least; one that is there and says so stays."""
        with self._locked():
            known = self._of(name)
            had = known.info.hosts if known is not None else ()
            wanted = tuple(dict.fromkeys([*had, *map(checked_host, hosts)]))
            return self._make(name, wanted, now) if wanted != had else self._give_authority(name)

    def make(self, name: str, hosts: Sequence[str], *, now: datetime | None = None) -> Path:
        """The folder of a server with a new certificate, which is for `hosts` and no others."""
        with self._locked():
            return self._make(name, tuple(dict.fromkeys(map(checked_host, hosts))), now)

    def renew(self, names: Sequence[str] = (), *, now: datetime | None = None) -> list[Path]:
        """Give these servers, or all, new certificates for the hosts that they had; their folders."""
        with self._locked():
            known = {each.name: each.info.hosts for each in self._servers()}
            for name in names or list(known):
                if name not in known:
                    raise CredentialsError(f"unknown server {name!r}: {_listed(known)}")
            return [self._make(name, known[name], now) for name in names or known]

    def renew_authority(self, *, now: datetime | None = None) -> list[Path]:
        """Make a new authority. Servers are known by the earlier ones as well until those end; what has changed."""
        with self._locked():
            made = new_authority(now or datetime.now(UTC))
            write_private(self._folder / _KEY_FILE, made.to_file())
            self._publish(made)
            return [
                self._folder / CA_FILE,
                *(self._give_authority(each.name) / CA_FILE for each in self._servers()),
            ]

    def shown(self) -> list[StoredCertificate]:
        """The authority that signs, and the servers by their names."""
        with self._locked():
            file = self._folder / CA_FILE
            return [StoredCertificate("", self._authority().info, file), *self._servers()]

    def ending(self, *, now: datetime | None = None) -> datetime | None:
        """When the authority ends, if a certificate of today would not live its whole time."""
        until = self._authority().info.until
        return until if until < (now or datetime.now(UTC)) + LIFE else None

    # ---- in the folder ----------------------------------------------------------------------------------

    def _make(self, name: str, hosts: Sequence[str], now: datetime | None) -> Path:
        if not hosts:
            raise InvalidNameError(f"the server {name} has no host: name where it is reached, as by --host")
        folder, now = self.of_server(name), now or datetime.now(UTC)
        authority = self._authority(now)
        if authority.info.state(now) == "expired":
            raise CredentialsError(
                f"the authority in {self._folder / CA_FILE} has expired: make another with `fluster credentials certificates "
                "--new-authority`, and give its ca.pem to servers and users"
            )
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._give_authority(name)
        write_private(folder / SERVER_FILE, new_server(authority, name, hosts, now).to_file())
        return folder

    def _give_authority(self, name: str) -> Path:
        folder, text = self.of_server(name), (self._folder / CA_FILE).read_text(encoding="ascii")
        file = folder / CA_FILE
        if not file.exists() or file.read_text(encoding="ascii") != text:
            _write_public(file, text)
        return folder

    def _authority(self, now: datetime | None = None) -> Certificate:
        """That which signs; it is made where there was none."""
        key, known = self._folder / _KEY_FILE, self._folder / CA_FILE
        if not key.exists():
            if known.exists():
                raise CredentialsError(
                    f"the key {key} is lost, or was never here: restore it from a backup, or make another authority with "
                    "`fluster credentials certificates --new-authority`"
                )
            write_private(key, new_authority(now or datetime.now(UTC)).to_file())
        authority = Certificate.of_file(key.read_text(encoding="ascii"), str(key))
        self._publish(authority)
        return authority

    def _publish(self, authority: Certificate) -> None:
        """Have ca.pem begin with the authority that signs; earlier ones stay in it as long as they are good."""
        file = self._folder / CA_FILE
        before = file.read_text(encoding="ascii") if file.exists() else ""
        own, now = certificates_in(authority.pem), datetime.now(UTC)
        others = [
            each for each in _PEM.findall(certificates_in(before)) if each != own and read_certificate(each).until > now
        ]
        if (text := "".join([own, *others])) != before:
            _write_public(file, text)

    def _servers(self) -> list[StoredCertificate]:
        files = sorted((self._folder / _SERVERS).glob(f"*/{SERVER_FILE}"))
        return [shown for file in files if (shown := self._of(file.parent.name)) is not None]

    def _of(self, name: str) -> StoredCertificate | None:
        file = self.of_server(name) / SERVER_FILE
        if not file.exists():
            return None
        return StoredCertificate(name, Certificate.of_file(file.read_text(encoding="ascii"), str(file)).info, file)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield
            finally:
                os.close(descriptor)
        except AddressError as error:
            raise CredentialsError(str(error)) from error
        except (OSError, UnicodeError) as error:
            raise CredentialsError(f"the certificates in {self._folder} cannot be used: {error}") from error


def _write_public(file: Path, text: str) -> None:
    write_private(file, text)
    file.chmod(0o644)


def _listed(known: Iterable[str]) -> str:
    names = sorted(known)
    return (
        f"the servers are {', '.join(names)}"
        if names
        else "no server has a certificate here yet: name its hosts with --host"
    )
