"""The users of a cluster as configuration of nats-server, and their passwords as files.

`python -m fluster_bus.server_configuration [--without-tls] [NAMESPACE…]` prints that of a production server, and with --three what each of
three has beside that.
"""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from fluster_bus import grants
from fluster_bus.access.address import DEFAULT_PORT, BusAddress, write_private
from fluster_bus.access.tls import CA_FILE, SCHEME, read_certificates
from fluster_bus.core import subjects
from fluster_bus.core.errors import AddressError, InvalidNameError
from fluster_bus.core.roles import DEFAULT_NAMESPACE, MAX_PAYLOAD_BYTES, Permissions, Role, User, users
from fluster_bus.direct.pulse import SERVER_PINGS
from fluster_bus.grants import STORE_EXPORTS, STORE_IMPORTS, Export
from fluster_bus.server_sections import PLAIN, clients_tls, group, quoted

TLS_FOLDER = "/etc/nats/tls"  # at a production server, unless another is given
WITHOUT_TLS, THREE = "--without-tls", "--three"
THREE_SERVERS = ("nats-1", "nats-2", "nats-3")  # of docker-compose.yml
_ROUTES_PORT = 6_222
PASSWORDS_FILE = "passwords.env"
_DEFAULT_URL = f"nats://127.0.0.1:{DEFAULT_PORT}"
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9]*")


def permissions(user: User, namespaces: Sequence[str]) -> Permissions:
    """What `user` may do in a cluster with these namespaces."""
    own = namespaces if user.namespace is None else (user.namespace,)
    return grants.granted(user.role, own, user.name, workers=subjects.ANY_TOKEN)


# JetStream lives in an account of its own, without users, and everybody uses it through imports. This closes what
# permissions leave open: the server checks neither the reply subject of a message nor its own answer to it. In one
# account, a user that may write anything to any stream has the acknowledgement put where no permission lets it write: onto
# a job's record (tried: `{"stream": …, "seq": …}` replaced it) or a request of JetStream's own. An answer that comes
# in from another account reaches subscribers only, no stream and no import. It costs the server some 10 µs for each read
# and write of state, and nothing for calls.
_STORE_ACCOUNT = "STORE"
_ACCOUNT = "FLUSTER"


def accounts_configuration(
    namespaces: Sequence[str], password: Callable[[User], str], *, store_bytes: int | None = None
) -> str:
    """The `accounts` block of a server; `password` gives each user's, quoted or as a variable.

    Controllers are given `store_bytes`, and divide them; a server does not announce its own limit.
    """
    store = "enabled" if store_bytes is None else f"{{ max_mem: -1, max_file: {store_bytes} }}"
    lines = [
        "accounts {",
        f"  {_STORE_ACCOUNT} {{",
        f"    jetstream: {store}",
        "    exports: [",
        *map(_export, STORE_EXPORTS),
        "    ]",
        "    imports: [",
        *(_import(each, _ACCOUNT) for each in STORE_IMPORTS),
        "    ]",
        "  }",
        f"  {_ACCOUNT} {{",
        "    exports: [",
        *map(_export, STORE_IMPORTS),
        "    ]",
        "    imports: [",
        *(_import(each, _STORE_ACCOUNT) for each in STORE_EXPORTS),
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


def _import(export: Export, account: str) -> str:
    return f"      {{ {_kind(export)}: {{ account: {account}, subject: {quoted(export.subject)} }} }}"


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


def production_configuration(
    namespaces: Sequence[str] = (DEFAULT_NAMESPACE,), tls_folder: str | None = TLS_FOLDER
) -> str:
    """The configuration of a server that other machines reach, with passwords from its environment.

    Its certificate lies in `tls_folder` there; with None, connections are not encrypted.
    Raises InvalidNameError when two namespaces would take their passwords from the same variable.
    """
    variables = password_variables(namespaces)
    return (
        _PASSWORDS.format(
            arguments="".join(f" {word}" for word in _arguments(namespaces, tls_folder)),
            variables="\n".join(f"#   {variable}" for variable in variables.values()),
        )
        + production_server(DEFAULT_PORT, "/data", tls_folder)
        + accounts_configuration(namespaces, lambda user: f"${user.password_variable}")
    )


def _arguments(namespaces: Sequence[str], tls_folder: str | None) -> list[str]:
    """Those that make the configuration again."""
    named = [] if tuple(namespaces) == (DEFAULT_NAMESPACE,) else list(namespaces)
    return [*([] if tls_folder is not None else [WITHOUT_TLS]), *named]


def production_server(port: int, store: str, tls_folder: str | None, *, name: str = "fluster") -> str:
    """The configuration of a production server but for whom it trusts; its streams lie in the folder `store`."""
    return _PRODUCTION.format(
        name=quoted(name),
        listen=quoted(f"0.0.0.0:{port}"),
        encryption=PLAIN if tls_folder is None else clients_tls(tls_folder),
        max_payload=MAX_PAYLOAD_BYTES,
        pings=SERVER_PINGS,
        store=quoted(store),
    )


def three_servers_configuration() -> str:
    """The configuration of one of three servers on one machine, beside that of one alone, from which it has all else."""
    return _THREE.format(
        group=group([f"tls://{name}:{_ROUTES_PORT}" for name in THREE_SERVERS], _ROUTES_PORT, TLS_FOLDER)
    )


_THREE = """\
# One of the three servers of docker-compose.yml. Made by `python -m fluster_bus.server_configuration --three`: change it there.

include "nats-server.conf"

# Of the environment. (A server that is given its name as an option does not read its configuration again.)
server_name: $SERVER_NAME

# Apart from what a server alone has stored: servers of a group remove streams that the group does not know.
jetstream {{
  store_dir: "/data/three"
  sync_interval: always
}}

{group}"""

_PASSWORDS = """\
# A production server. Made by `python -m fluster_bus.server_configuration{arguments}`: change it there, or name your own namespaces.
#
# Passwords come from the environment of nats-server; `fluster credentials passwords` makes them, in the file passwords.env:
{variables}
# Each a long random string that begins with a letter (`echo p$(openssl rand -hex 24)`): the server reads a value of
# digits alone as a number, and takes an empty one for a password.

"""

_PRODUCTION = """\
server_name: {name}
# Other machines come in here; a user with credentials can run code.
listen: {listen}
{encryption}\
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


if __name__ == "__main__":
    given = [each for each in sys.argv[1:] if each not in (WITHOUT_TLS, THREE)]
    tls_folder = None if WITHOUT_TLS in sys.argv else TLS_FOLDER
    made = production_configuration(given or (DEFAULT_NAMESPACE,), tls_folder)
    sys.stdout.write(three_servers_configuration() if THREE in sys.argv else made)
