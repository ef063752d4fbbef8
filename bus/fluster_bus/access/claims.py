"""What the signed token of a user says, read without its signature: that is for the server to check."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass

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
