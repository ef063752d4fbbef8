"""Whether a machine with a join token becomes a worker: decided from what is known, without I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import UTC, datetime

from fluster_bus.access.keys import KeyKind, is_public_key
from fluster_bus.core.errors import ServiceError
from fluster_bus.core.names import check_name
from fluster_bus.messages.workers import JOIN_REFUSED, JoinedWorker, JoinRequest, JoinTokenRecord


@dataclasses.dataclass(frozen=True)
class JoinFacts:
    """What the cluster knows of a token, and of the id that is asked for."""

    token: JoinTokenRecord | None
    holder: JoinedWorker | None  # who joined under that id
    is_taken: bool  # by a worker that did not join by a token, or by a user of the cluster


@dataclasses.dataclass(frozen=True)
class Admission:
    """What is to be written before the credentials are handed out; None for what is so already."""

    worker: JoinedWorker | None
    token: JoinTokenRecord | None


def admit(token_id: str, request: JoinRequest, known: JoinFacts, *, now: float) -> Admission:
    """Whether the user of that token becomes that worker. A request that is sent again changes nothing.

    Raises ServiceError with the code JOIN_REFUSED, InvalidNameError for an id that is none.
    """
    check_name("worker", request.worker_id)
    token = known.token
    if token is None:
        raise _refused(f"the join token {token_id!r} is not known: it was revoked, or is of another cluster")
    if now >= token.expires_at:
        when = datetime.fromtimestamp(token.expires_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
        raise _refused(f"the join token {token_id!r} has expired at {when}: have a new one made")
    _check_keys(token, request)
    _check_id(token, request, known)
    if request.key not in token.used_by and len(token.used_by) >= token.uses:
        raise _refused(
            f"the join token {token_id!r} is used up: {len(token.used_by)} of {token.uses}; have a new one made"
        )
    held = known.holder if known.holder is not None and known.holder.revoked_at is None else None
    job_keys = {**(held.job_keys if held is not None else {}), **request.job_keys}
    worker = JoinedWorker(
        worker_id=request.worker_id,
        token_id=token_id,
        key=request.key,
        job_keys=job_keys,
        joined_at=now,
    )
    is_known = held is not None and held.job_keys == job_keys
    is_counted = request.key in token.used_by
    used_by = {**token.used_by, request.key: request.worker_id}
    return Admission(
        None if is_known else worker, None if is_counted else token.model_copy(update={"used_by": used_by})
    )


def _check_keys(token: JoinTokenRecord, request: JoinRequest) -> None:
    strange = sorted(request.job_keys.keys() - set(token.namespaces))
    if strange or not request.job_keys:
        asked = f"not for {', '.join(strange)}" if strange else "and none was asked for"
        raise _refused(f"the join token {token.token_id!r} is good for {', '.join(token.namespaces)}, {asked}")
    keys = [request.key, *request.job_keys.values()]
    for key in keys:
        if not is_public_key(key, KeyKind.USER):
            raise _refused(f"{key!r} is not the public key of a user")
    if len(set(keys)) < len(keys):
        raise _refused("a key is named twice: make one for the worker, and one for the jobs of each namespace")


def _check_id(token: JoinTokenRecord, request: JoinRequest, known: JoinFacts) -> None:
    wanted, holder = request.worker_id, known.holder
    if token.used_by.get(request.key, wanted) != wanted:
        raise _refused(f"this key is of the worker {token.used_by[request.key]!r}, and not of {wanted!r}: make another")
    if holder is None:
        if known.is_taken:
            raise _refused(f"there is a worker or user {wanted!r} already: choose another id with --worker-id")
        return
    if holder.revoked_at is not None:
        if holder.key == request.key:
            raise _refused(f"the credentials of the worker {wanted!r} were revoked: join anew, with a new key")
        return
    if holder.key != request.key:
        raise _refused(
            f"the worker {wanted!r} is another's: choose another id with --worker-id, or have that one's credentials revoked "
            f"(`fluster credentials revoke {wanted}`)"
        )
    if _differ(holder.job_keys, request.job_keys):
        raise _refused(f"the worker {wanted!r} has joined with other keys for its jobs: use those")


def _differ(held: Mapping[str, str], asked: Mapping[str, str]) -> bool:
    return any(held.get(namespace, key) != key for namespace, key in asked.items())


def _refused(why: str) -> ServiceError:
    return ServiceError(JOIN_REFUSED, why)
