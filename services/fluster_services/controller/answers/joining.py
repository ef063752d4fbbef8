"""Exchanges join tokens for the credentials of workers, where the controller was given the keys to sign these."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fluster_bus.core import buckets, subjects
from fluster_bus.core.errors import (
    BusyError,
    KeyExistsError,
    RevisionConflictError,
    ServiceError,
)
from fluster_bus.core.names import WorkerId, check_name
from fluster_bus.core.roles import Role
from fluster_bus.messages.workers import JOIN_REFUSED, JoinReply, JoinRequest
from fluster_bus.storage.streams import issued_workers_table, join_tokens_table, joined_workers_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fluster_bus.connection.bus import Bus
    from fluster_bus.trust.signer import Signer
    from fluster_services.controller.leading.seat import Seat
    from fluster_services.controller.state.worker_index import WorkerIndex

log = logging.getLogger(__name__)

_MAX_JOB_NAME = 100  # of a worker's name in that of its jobs' user
_TRIES = 100  # of those who use a token at the same time, each try lets one through


@dataclass
class _Claim:
    """Of an id, made while a request is answered."""

    revision: int | None = None


class Joining:
    """Answers machines that ask to become workers."""

    def __init__(self, bus: Bus, seat: Seat, worker_index: WorkerIndex, signers: Mapping[Role, Signer]) -> None:
        self._seat = seat
        self._worker_index = worker_index
        self._signers = signers
        self._tokens = join_tokens_table(bus)
        self._joined = joined_workers_table(bus)
        self._issued = issued_workers_table(bus)

    async def answer(self, request: JoinRequest, asked: str) -> JoinReply:
        """Credentials for the worker that is asked for. Raises ServiceError with the code JOIN_REFUSED, BusError.

        The server lets the user of a token ask on that token's subject alone.
        """
        await self._seat.wait_sure()
        token_id = subjects.last_token(asked)
        signers = self._signers
        if not signers:
            raise ServiceError(
                JOIN_REFUSED,
                "the controller has no keys to sign with: start all with --signing-keys (`fluster token keys`)",
            )
        check_name("worker", request.worker_id)
        await self._let_in(token_id, request)
        worker = signers[Role.WORKER].sign(request.key, request.worker_id, tuple(request.job_keys))
        jobs = {
            namespace: signers[Role.JOB].sign(key, f"job-{request.worker_id[:_MAX_JOB_NAME]}", (namespace,))
            for namespace, key in request.job_keys.items()
        }
        log.info("%s has joined by the token %s for %s", request.worker_id, token_id, ", ".join(request.job_keys))
        return JoinReply(worker=worker, jobs=jobs)

    async def _let_in(self, token_id: str, request: JoinRequest) -> None:
        """Write who joins, and that a use of the token is gone."""
        claim = _Claim()
        try:
            for _ in range(_TRIES):
                try:
                    return await self._admit(token_id, request, claim)
                except (RevisionConflictError, KeyExistsError):
                    continue  # another was quicker: what follows from that is looked at anew
            raise BusyError(f"the join token {token_id!r} is used by too many at once: try again")
        except ServiceError:
            if claim.revision is not None:  # of one who had the id and then no use: it is free again
                with suppress(RevisionConflictError):
                    await self._joined.delete(
                        buckets.joined_worker_key(request.worker_id), revision=claim.revision, reason="not admitted"
                    )
            raise

    async def _admit(self, token_id: str, request: JoinRequest, claim: _Claim) -> None:
        """Write it. Raises RevisionConflictError and KeyExistsError when another wrote first."""
        # It brings cryptography, which costs a start 10 ms, and most controllers never need.
        from fluster_services.controller.answers.admission import JoinFacts, admit

        token = await self._tokens.get(buckets.join_token_key(token_id))
        key = buckets.joined_worker_key(request.worker_id)
        holder = await self._joined.get(key)
        known = JoinFacts(
            token.value if token is not None else None,
            holder.value if holder is not None else None,
            is_taken=holder is None and await self._is_taken(request.worker_id),
        )
        admission = admit(token_id, request, known, now=time.time())
        # The id first: a use that is counted for an id which another was given would be lost.
        if admission.worker is not None and holder is None:
            claim.revision = await self._joined.create(key, admission.worker)
        elif admission.worker is not None and holder is not None:
            await self._joined.update(key, admission.worker, holder.revision)
        if admission.token is not None and token is not None:
            await self._tokens.update(token.key, admission.token, token.revision)

    async def _is_taken(self, worker_id: str) -> bool:
        if WorkerId(worker_id) in self._worker_index.workers:
            return True
        issued = await self._issued.get(buckets.ISSUED_WORKERS_KEY)
        return issued is not None and worker_id in issued.value.names


def join_line(subject: str) -> str:
    """Those who join wait in lines of their own, one for each token, beside those of namespaces."""
    return f"join token {subjects.last_token(subject)}"
