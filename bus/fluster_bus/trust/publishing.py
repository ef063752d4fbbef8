"""Tells running servers what the authority has changed."""

from __future__ import annotations

import json

from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.errors import CredentialsError
from fluster_bus.trust.authority import Authority

_OK = 200


async def publish_accounts(authority: Authority, url: str) -> None:
    """Have the servers at `url` take the accounts as they are now: who is revoked is cut off, what a role may applies.

    A server of the group that is away learns it from the others when it is back. Raises CredentialsError when they trust
    another authority, ConnectError.
    """
    bus = await Bus.connect(authority.address(authority.system_credentials(), url), name="fluster credentials")
    try:
        for token in authority.account_tokens().values():
            answer = json.loads((await bus.request(subjects.CLAIMS_UPDATE, token.encode())).data)
            done = answer.get("data") or {}
            if done.get("code") != _OK:
                reason = answer.get("error") or done
                raise CredentialsError(f"the server at {url} does not take the accounts of this authority: {reason}")
    finally:
        await bus.close()
