"""Who may send and hear what: the users of a cluster as data, and as configuration of nats-server.

`python -m fluster_bus.roles [NAMESPACE…]` prints the configuration of a production server.

Replies are allowed by inbox: each user hears only what is below its own, and others may send there if they have
reason to answer it. (The server's `allow_responses` would do it by bookkeeping for each message, and lose the replies
of calls that take longer than its expiry.) What follows the prefix is random, so nobody sends where he was not asked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from fluster_bus import subjects
from fluster_bus.errors import InvalidNameError
from fluster_bus.names import SYSTEM_NAMESPACE, check_namespace
from fluster_bus.object_kinds import BUNDLES, PAYLOADS
from fluster_bus.pulse import SERVER_PINGS

# Of a message: beyond it the payload goes to the object store.
MAX_PAYLOAD_BYTES = 8 << 20
DEFAULT_NAMESPACE = "default"


class Role(StrEnum):
    """What a user of the bus is there for."""

    SERVICE = "service"  # controller, worker
    OPERATOR = "operator"  # whoever owns the cluster: everything
    CLIENT = "client"  # submits and calls in its namespace
    JOB = "job"  # calls and serves in its namespace

    @property
    def is_tenant(self) -> bool:
        """Whether each namespace has its own user of this role."""
        return self in {Role.CLIENT, Role.JOB}


@dataclass(frozen=True)
class User:
    """A user that the server knows; `namespace` is None for those of the whole cluster."""

    role: Role
    namespace: str | None = None

    def __post_init__(self) -> None:
        if self.role.is_tenant != (self.namespace is not None):
            need = "needs a namespace" if self.role.is_tenant else "has no namespace"
            raise InvalidNameError(f"{self.namespace!r} is no namespace for role {self.role}, which {need}")
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
    """All users of a cluster with these namespaces. Raises InvalidNameError."""
    return (
        User(Role.SERVICE),
        User(Role.OPERATOR),
        *(User(role, namespace) for namespace in dict.fromkeys(namespaces) for role in (Role.CLIENT, Role.JOB)),
    )


def permissions(user: User) -> Permissions:
    """What `user` may do."""
    match user.role:
        case Role.OPERATOR:
            return Permissions(publish=(subjects.ANY_TAIL,), subscribe=(subjects.ANY_TAIL,))
        case Role.SERVICE:
            everything = (
                subjects.ALL_MESSAGES,
                subjects.ALL_BUCKETS,
                subjects.ALL_OBJECTS,
                subjects.ALL_SERVICES,
                subjects.JETSTREAM_REQUESTS,
            )
            flow = (subjects.JETSTREAM_ACKS, subjects.JETSTREAM_FLOW)
            return Permissions(publish=(*everything, *flow, subjects.ALL_INBOXES), subscribe=(*everything, user.inbox))
        case Role.CLIENT:
            return Permissions(publish=_asks(_namespace(user)), subscribe=(user.inbox, _watch(user)))
        case Role.JOB:
            namespace = _namespace(user)
            registry = subjects.bucket_key(subjects.endpoints_bucket(namespace))
            return Permissions(
                publish=(*_asks(namespace), registry, *_serves_durably(namespace)),
                subscribe=(
                    user.inbox,
                    _watch(user),
                    subjects.actors_of(namespace),
                    *(verb for name in subjects.SERVICE_VERBS for verb in _with_below(subjects.service_verb(name))),
                ),
            )


def _namespace(user: User) -> str:
    assert user.namespace is not None  # noqa: S101 - User refuses a tenant without one
    return user.namespace


def _watch(user: User) -> str:
    return subjects.watch_any(_namespace(user))


def _asks(namespace: str) -> tuple[str, ...]:
    """What clients and jobs of a namespace may both send: requests, calls, replies, and reads that need no consumer."""
    registry = subjects.bucket_stream(subjects.endpoints_bucket(namespace))
    seats = subjects.bucket_stream(subjects.actors_bucket(namespace))
    streams = (
        registry,
        subjects.logs_stream(namespace),
        subjects.events_stream(namespace),
        *(subjects.objects_stream(kind.name, namespace) for kind in (BUNDLES, PAYLOADS)),
        subjects.results_stream(namespace),
    )
    return (
        subjects.jobs_verb(namespace, subjects.ANY_TOKEN),
        subjects.ensure_namespace(namespace),
        subjects.endpoints_verb(namespace, subjects.ANY_TOKEN),
        subjects.workers_list(namespace),
        subjects.actors_of(namespace),
        subjects.durable_calls_of_all(namespace),
        f"{subjects.direct_get(seats)}.{subjects.bucket_key(subjects.actors_bucket(namespace), subjects.seat_key_of_any())}",
        subjects.secrets(namespace),  # to be written; what is there only services read
        *(subjects.objects_of_all(kind.name, namespace) for kind in (BUNDLES, PAYLOADS)),
        *(subject for stream in streams for subject in _with_below(subjects.direct_get(stream))),
        # Never those of the cluster's own: a forged reply there could pass for a service's word.
        subjects.inboxes_of(namespace),
        *subjects.PLAIN_INBOXES,
    )


def _serves_durably(namespace: str) -> tuple[str, ...]:
    """What jobs need for actors with one instance, and for those whose calls are stored."""
    bucket = subjects.actors_bucket(namespace)
    streams = (subjects.bucket_stream(bucket), subjects.calls_stream(namespace))
    return (
        subjects.bucket_key(bucket),
        *(subject for stream in streams for subject in _with_below(subjects.direct_get(stream))),
        subjects.trim_calls(namespace),
    )


def _with_below(subject: str) -> tuple[str, str]:
    return subject, subjects.below(subject)


# ---- as configuration -----------------------------------------------------------------------------------

# JetStream lives in an account of its own, without users, and everybody uses it through imports. This closes what
# permissions leave open: the server checks neither the reply subject of a message nor its own answer to it. In one
# account, whoever may write anything to any stream has the acknowledgement put where no permission lets him write: onto
# a job's record (tried: `{"stream": …, "seq": …}` replaced it) or a request of JetStream's own. An answer that comes
# in from another account reaches subscribers only, no stream and no import. It costs the server some 10 µs for each read
# and write of state, and nothing for calls.
_STORE_ACCOUNT = "STORE"
_ACCOUNT = "FLUSTER"


def accounts_configuration(namespaces: Sequence[str], password: Callable[[User], str]) -> str:
    """The `accounts` block of a server; `password` gives each user's, quoted or as a variable."""
    # The server keeps a note of each such request for two minutes, since it cannot know which answer is the last.
    many_answers = subjects.JETSTREAM_READS
    one_answer = (
        *subjects.JETSTREAM_ASKS,
        subjects.JETSTREAM_ACKS,
        subjects.JETSTREAM_FLOW,
        subjects.ALL_BUCKETS,
        subjects.ALL_OBJECTS,
        *subjects.STREAM_INPUTS,
    )
    # Those who may make consumers have them deliver to their inboxes, in the account of the streams.
    outputs = (subjects.STREAM_OUTPUT, subjects.JETSTREAM_EVENTS, subjects.ALL_INBOXES)
    lines = [
        "accounts {",
        f"  {_STORE_ACCOUNT} {{",
        "    jetstream: enabled",
        "    exports: [",
        *(f"      {{ service: {quoted(subject)}, response_type: stream }}" for subject in many_answers),
        *(f"      {{ service: {quoted(subject)} }}" for subject in one_answer),
        *(f"      {{ stream: {quoted(subject)} }}" for subject in outputs),
        "    ]",
        "  }",
        f"  {_ACCOUNT} {{",
        "    imports: [",
        *(_import("service", subject) for subject in (*many_answers, *one_answer)),
        *(_import("stream", subject) for subject in outputs),
        "    ]",
        "    users: [",
        *(_user_block(user, permissions(user), password(user)) for user in users(namespaces)),
        "    ]",
        "  }",
        "}",
    ]
    return "\n".join(lines) + "\n"


def _import(kind: str, subject: str) -> str:
    return f"      {{ {kind}: {{ account: {_STORE_ACCOUNT}, subject: {quoted(subject)} }} }}"


def _user_block(user: User, allowed: Permissions, password: str) -> str:
    return "\n".join(
        [
            "      {",
            f"        user: {quoted(user.name)}",
            f"        password: {password}",
            "        permissions: {",
            *_allow("publish", allowed.publish),
            *_allow("subscribe", allowed.subscribe),
            "        }",
            "      }",
        ]
    )


def _allow(verb: str, allowed: tuple[str, ...]) -> list[str]:
    return [
        f"          {verb}: {{ allow: [",
        *(f"            {quoted(subject)}" for subject in allowed),
        "          ] }",
    ]


def quoted(text: str) -> str:
    """`text` as a string of the server's configuration language."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def password_variables(namespaces: Sequence[str]) -> dict[User, str]:
    """{user: the variable from which a production server takes the password}, for all users of the cluster.

    Raises InvalidNameError when two namespaces would share one.
    """
    variables = {user: user.password_variable for user in users(namespaces)}
    names = list(variables.values())
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidNameError(
            f"the namespaces {', '.join(namespaces)} share the variable {twice[0]}: "
            "choose names that differ in more than case, '-' and '_'"
        )
    return variables


def production_configuration(namespaces: Sequence[str] = (DEFAULT_NAMESPACE,)) -> str:
    """The configuration of a server that other machines reach, with passwords from its environment.

    Raises InvalidNameError when two namespaces would take their passwords from the same variable.
    """
    variables = password_variables(namespaces)
    return _PRODUCTION.format(
        arguments="" if tuple(namespaces) == (DEFAULT_NAMESPACE,) else f" {' '.join(namespaces)}",
        variables="\n".join(f"#   {variable}" for variable in variables.values()),
        max_payload=MAX_PAYLOAD_BYTES,
        pings=SERVER_PINGS,
    ) + accounts_configuration(namespaces, lambda user: f"${user.password_variable}")


_PRODUCTION = """\
# A production server. Made by `python -m fluster_bus.roles{arguments}`: change it there, or name your own namespaces.
#
# Passwords come from the environment of nats-server; `fluster credentials` makes them, in the file passwords.env:
{variables}
# Each a long random string that begins with a letter (`echo p$(openssl rand -hex 24)`): the server reads a value of
# digits alone as a number, and takes an empty one for a password.

server_name: fluster
# Other machines come in here; whoever has a password can run code. Beyond a private network add a `tls` block with
# `cert_file` and `key_file`.
listen: "0.0.0.0:4222"
# For health checks of its own machine: it asks nobody who he is.
http: "127.0.0.1:8222"
max_payload: {max_payload}
# Of clients that are silent. A dead connection's own client has long made another; one that is stopped is let live.
{pings}
jetstream {{
  store_dir: "/data"
  # Without this the newest acknowledged records are lost when power fails: the default is to write them out every
  # two minutes.
  sync_interval: always
}}

"""


if __name__ == "__main__":
    sys.stdout.write(production_configuration(sys.argv[1:] or (DEFAULT_NAMESPACE,)))
