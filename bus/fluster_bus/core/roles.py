"""The users of a cluster, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fluster_bus.core import subjects
from fluster_bus.core.errors import InvalidNameError
from fluster_bus.core.names import SYSTEM_NAMESPACE, check_namespace

# Of a message: beyond it the payload goes to the object store.
MAX_PAYLOAD_BYTES = 8 << 20
DEFAULT_NAMESPACE = "default"


class Role(StrEnum):
    """What a user of the bus is there for."""

    SERVICE = "service"  # controllers
    WORKER = "worker"  # runs the tasks of its namespaces
    GATEWAY = "gateway"  # submits, asks and watches for the users of its namespaces
    AUTOSCALER = "autoscaler"  # sees which workers there are, and sends them away
    OPERATOR = "operator"  # those who own the cluster: everything
    CLIENT = "client"  # submits and calls in its namespace
    JOB = "job"  # calls and serves in its namespace
    JOIN = "join"  # is there to become a worker, by a join token

    @property
    def is_tenant(self) -> bool:
        """Whether each namespace has its own user of this role."""
        return self in {Role.CLIENT, Role.JOB}

    @property
    def is_confined(self) -> bool:
        """Whether users with signed tokens are confined to the namespaces which these name."""
        return self in {Role.WORKER, Role.GATEWAY, Role.CLIENT, Role.JOB}


@dataclass(frozen=True)
class User:
    """A user that the server knows; `namespace` is None for those of the whole cluster."""

    role: Role
    namespace: str | None = None

    def __post_init__(self) -> None:
        if self.role.is_tenant != (self.namespace is not None):
            need = "needs a namespace" if self.role.is_tenant else "has no namespace"
            raise InvalidNameError(f"{self.namespace!r} is not a namespace for role {self.role}, which {need}")
        if self.namespace is not None:
            check_namespace(self.namespace)

    @property
    def name(self) -> str:
        return str(self.role) if self.namespace is None else f"{self.role}_{self.namespace}"

    @property
    def inbox(self) -> str:
        """All subjects on which replies to this user arrive."""
        home = SYSTEM_NAMESPACE if self.namespace is None else self.namespace
        return subjects.below(subjects.inbox_prefix(self.name, home))

    @property
    def password_variable(self) -> str:
        """The environment variable from which a production server takes the password."""
        return f"{self._variable}_PASSWORD"

    @property
    def credentials_variable(self) -> str:
        """The environment variable that names a file with the user and its password."""
        return f"{self._variable}_CREDENTIALS"

    @property
    def _variable(self) -> str:
        return f"FLUSTER_{self.name.replace('-', '_').upper()}"


@dataclass(frozen=True)
class Permissions:
    """The subjects to which a user may publish and subscribe; everything else is refused."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def users(namespaces: Sequence[str]) -> tuple[User, ...]:
    """All users with passwords of a cluster with these namespaces. Raises InvalidNameError.

    None of them is there to join: only what is signed can be handed out.
    """
    return (
        User(Role.SERVICE),
        User(Role.WORKER),
        User(Role.GATEWAY),
        User(Role.AUTOSCALER),
        User(Role.OPERATOR),
        *(User(role, namespace) for namespace in dict.fromkeys(namespaces) for role in (Role.CLIENT, Role.JOB)),
    )
