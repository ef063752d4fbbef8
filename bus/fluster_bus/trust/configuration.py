"""The part of a server's configuration that says whom it trusts. It names no user: the same for all servers, for good."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fluster_bus.configuration.server_configuration import production_server
from fluster_bus.configuration.server_text import quoted
from fluster_bus.configuration.server_tls import Member, group
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
            # Servers of a group compare what they were given so often: one that was away soon refuses who is revoked.
            f'resolver: {{ type: full, dir: {quoted(str(folder))}, allow_delete: false, interval: "5s" }}',
            "resolver_preload: {",
            *preload,
            "}",
            "",
        ]
    )
