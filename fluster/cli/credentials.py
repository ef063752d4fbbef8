"""Who may use a cluster: signed credentials, made and revoked without a change of any server's file, and passwords."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fluster.cli.common.exit_codes import CommandError, ExitCode, say
from fluster.cli.common.options import Options, wrong_option
from fluster.cli.common.output import write, write_json, write_table
from fluster_bus.core.roles import DEFAULT_NAMESPACE, Role

if TYPE_CHECKING:
    from fluster_bus.trust.authority import Authority, Issued

AUTHORITY_VARIABLE = "FLUSTER_AUTHORITY"
SERVER_FILE = "nats-server.conf"
DEFAULT_URL = "tls://127.0.0.1:4222"
# Names by which the servers of docker-compose.yml are reached, by its daemons and by those who are on the machine.
COMPOSE_HOSTS = ("nats", "nats-1", "nats-2", "nats-3", "localhost", "127.0.0.1")
COMPOSE_SERVER = "nats"
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_MAX_LIFE_S = 100 * 365 * 86_400

AuthorityFolder = Annotated[
    Path,
    typer.Option(
        "--authority",
        metavar="FOLDER",
        envvar=AUTHORITY_VARIABLE,
        help="Where the keys of the cluster lie. Its owner can make any user: keep it off the cluster's machines, "
        "and in a backup.",
    ),
]
Namespaces = Annotated[
    list[str] | None,
    typer.Option("--namespace", metavar="NAME,…", help="Of the user; may be given several times."),
]
Until = Annotated[
    str | None,
    typer.Option(
        metavar="TIME", help="When they end: a date or time (UTC unless it says otherwise), or 12h, 30d from now."
    ),
]
Url = Annotated[
    str | None,
    typer.Option(
        metavar="URL,…",
        help=f"Of the nats-server, or of each in a group, as users reach them; {DEFAULT_URL} at first. tls:// "
        "encrypts.",
    ),
]
FOLDER = Path("authority")
_ROLES = [role for role in Role if role is not Role.JOIN]


def init(
    authority: AuthorityFolder = FOLDER,
    *,
    url: Url = None,
    store: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where the server keeps its streams, at the server.")
    ] = Path("/data"),
    server_folder: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where what is made for the server lies, at the server.")
    ] = Path("/etc/nats"),
) -> None:
    """Make the keys of a cluster, and for each of its servers a folder: its configuration and its certificate.

    The keys are files that only you can read; those that are there stay. Copy each server's folder to it, as
    --server-folder. With nats://, which does not encrypt, the configuration is all that is made.

    Try:
      fluster credentials init --url tls://bus.example.org
      fluster credentials init --url tls://bus-1.example.org,tls://bus-2.example.org,tls://bus-3.example.org
    """
    from fluster_bus.trust.authority import Authority, encrypted_configuration, signed_configuration

    is_new = not Authority.is_there(authority)
    made = Authority.of_cluster(authority)
    if url is not None or is_new:
        made.reach_servers_at(url or DEFAULT_URL)
    if not made.url.startswith("tls://"):
        _warn_of_plain(made.url)
        _write(authority / SERVER_FILE, signed_configuration(made, store))
        return
    from fluster_bus.server_sections import members
    from fluster_bus.trust.certificate_folder import CertificateFolder

    certificates = CertificateFolder(authority)
    servers = members(made.url.split(","))
    for server in servers:
        folder = certificates.ensure(server.name, [server.host])
        _write(folder / SERVER_FILE, encrypted_configuration(made, store, server, servers, server_folder))


def _warn_of_plain(url: str) -> None:
    from fluster_bus.access.tls import plain_servers

    if plain := plain_servers(url.split(",")):
        say(
            f"connections to {', '.join(plain)} will not be encrypted: who is on the network can read and change all "
            "that is sent; with tls:// in "
            "--url they are, and the servers get certificates"
        )


def _write(file: Path, text: str) -> None:
    """Write what need not be secret, and print where."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{file} cannot be written: {error.strerror}", ExitCode.FAILED) from error
    write(str(file))


def add(
    context: typer.Context,
    role: Annotated[Role, typer.Argument(metavar="ROLE", help=f"What it may do: {', '.join(_ROLES)}.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the user; a worker's is its id.")],
    authority: AuthorityFolder = FOLDER,
    *,
    namespace: Namespaces = None,
    until: Until = None,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What to write; NAME.creds in this folder unless given.")
    ] = None,
) -> None:
    """Make credentials for a user, as a file that only you can read. Servers know it at once, without being told.

    FLUSTER_CLUSTER_ADDRESS may name the file; `nats --creds` takes it, too. Workers, clients and jobs are confined to
    namespaces, jobs to one.

    Try:
      fluster credentials add operator me
      fluster credentials add service controllers
      fluster credentials add worker w1 --namespace default,team-a
      fluster credentials add job job-default --namespace default
      fluster credentials add client alice --namespace default --until 30d
    """
    issuer = existing(authority)
    if role is Role.JOIN:
        raise CommandError("who is to join gets a token: make one with `fluster token create`", ExitCode.USAGE)
    path = file or Path(f"{name}.creds")
    if path.exists():
        raise CommandError(f"the file {path} exists already: move it, or name another with --file", ExitCode.USAGE)
    lifetime_s = None if until is None else seconds_until("--until", until, time.time())
    made = issuer.issue(role, name, split(namespace) or _given(context, role), lifetime_s=lifetime_s)
    try:
        issuer.address(made).save(path)
    except Exception:
        issuer.revoke(name)  # no user has it
        raise
    write(str(path))


def revoke(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The user's name, or its public key.")],
    authority: AuthorityFolder = FOLDER,
) -> None:
    """Take a user's credentials back, and have the servers cut it off, within 5 seconds. It cannot come back.

    Also those of a worker that joined by a token, with what it hands to jobs; its name is its id.

    Try:
      fluster credentials revoke w1
    """
    import asyncio

    from fluster_bus.trust.join_register import JoinRegister

    issuer = existing(authority)
    before = {each.public for each in issuer.issued() if each.revoked_at is not None}
    try:
        asyncio.run(JoinRegister(issuer, servers(context, issuer)).revoke_user(name))
    except Exception:
        if _say_revoked(issuer, before):
            say("the servers do not know it yet: run `fluster credentials push` once they can be reached")
        raise
    _say_revoked(issuer, before)


def push(context: typer.Context, authority: AuthorityFolder = FOLDER) -> None:
    """Tell the servers who is revoked, and what each role may do in this version of Fluster.

    After a revocation while no server could be reached, and after an upgrade. A server that is away learns it from the
    others of its group.

    Try:
      fluster credentials push
    """
    _push(context, existing(authority))


def ls(context: typer.Context, authority: AuthorityFolder = FOLDER) -> None:
    """List the users that were made here, with those that are revoked or have expired.

    Try:
      fluster credentials ls
    """
    now = time.time()
    users = existing(authority).issued()
    if Options.of(context).json:
        write_json([{**vars(each), "namespaces": list(each.namespaces), "state": _state(each, now)} for each in users])
        return
    write_table(
        ["NAME", "ROLE", "NAMESPACES", "STATE", "UNTIL", "KEY"],
        [
            [each.name, each.role, ",".join(each.namespaces) or "-", _state(each, now), _date(each), each.public]
            for each in users
        ],
    )


def passwords(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the files are, or will be.")],
    *,
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="A namespace that the cluster has, instead of 'default'; may be given several times."
        ),
    ] = None,
    url: Url = None,
) -> None:
    """Make passwords for a server whose configuration lists its users, as files that only you can read.

    passwords.env is for the server, NAME.json for the user of that name: set FLUSTER_CLUSTER_ADDRESS to it. With a
    tls:// URL the folder servers/nats is for the server as well: its certificate. What is in the folder already stays.

    Try:
      fluster credentials passwords credentials
    """
    from fluster_bus.server_configuration import known_url, write_credentials

    given = list(dict.fromkeys([*filter(None, [Options.of(context).namespace]), *split(namespace)]))
    reached = url or known_url(folder) or DEFAULT_URL
    _warn_of_plain(reached)
    certificate = _compose_certificate(folder, reached) if reached.startswith("tls://") else []
    for file in [*write_credentials(folder, given or [DEFAULT_NAMESPACE], reached), *certificate]:
        write(str(file))


def _compose_certificate(folder: Path, url: str) -> list[Path]:
    from fluster_bus.access.address import BusAddress
    from fluster_bus.server_sections import members
    from fluster_bus.trust.certificate_folder import CertificateFolder

    hosts = [each.host for each in members(BusAddress(url).servers)]
    return [CertificateFolder(folder).ensure(COMPOSE_SERVER, [*COMPOSE_HOSTS, *hosts])]


def seconds_until(option: str, text: str, now: float) -> float:
    """How long it is from `now` to the time that `text` says, or that `12h` does. Raises CommandError."""
    if match := re.fullmatch(r"(\d{1,10})([smhd])", text.strip()):
        seconds = float(match[1]) * _UNITS[match[2]]
    else:
        try:
            moment = datetime.fromisoformat(text.strip())
        except ValueError as error:
            raise wrong_option(
                option, text, "give a date such as 2027-01-31, or how long, such as 12h or 30d"
            ) from error
        seconds = (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp() - now
    if not 0 < seconds <= _MAX_LIFE_S:
        raise wrong_option(option, text, "that is not in the next hundred years")
    return seconds


def _say_revoked(issuer: Authority, before: set[str]) -> bool:
    """Tell who is revoked now and was not `before`; True when there is one."""
    revoked = [each for each in issuer.issued() if each.revoked_at is not None and each.public not in before]
    for user in revoked:
        say(f"{user.name} is revoked")
    return bool(revoked)


def existing(folder: Path) -> Authority:
    """The authority there: a wrong folder is not to become one."""
    from fluster_bus.trust.authority import Authority

    if not Authority.is_there(folder):
        raise CommandError(
            f"no keys of a cluster are in the folder {folder}: name theirs with --authority or {AUTHORITY_VARIABLE}, "
            "or make "
            "them with `fluster credentials init`",
            ExitCode.USAGE,
        )
    return Authority.of_cluster(folder)


def _push(context: typer.Context, issuer: Authority) -> None:
    import asyncio

    from fluster_bus.trust.authority import publish_accounts

    asyncio.run(publish_accounts(issuer, servers(context, issuer)))


def servers(context: typer.Context, issuer: Authority) -> str:
    """Where the servers are, which trust that authority."""
    from fluster_bus.access.address import BusAddress

    address = Options.of(context).address
    return issuer.url if address is None else BusAddress.parse(address).url


def split(namespaces: list[str] | None) -> list[str]:
    return [each.strip() for text in namespaces or () for each in text.split(",")]


def _given(context: typer.Context, role: Role) -> list[str]:
    """The namespace that stands before the command, for roles that have one."""
    namespace = Options.of(context).namespace
    return [namespace] if namespace is not None and role.is_confined else []


def _state(user: Issued, now: float) -> str:
    if user.revoked_at is not None:
        return "revoked"
    return "good" if user.is_good(now) else "expired"


def _date(user: Issued) -> str:
    if user.expires_at is None:
        return "-"
    return datetime.fromtimestamp(user.expires_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
