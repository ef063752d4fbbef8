"""The certificates by which servers are known: made, shown and renewed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fluster.cli.common.exit_codes import CommandError, ExitCode, say
from fluster.cli.common.options import Options
from fluster.cli.common.output import write, write_json, write_table
from fluster.cli.credentials import AUTHORITY_VARIABLE, FOLDER, AuthorityFolder, split

if TYPE_CHECKING:
    from fluster_bus.trust.certificate_folder import CertificateFolder, StoredCertificate

_SOON = timedelta(days=30)


def certificates(
    context: typer.Context,
    authority: AuthorityFolder = FOLDER,
    *,
    server: Annotated[
        str | None, typer.Option(metavar="NAME", help="One of the servers; all unless given, with --host the only one.")
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST,…", help="Make the server a certificate for these names and addresses, and no others."
        ),
    ] = None,
    renew: Annotated[bool, typer.Option("--renew", help="Make new ones for the same hosts, good for a year.")] = False,
    new_authority: Annotated[
        bool,
        typer.Option(
            "--new-authority", help="Make another authority, which signs from now on; the one before stays known."
        ),
    ] = False,
) -> None:
    """List the certificates of the servers, or make new ones.

    Each server's folder has its key and certificate in server.pem: copy it to the server, and have that read it by
    `nats-server --signal reload`. Connections stay. The authority itself stays as it is, and with it what users have.

    Try:
      fluster credentials certificates
      fluster credentials certificates --server bus-1 --host bus-1.example.org,10.0.0.1
      fluster credentials certificates --renew
    """
    from fluster_bus.trust.certificate_folder import CertificateFolder

    if sum([bool(host), renew, new_authority]) > 1:
        raise CommandError("--host, --renew and --new-authority exclude each other: give one of them", ExitCode.USAGE)
    folder = CertificateFolder(authority)
    if not folder.is_there() and not host:
        raise CommandError(
            f"no certificates are in the folder {authority}: name theirs with --authority or {AUTHORITY_VARIABLE}, "
            "or make some with "
            "`fluster credentials init --url tls://…`",
            ExitCode.USAGE,
        )
    if host:
        _tell(context, [folder.make(server or _only(folder), split(host))])
    elif renew:
        _tell(context, folder.renew([server] if server is not None else []))
    elif new_authority:
        _tell(context, folder.renew_authority())
        say("give it to servers and users; once they have it: `fluster credentials certificates --renew`")
    else:
        _list(context, folder.shown())
    if (until := folder.ending()) is not None:
        say(
            f"the authority of these certificates ends on {until:%Y-%m-%d}, and they with it: make another with "
            "`fluster credentials "
            "certificates --new-authority`, give its ca.pem to servers and users, and then --renew"
        )


def _only(folder: CertificateFolder) -> str:
    """The server that is meant where none is named."""
    known = [each.name for each in folder.shown() if each.name] if folder.is_there() else []
    if len(known) != 1:
        raise CommandError(
            f"which server is it for? name it with --server{f': there are {chr(44).join(known)}' if known else ''}",
            ExitCode.USAGE,
        )
    return known[0]


def _tell(context: typer.Context, made: list[Path]) -> None:
    if Options.of(context).json:
        write_json([str(each) for each in made])
        return
    for each in made:
        write(str(each))


def _list(context: typer.Context, shown: list[StoredCertificate]) -> None:
    now = datetime.now(UTC)
    if Options.of(context).json:
        rows = [
            {
                "name": each.name or "(authority)",
                "hosts": list(each.info.hosts),
                "state": _state(each, now),
                "until": each.info.until.timestamp(),
                "file": str(each.file),
            }
            for each in shown
        ]
        write_json(rows)
        return
    write_table(
        ["NAME", "STATE", "UNTIL", "HOSTS"],
        [
            [
                each.name or "(authority)",
                _state(each, now),
                f"{each.info.until:%Y-%m-%d %H:%M UTC}",
                ",".join(each.info.hosts) or "-",
            ]
            for each in shown
        ],
    )


def _state(shown: StoredCertificate, now: datetime) -> str:
    state = shown.info.state(now)
    return "ends soon" if state == "good" and shown.info.until < now + _SOON else state
