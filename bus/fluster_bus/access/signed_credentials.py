"""Signed credentials: what the token of a user says, read without its signature, and the file of token and seed."""

from __future__ import annotations

import base64
import binascii
import json
import re
from dataclasses import dataclass

from fluster_bus.access.tls import certificates_in
from fluster_bus.core.errors import CredentialsError

_MAX_TOKEN_BYTES = 1 << 20
_USER_LETTER = "U"
NAMESPACE_TAG = "ns"


@dataclass(frozen=True)
class UserClaims:
    """What the token of a user says."""

    public: str
    name: str
    issuer: str
    tags: tuple[str, ...]
    issued_at: int
    expires_at: int | None

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Those that the user is confined to; none for users of the whole cluster."""
        return self.tagged(NAMESPACE_TAG)

    def tagged(self, name: str) -> tuple[str, ...]:
        """The values of all tags `name:value`."""
        return tuple(tag.removeprefix(f"{name}:") for tag in self.tags if tag.startswith(f"{name}:"))


def read_user_token(token: str) -> UserClaims:
    """What the token of a user says. Raises CredentialsError."""
    try:
        if len(token) > _MAX_TOKEN_BYTES:
            raise ValueError(len(token))
        _header, body, _signature = token.strip().split(".")
        claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        user = UserClaims(
            public=str(claims["sub"]),
            name=str(claims["name"]),
            issuer=str(claims["iss"]),
            tags=tuple(map(str, claims["nats"].get("tags") or ())),
            issued_at=int(claims["iat"]),
            expires_at=int(claims["exp"]) if claims.get("exp") else None,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, binascii.Error) as error:
        raise CredentialsError("a token is damaged: it is not what `fluster credentials` wrote") from error
    if not user.public.startswith(_USER_LETTER):
        raise CredentialsError(f"a token is of {user.public!r}, which is not a user")
    return user


_SERVERS = "# fluster: "
_MARK = "BEGIN NATS USER JWT"
_PARTS = re.compile(r"^-{3,}BEGIN (NATS USER JWT|USER NKEY SEED)-{3,}\s*\n\s*([\w.=-]+)\s*\n-{3,}END", re.MULTILINE)
_NAMES = {"NATS USER JWT": "token", "USER NKEY SEED": "seed"}


def is_signed_file(data: bytes) -> bool:
    """Whether a file of credentials is one of these."""
    return _MARK.encode() in data


def signed_file_values(data: bytes) -> dict[str, str]:
    """Token and seed, the URL if there is one, and as `ca` the certificates if there are some. Raises ValueError."""
    text = data.decode("utf-8").replace("\r\n", "\n")
    values = {_NAMES[kind]: value for kind, value in _PARTS.findall(text)}
    if values.keys() != {"token", "seed"}:
        raise ValueError("no token, or no seed")
    for line in text.splitlines():
        if line.startswith(_SERVERS):
            values["url"] = line.removeprefix(_SERVERS).strip()
    if certificates := certificates_in(text):
        values["ca"] = certificates
    return values


def signed_file_text(url: str | None, token: str, seed: str, ca: str | None = None) -> str:
    """What such a file says: a user's token and seed as NATS writes them (`.creds`), for `nats --creds` and other clients.

    Before both stands a line that only Fluster reads: the servers where they are good. Behind them stand the certificates
    (PEM) of the authorities that signed those of the servers, so that `nats --tlsca` takes the file as well.
    """
    return f"""\
{f"{_SERVERS}{url}" if url is not None else ""}
-----BEGIN NATS USER JWT-----
{token}
------END NATS USER JWT------

What follows makes its owner this user: keep the file to yourself.
-----BEGIN USER NKEY SEED-----
{seed}
------END USER NKEY SEED------
{
        f'''
By these the servers are known:
{ca}'''
        if ca is not None
        else ""
    }""".lstrip("\n")
