"""The users of a cluster as configuration of nats-server.

`python -m fluster_bus.server_configuration [NAMESPACE…]` prints that of a production server.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from fluster_bus import grants, subjects
from fluster_bus.address import DEFAULT_PORT
from fluster_bus.errors import InvalidNameError
from fluster_bus.pulse import SERVER_PINGS
from fluster_bus.roles import DEFAULT_NAMESPACE, MAX_PAYLOAD_BYTES, Permissions, User, users
from fluster_bus.store_exports import STORE_EXPORTS, Export


def permissions(user: User, namespaces: Sequence[str]) -> Permissions:
    """What `user` may do in a cluster with these namespaces."""
    own = namespaces if user.namespace is None else (user.namespace,)
    return grants.granted(user.role, own, user.name, workers=subjects.ANY_TOKEN)


# JetStream lives in an account of its own, without users, and everybody uses it through imports. This closes what
# permissions leave open: the server checks neither the reply subject of a message nor its own answer to it. In one
# account, whoever may write anything to any stream has the acknowledgement put where no permission lets him write: onto
# a job's record (tried: `{"stream": …, "seq": …}` replaced it) or a request of JetStream's own. An answer that comes
# in from another account reaches subscribers only, no stream and no import. It costs the server some 10 µs for each read
# and write of state, and nothing for calls.
_STORE_ACCOUNT = "STORE"
_ACCOUNT = "FLUSTER"


def accounts_configuration(
    namespaces: Sequence[str], password: Callable[[User], str], *, store_bytes: int | None = None
) -> str:
    """The `accounts` block of a server; `password` gives each user's, quoted or as a variable.

    Controllers are told of `store_bytes`, and divide them; a server tells nobody of its own limit.
    """
    store = "enabled" if store_bytes is None else f"{{ max_mem: -1, max_file: {store_bytes} }}"
    lines = [
        "accounts {",
        f"  {_STORE_ACCOUNT} {{",
        f"    jetstream: {store}",
        "    exports: [",
        *map(_export, STORE_EXPORTS),
        "    ]",
        "  }",
        f"  {_ACCOUNT} {{",
        "    imports: [",
        *map(_import, STORE_EXPORTS),
        "    ]",
        "    users: [",
        *(_user_block(user, permissions(user, namespaces), password(user)) for user in users(namespaces)),
        "    ]",
        "  }",
        "}",
    ]
    return "\n".join(lines) + "\n"


def _kind(export: Export) -> str:
    return "stream" if export.is_stream else "service"


def _export(export: Export) -> str:
    answers = ", response_type: stream" if export.many_answers else ""
    return f"      {{ {_kind(export)}: {quoted(export.subject)}{answers} }}"


def _import(export: Export) -> str:
    return f"      {{ {_kind(export)}: {{ account: {_STORE_ACCOUNT}, subject: {quoted(export.subject)} }} }}"


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
    return (
        _PASSWORDS.format(
            arguments="" if tuple(namespaces) == (DEFAULT_NAMESPACE,) else f" {' '.join(namespaces)}",
            variables="\n".join(f"#   {variable}" for variable in variables.values()),
        )
        + production_server(DEFAULT_PORT, "/data")
        + accounts_configuration(namespaces, lambda user: f"${user.password_variable}")
    )


def production_server(port: int, store: str) -> str:
    """The configuration of a production server but for whom it trusts; its streams lie in the folder `store`."""
    return _PRODUCTION.format(
        listen=quoted(f"0.0.0.0:{port}"), max_payload=MAX_PAYLOAD_BYTES, pings=SERVER_PINGS, store=quoted(store)
    )


_PASSWORDS = """\
# A production server. Made by `python -m fluster_bus.server_configuration{arguments}`: change it there, or name your own namespaces.
#
# Passwords come from the environment of nats-server; `fluster credentials passwords` makes them, in the file passwords.env:
{variables}
# Each a long random string that begins with a letter (`echo p$(openssl rand -hex 24)`): the server reads a value of
# digits alone as a number, and takes an empty one for a password.

"""

_PRODUCTION = """\
server_name: fluster
# Other machines come in here; whoever has credentials can run code. Beyond a private network add a `tls` block with
# `cert_file` and `key_file`.
listen: {listen}
# There is no `http` port for monitoring: it asks for no credentials, and shows every connection's subjects, by which replies can be forged.
max_payload: {max_payload}
# Of clients that are silent. A dead connection's own client has long made another; one that is stopped is let live.
{pings}
jetstream {{
  store_dir: {store}
  # Without this the newest acknowledged records are lost when power fails: the default is to write them out every
  # two minutes.
  sync_interval: always
}}

"""


if __name__ == "__main__":
    sys.stdout.write(production_configuration(sys.argv[1:] or (DEFAULT_NAMESPACE,)))
