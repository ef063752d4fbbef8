"""Join tokens: machines show them to become workers of a cluster, each with credentials of its own."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fluster.cli.common.exit_codes import CommandError, ExitCode, say
from fluster.cli.common.options import Options
from fluster.cli.common.output import write, write_json, write_table
from fluster.cli.credentials import FOLDER, AuthorityFolder, Namespaces, existing, seconds_until, servers, split
from fluster_bus.core.roles import DEFAULT_NAMESPACE

if TYPE_CHECKING:
    from fluster_bus.messages.workers import JoinTokenRecord
    from fluster_bus.trust.join_register import JoinRegister

KEYS_FILE = Path("signing-keys.json")


def create(
    context: typer.Context,
    authority: AuthorityFolder = FOLDER,
    *,
    uses: Annotated[int, typer.Option(metavar="N", min=1, max=1_000, help="How many workers may join by it.")] = 1,
    lasting: Annotated[
        str, typer.Option("--for", metavar="TIME", help="How long: 90m, 12h, 30d; or a date or time in UTC.")
    ] = "1h",
    namespace: Namespaces = None,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it there, for you alone, instead of showing it.")
    ] = None,
) -> None:
    """Make a token by which machines become workers. Who has it can run tasks of its namespaces, and see what they
    hold.

    The controllers need the keys of `fluster token keys`.

    Try:
      fluster token create --uses 10 --for 12h --namespace default,team-a --file join.token
      fluster worker start --join join.token
    """
    from fluster_bus.access.address import write_private
    from fluster_bus.access.tls import plain_servers

    lifetime_s = seconds_until("--for", lasting, time.time())
    given = split(namespace) or [Options.of(context).namespace or DEFAULT_NAMESPACE]
    if file is not None and file.exists():
        raise CommandError(f"the file {file} exists already: move it, or name another with --file", ExitCode.USAGE)
    issuer = existing(authority)
    url = servers(context, issuer)
    if exposed := plain_servers(url.split(",")):
        say(
            f"warning: {', '.join(exposed)} is on other machines and not encrypted: who reads the traffic on the way "
            "learns what tasks send, and "
            "can take over connections: give the servers TLS, and the token a tls:// address"
        )
    token = asyncio.run(_register(context, authority).create(given, uses=uses, lifetime_s=lifetime_s))
    if file is not None:
        write_private(file, token.to_text() + "\n")
    if Options.of(context).json:
        shown = {"name": token.token_id, "namespaces": list(token.namespaces), "uses": uses}
        write_json(shown | ({"file": str(file)} if file is not None else {"token": token.to_text()}))
    else:
        write(str(file) if file is not None else token.to_text())


def ls(context: typer.Context, authority: AuthorityFolder = FOLDER) -> None:
    """List the join tokens, and who has joined by each. One that has expired is listed for a day.

    Try:
      fluster token ls
    """
    now = time.time()
    tokens = asyncio.run(_register(context, authority).tokens())
    if Options.of(context).json:
        write_json([{**each.model_dump(mode="json"), "state": _state(each, now)} for each in tokens])
        return
    rows = [
        [
            each.token_id,
            ",".join(each.namespaces),
            f"{len(each.used_by)}/{each.uses}",
            _state(each, now),
            datetime.fromtimestamp(each.expires_at, UTC).strftime("%Y-%m-%d %H:%M UTC"),
            ", ".join(sorted(each.used_by.values())) or "-",
        ]
        for each in tokens
    ]
    write_table(["NAME", "NAMESPACES", "USED", "STATE", "UNTIL", "WORKERS"], rows)


def revoke(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the token, as `fluster token ls` shows it.")],
    authority: AuthorityFolder = FOLDER,
) -> None:
    """Take a join token back: no machine joins by it from then on. Workers that have joined stay.

    Try:
      fluster token revoke join-3f2a9c1b
    """
    joined = asyncio.run(_register(context, authority).revoke_token(name))
    say(f"{name} is revoked")
    if joined:
        say(f"those who have joined by it stay: `fluster credentials revoke` takes back each of {', '.join(joined)}")


def keys(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What to write.")] = KEYS_FILE,
    authority: AuthorityFolder = FOLDER,
) -> None:
    """Write the keys by which controllers sign for workers that join, and for their jobs; they can sign for no other
    user.

    Try:
      fluster token keys signing-keys.json
      fluster --address controllers.creds controller start --signing-keys signing-keys.json
    """
    from fluster_bus.trust.signer import write_signing_keys

    write_signing_keys(existing(authority), file)
    write(str(file))


def _register(context: typer.Context, authority: Path) -> JoinRegister:
    from fluster_bus.trust.join_register import JoinRegister

    issuer = existing(authority)
    return JoinRegister(issuer, servers(context, issuer))


def _state(token: JoinTokenRecord, now: float) -> str:
    if now >= token.expires_at:
        return "expired"
    return "good" if len(token.used_by) < token.uses else "used up"
