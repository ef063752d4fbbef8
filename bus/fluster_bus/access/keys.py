"""Ed25519 key pairs in the text form of NATS: a seed begins with `S`, a public key with the letter of its kind."""

from __future__ import annotations

import base64
import binascii
import os
from enum import StrEnum
from typing import Self

import nkeys

from fluster_bus.core.errors import CredentialsError

_SEED_BYTES = 32
_PUBLIC_LENGTH = 56


class KeyKind(StrEnum):
    """What a key stands for; its letter begins the public key."""

    OPERATOR = "O"
    ACCOUNT = "A"
    USER = "U"


_PREFIXES = {
    KeyKind.OPERATOR: nkeys.PREFIX_BYTE_OPERATOR,
    KeyKind.ACCOUNT: nkeys.PREFIX_BYTE_ACCOUNT,
    KeyKind.USER: nkeys.PREFIX_BYTE_USER,
}


def is_public_key(text: str, kind: KeyKind) -> bool:
    """Whether `text` is the public key of a key of that kind: its sum is right."""
    try:
        data = base64.b32decode(text.encode("ascii"))
    except (ValueError, binascii.Error):
        return False
    return (
        len(text) == _PUBLIC_LENGTH
        and text[0] == kind
        and binascii.crc_hqx(data[:-2], 0) == int.from_bytes(data[-2:], "little")
    )


class Key:
    """A key pair. Its text and `repr` show the public key only."""

    def __init__(self, seed: str) -> None:
        """The key of a seed, as `seed` gave it. Raises CredentialsError, which does not show the seed."""
        try:
            self._pair = nkeys.from_seed(bytearray(seed.strip().encode("ascii")))
            self.public: str = self._pair.public_key.decode("ascii")
            self.kind = KeyKind(self.public[0])
        except (nkeys.NkeysError, binascii.Error, ValueError) as error:
            raise CredentialsError("a seed of a key is damaged: it is not what `fluster credentials` wrote") from error
        self.seed = seed.strip()

    @classmethod
    def generate(cls, kind: KeyKind) -> Self:
        """A new random key."""
        return cls(bytes(nkeys.encode_seed(os.urandom(_SEED_BYTES), _PREFIXES[kind])).decode("ascii"))

    def __repr__(self) -> str:
        return f"Key({self.public})"

    def sign(self, data: bytes) -> bytes:
        """The signature of `data`: 64 bytes."""
        signature: bytes = self._pair.sign(data)
        return signature
