"""Signs the tokens of users of one role. What they may do is the role's, and stands in the token of the account.

Controllers admit workers by such keys, in a file: those of the roles `worker` and `job`, and of no other.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fluster_bus.access.address import write_private
from fluster_bus.access.keys import Key, KeyKind
from fluster_bus.access.signed_credentials import NAMESPACE_TAG, read_user_token
from fluster_bus.core.errors import CredentialsError, InvalidNameError
from fluster_bus.core.names import check_name, check_namespace
from fluster_bus.core.roles import Role
from fluster_bus.trust.tokens import user_token

if TYPE_CHECKING:
    from fluster_bus.trust.authority import Authority

_ROLE_TAG = "role"


@dataclass(frozen=True)
class Identity:
    """Who a user is: the name is unique among the users of a cluster; without namespaces, one of the cluster itself."""

    role: Role
    name: str
    namespaces: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name("user", self.name)
        for namespace in self.namespaces:
            check_namespace(namespace)

    @classmethod
    def of_token(cls, token: str) -> Identity:
        """Whose token this is. Raises CredentialsError."""
        claims = read_user_token(token)
        roles = claims.tagged(_ROLE_TAG)
        return cls(Role(roles[0]) if roles else Role.OPERATOR, claims.name, claims.namespaces)


def check_namespaces_of(role: Role, namespaces: Sequence[str]) -> None:
    """Raise InvalidNameError where users of that role cannot have these namespaces."""
    if not role.is_confined and namespaces:
        raise InvalidNameError(f"users of the role {role} are of the whole cluster: name no namespace")
    if role.is_confined and not namespaces:
        raise InvalidNameError(f"users of the role {role} are confined to namespaces: name one at least")
    if role is Role.JOB and len(set(namespaces)) > 1:
        raise InvalidNameError(f"jobs are of one namespace, not of {', '.join(namespaces)}: make a user for each")


@dataclass(frozen=True)
class Signer:
    """The key of one role in the account of the cluster's users."""

    role: Role
    key: Key
    account: str  # public key

    def sign(self, user: str, name: str, namespaces: Sequence[str], *, expires_at: int | None = None) -> str:
        """The token of the user with the public key `user`. Raises InvalidNameError, also for too few namespaces or too many."""
        check_namespaces_of(self.role, namespaces)
        identity = Identity(self.role, name, tuple(dict.fromkeys(namespaces)))
        tags = [f"{_ROLE_TAG}:{self.role}", *(f"{NAMESPACE_TAG}:{each}" for each in identity.namespaces)]
        return user_token(self.key, user, name=name, account=self.account, tags=tags, expires_at=expires_at)


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
