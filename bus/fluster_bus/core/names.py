"""Names: which can be part of subjects and keys, which are like a misspelled one, and which are likely to name secrets."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable, Mapping
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


def near_names(name: str, known: Iterable[str]) -> list[str]:
    """Up to three of `known` that are like `name`, the likest first."""
    import difflib  # for errors alone, and tasks share its memory

    return difflib.get_close_matches(name, sorted(known), n=3)


def did_you_mean(names: Iterable[str]) -> str:
    """`; did you mean 'this' or 'that'?`, or nothing when there are none."""
    meant = " or ".join(map(repr, names))
    return f"; did you mean {meant}?" if meant else ""


def no_worker_named(name: str, known: Iterable[str]) -> str:
    """What is said of a task that may only run on a worker which is not among `known`."""
    return f"no worker named {name!r} has been seen{near(name, known)}"


def near(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'this'?` when there is something like it among `known`, else what there is."""
    names = sorted(known)
    if hint := did_you_mean(near_names(name, names)):
        return hint
    if not names:
        return ""
    return f"; there is {', '.join(names[:20])}{' …' if len(names) > 20 else ''}"


MASK = "***"
_SECRET = re.compile(r"TOKEN(?!IZ)|SECRET|KEY|PASSWORD", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """True for names like HF_TOKEN (and not TOKENIZERS_PARALLELISM), CLIENT_SECRET, AWS_ACCESS_KEY_ID and PGPASSWORD."""
    return _SECRET.search(name) is not None


def masked(variables: Mapping[str, str], secrets: Collection[str] = ()) -> dict[str, str]:
    """The variables to be shown: the values of `secrets`, and of names that look like secrets, are replaced by `***`."""
    return {name: MASK if name in secrets or is_secret_name(name) else value for name, value in variables.items()}
