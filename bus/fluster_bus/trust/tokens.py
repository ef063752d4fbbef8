"""The signed tokens (JWT) by which a server knows its operator, its accounts, and its users.

A token is three parts in base64 without padding, joined by dots: a header, the claims as JSON, and the signature over both.
Fields as in https://github.com/nats-io/jwt, version 2.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fluster_bus.access.keys import Key
from fluster_bus.core.roles import Permissions
from fluster_bus.grants import Export

_VERSION = 2
_HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}
_NO_LIMIT = -1
_USER_LIMITS = {"subs": _NO_LIMIT, "data": _NO_LIMIT, "payload": _NO_LIMIT}
_ACCOUNT_LIMITS = {
    **_USER_LIMITS,
    "imports": _NO_LIMIT,
    "exports": _NO_LIMIT,
    "wildcards": True,
    "conn": _NO_LIMIT,
    "leaf": _NO_LIMIT,
}
_STREAM_LIMITS = {"mem_storage": _NO_LIMIT, "disk_storage": _NO_LIMIT, "streams": _NO_LIMIT, "consumer": _NO_LIMIT}


@dataclass(frozen=True)
class Scope:
    """What users may do whose tokens `key` signed: `{{tag(x)}}` and `{{name()}}` in a subject stand for what a token says."""

    key: str  # public
    role: str
    permissions: Permissions


def operator_token(operator: Key, *, name: str, system_account: str) -> str:
    """What a server trusts: the operator's word about itself."""
    claims = {"type": "operator", "version": _VERSION, "system_account": system_account}
    return _signed(operator, operator.public, name, claims)


def account_token(
    operator: Key,
    account: str,
    *,
    name: str,
    exports: Sequence[Export] = (),
    imports: Mapping[Export, str] | None = None,
    scopes: Sequence[Scope] = (),
    signers: Sequence[str] = (),
    revoked: Mapping[str, int] | None = None,
    has_streams: bool = False,
) -> str:
    """An account, public key `account`: what it gives to others and takes from them, and who may sign for its users.

    `imports` are {what: the account that exports it}. `signers` may give any permission; the key of a scope gives that
    scope's. `revoked` are {user's public key: Unix time}: tokens which were issued to it until then are refused.
    """
    claims: dict[str, object] = {
        "type": "account",
        "version": _VERSION,
        "limits": {**_ACCOUNT_LIMITS, **(_STREAM_LIMITS if has_streams else {})},
        "default_permissions": {"pub": {}, "sub": {}},
        "exports": [_export(each) for each in exports],
        "imports": [
            {**_flow(each), "account": exporter, "local_subject": each.subject}
            for each, exporter in (imports or {}).items()
        ],
        "signing_keys": [*map(_scope, scopes), *signers],
        "revocations": dict(revoked or {}),
    }
    return _signed(operator, account, name, claims)


def user_token(
    signer: Key,
    user: str,
    *,
    name: str,
    account: str,
    tags: Sequence[str] = (),
    permissions: Permissions | None = None,
    expires_at: int | None = None,
) -> str:
    """A user, public key `user`, of `account`; until `expires_at` (Unix time), or for good.

    With the key of a scope for `signer`, `permissions` must be None: the scope's apply.
    """
    claims: dict[str, object] = {"type": "user", "version": _VERSION, "tags": list(tags)}
    if signer.public != account:
        claims["issuer_account"] = account
    if permissions is not None:
        claims |= {**_allowed(permissions), **_USER_LIMITS}
    return _signed(signer, user, name, claims, expires_at)


def _flow(export: Export) -> dict[str, object]:
    return {"name": export.subject, "subject": export.subject, "type": "stream" if export.is_stream else "service"}


def _export(export: Export) -> dict[str, object]:
    return {**_flow(export), **({"response_type": "Stream"} if export.many_answers else {})}


def _scope(scope: Scope) -> dict[str, object]:
    template = {**_allowed(scope.permissions), **_USER_LIMITS}
    return {"kind": "user_scope", "key": scope.key, "role": scope.role, "template": template}


def _allowed(permissions: Permissions) -> dict[str, object]:
    return {"pub": {"allow": list(permissions.publish)}, "sub": {"allow": list(permissions.subscribe)}}


def _signed(signer: Key, subject: str, name: str, claims: Mapping[str, object], expires_at: int | None = None) -> str:
    body: dict[str, object] = {
        "iat": int(time.time()),
        "iss": signer.public,
        "name": name,
        "sub": subject,
        "nats": claims,
    }
    if expires_at is not None:
        body["exp"] = expires_at
    # Two tokens that say the same are one: the name of a token is the hash of what it says.
    body["jti"] = base64.b32encode(hashlib.sha256(_json(body)).digest()).decode("ascii").rstrip("=")
    text = f"{_base64(_json(_HEADER))}.{_base64(_json(body))}"
    return f"{text}.{_base64(signer.sign(text.encode('ascii')))}"


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")
