"""What every message has in common: frozen, strict when made here, lenient when it comes from another version."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from fluster_bus.errors import InvalidMessageError


class Message(BaseModel):
    """A frozen model that travels as JSON. Unknown fields of a newer sender are kept and passed on."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")

    def to_json(self) -> bytes:
        return self.model_dump_json(exclude_defaults=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Read a message. Raises InvalidMessageError, which names the fields that are wrong."""
        try:
            return cls.model_validate_json(data or b"{}", extra="allow")
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(str(part) for part in problem['loc']) or 'message'}: {problem['msg']}"
                for problem in error.errors(include_url=False, include_context=False)[:5]
            )
            raise InvalidMessageError(f"no valid {cls.__name__}: {problems}") from error
