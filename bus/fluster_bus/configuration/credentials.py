"""A cluster's passwords as files: one for nats-server, and one for each of its users, which only its owner can read."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fluster_bus.access.address import DEFAULT_PORT, BusAddress, write_private
from fluster_bus.access.tls import CA_FILE, SCHEME, read_certificates
from fluster_bus.configuration.server_configuration import password_variables
from fluster_bus.core.errors import AddressError
from fluster_bus.core.roles import DEFAULT_NAMESPACE, Role, User

PASSWORDS_FILE = "passwords.env"
_DEFAULT_URL = f"nats://127.0.0.1:{DEFAULT_PORT}"
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9]*")


def write_credentials(
    folder: Path, namespaces: Sequence[str] = (DEFAULT_NAMESPACE,), url: str | None = None
) -> list[Path]:
    """The files in `folder`: the passwords of all users for nats-server, and NAME.json for each user.

    What is there already stays, but for its URL when another one is given, and for the authority of certificates that lies in
    the folder. Raises AddressError, and InvalidNameError for namespaces that are none or share a variable.
    """
    variables = password_variables(namespaces)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise AddressError(f"the folder {folder} cannot be made: {error.strerror}") from error
    ca = read_certificates(folder / CA_FILE) if (folder / CA_FILE).exists() else None
    lines, files = [], []
    for user, variable in variables.items():
        file = folder / f"{user.name}.json"
        known = _known(user, file)
        # A letter first, and no other signs: nats-server reads digits alone as a number, and a shell may read the file.
        address = known or BusAddress(_DEFAULT_URL, user.name, f"p{secrets.token_hex(24)}")
        if url is not None:
            address = replace(address, url=url)
        if ca is not None and address.url.startswith(SCHEME):
            address = replace(address, ca=ca)
        if address != known:  # else its owner stays, too
            address.save(file)
        lines.append(f"{variable}={address.password}\n")
        files.append(file)
    write_private(folder / PASSWORDS_FILE, "".join(lines))
    return [folder / PASSWORDS_FILE, *files]


def known_url(folder: Path) -> str | None:
    """Where the files in `folder` say that the server is; None when there are none. Raises AddressError."""
    file = folder / f"{User(Role.OPERATOR).name}.json"
    return BusAddress.parse(str(file)).url if file.exists() else None


def _known(user: User, file: Path) -> BusAddress | None:
    if not file.exists():
        return None
    known = BusAddress.parse(str(file))
    if known.user != user.name or _PLAIN.fullmatch(known.password or "") is None:
        raise AddressError(
            f"the file {file} is not of {user.name!r}, or its password is not a letter and then letters and digits: "
            "remove it to have a new one made"
        )
    return known
