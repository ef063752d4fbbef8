"""What servers learn from the authority: lines of their configuration, which name no user, and changed accounts while they run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from fluster_bus.configuration.server_configuration import production_server
from fluster_bus.configuration.server_sections import Member, group, quoted
from fluster_bus.core import server_subjects
from fluster_bus.core.errors import CredentialsError
from fluster_bus.trust.authority import Authority


def signed_configuration(authority: Authority, store: Path) -> str:
    """The whole configuration of a production server with its streams below `store`. It holds no secret."""
    port = int(authority.url.split(",")[0].rpartition(":")[2])
    return _HEADER + production_server(port, str(store), None) + trust_configuration(authority, store / "accounts")


def encrypted_configuration(
    authority: Authority, store: Path, member: Member, members: Sequence[Member], folder: Path
) -> str:
    """The same of one of a cluster's servers, or of the only one: what belongs to it lies in `folder` there."""
    routes = group([each.route for each in members], member.route_port, str(folder)) if len(members) > 1 else ""
    server = production_server(member.port, str(store), str(folder), name=member.name)
    return "".join([_HEADER, server, routes, trust_configuration(authority, store / "accounts")])


_HEADER = """\
# A production server. Made by `fluster credentials init`; nothing here is secret. Users come and go without a change of this file.

"""


def trust_configuration(authority: Authority, folder: Path) -> str:
    """Lines for nats-server: the operator, and the accounts as they are now; `folder` keeps those that come later."""
    preload = [f"  {account}: {quoted(token)}" for account, token in authority.account_tokens().items()]
    return "\n".join(
        [
            f"operator: {quoted(authority.operator_token())}",
            f"system_account: {authority.system_account}",
            # Servers of a group compare what they were given so often: one that was away soon refuses users that are revoked.
            f'resolver: {{ type: full, dir: {quoted(str(folder))}, allow_delete: false, interval: "5s" }}',
            "resolver_preload: {",
            *preload,
            "}",
            "",
        ]
    )


_OK = 200


async def publish_accounts(authority: Authority, url: str) -> None:
    """Have the servers at `url` take the accounts as they are now: users that are revoked are cut off, what a role may applies.

    A server of the group that is away learns it from the others when it is back. Raises CredentialsError when they trust
    another authority, ConnectError.
    """
    from fluster_bus.connection.bus import Bus  # with nats-py, which writing a configuration does not need

    bus = await Bus.connect(authority.address(authority.system_credentials(), url), name="fluster credentials")
    try:
        for token in authority.account_tokens().values():
            answer = json.loads((await bus.request(server_subjects.CLAIMS_UPDATE, token.encode())).data)
            done = answer.get("data") or {}
            if done.get("code") != _OK:
                reason = answer.get("error") or done
                raise CredentialsError(f"the server at {url} does not take the accounts of this authority: {reason}")
    finally:
        await bus.close()
