"""The keys by which controllers admit workers, as a file: those of the roles `worker` and `job`, and of no other."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from fluster_bus.access.address import write_private
from fluster_bus.access.keys import Key, KeyKind
from fluster_bus.core.errors import CredentialsError
from fluster_bus.core.roles import Role
from fluster_bus.trust.authority import Authority
from fluster_bus.trust.signer import Signer

ADMITTED_ROLES = (Role.WORKER, Role.JOB)
_MAX_BYTES = 1 << 16
_REMEDY = "take the file that `fluster token keys` wrote"


def write_signing_keys(authority: Authority, path: Path) -> None:
    """Write the keys to a file that only its owner can read. Raises AddressError."""
    signers = [authority.signer(role) for role in ADMITTED_ROLES]
    keys = {str(each.role): each.key.seed for each in signers}
    write_private(path, json.dumps({"account": signers[0].account, "keys": keys}, indent=2) + "\n")


def read_signing_keys(path: Path) -> Mapping[Role, Signer]:
    """The signers of such a file. Raises CredentialsError."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(_MAX_BYTES)
    except OSError as error:
        raise CredentialsError(f"the signing keys in {path} cannot be read: {error.strerror}") from error
    if os.name == "posix" and mode & 0o077:
        raise CredentialsError(f"others may read the signing keys in {path} (mode {mode:o}): run `chmod 600 {path}`")
    try:
        told = json.loads(data)
        account, seeds = str(told["account"]), {role: str(told["keys"][str(role)]) for role in ADMITTED_ROLES}
    except (ValueError, KeyError, TypeError) as error:
        raise CredentialsError(f"the file {path} holds no signing keys: {_REMEDY}") from error
    signers = {role: Signer(role, Key(seed), account) for role, seed in seeds.items()}
    if any(each.key.kind is not KeyKind.ACCOUNT for each in signers.values()):
        raise CredentialsError(f"the file {path} holds keys of another kind: {_REMEDY}")
    return signers
