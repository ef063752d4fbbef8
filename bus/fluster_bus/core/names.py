"""Names that become parts of subjects and keys."""

from __future__ import annotations

import re
import secrets
from typing import NewType

from fluster_bus.core.errors import InvalidNameError

JobId = NewType("JobId", str)
Namespace = NewType("Namespace", str)
WorkerId = NewType("WorkerId", str)
EndpointId = NewType("EndpointId", str)

MAX_NAME_LENGTH = 128
_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_NAME_LENGTH}}}")

# The namespace of the cluster's own traffic; no tenant may have it.
SYSTEM_NAMESPACE = "sys"


def check_name(kind: str, name: str) -> str:
    """Return `name` if it can be part of a subject; `kind` says in the error what it should name.

    Raises InvalidNameError, which quotes the value.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        shown = repr(name) if len(repr(name)) <= 200 else repr(name)[:200] + "…"
        raise InvalidNameError(
            f"invalid {kind} {shown}: use 1 to {MAX_NAME_LENGTH} of the letters A-Z and a-z, digits, '_' and '-'"
        )
    return name


def check_namespace(name: str) -> str:
    """Return `name` if a tenant may have it as namespace. Raises InvalidNameError."""
    check_name("namespace", name)
    if name == SYSTEM_NAMESPACE:
        raise InvalidNameError(f"{name!r} is the namespace of the cluster itself: choose another")
    return name


def unique_name(prefix: str) -> str:
    """Return `prefix` with a random ending, within the length that a name may have."""
    return f"{prefix[: MAX_NAME_LENGTH - 9]}-{secrets.token_hex(4)}"
