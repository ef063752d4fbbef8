"""Signs the tokens of users of one role. What they may do is the role's, and stands in the token of the account."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fluster_bus.access.claims import NAMESPACE_TAG, read_user_token
from fluster_bus.access.keys import Key
from fluster_bus.core.errors import InvalidNameError
from fluster_bus.core.names import check_name, check_namespace
from fluster_bus.core.roles import Role
from fluster_bus.trust.tokens import user_token

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
