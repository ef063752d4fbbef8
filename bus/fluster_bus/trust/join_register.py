"""The join tokens of a cluster, and who joined by them, as those see it who have the authority's keys."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets, subjects
from fluster_bus.core.errors import BusError, CredentialsError, InvalidNameError, StreamNotFoundError
from fluster_bus.core.names import check_name, check_namespace, unique_name
from fluster_bus.core.roles import Role
from fluster_bus.messages.workers import MAX_NAMESPACES, MAX_USES, IssuedWorkers, JoinedWorker, JoinTokenRecord
from fluster_bus.storage.streams import issued_workers_table, join_tokens_table, joined_workers_table
from fluster_bus.trust.authority import Authority, Credentials, Issued, publish_accounts
from fluster_bus.trust.join_tokens import JoinToken

_KEPT_EXPIRED_S = 86_400.0  # so long a token is listed that has expired
_MAX_LIFE_S = 366 * 86_400.0


class JoinRegister:
    """Tells controllers about tokens, at the servers of `url`, by an operator whose credentials last a minute."""

    def __init__(self, authority: Authority, url: str) -> None:
        self._authority = authority
        self._url = url

    @asynccontextmanager
    async def _bus(self) -> AsyncIterator[Bus]:
        made = self._authority.operator_credentials()
        bus = await Bus.connect(self._address(made), name="fluster token")
        try:
            yield bus
        finally:
            await bus.close()

    async def create(self, namespaces: Sequence[str], *, uses: int, lifetime_s: float) -> JoinToken:
        """A new token. Raises CredentialsError for what it cannot be, InvalidNameError, BusError."""
        names = tuple(dict.fromkeys(check_namespace(each) for each in namespaces))
        if not 1 <= len(names) <= MAX_NAMESPACES or not 1 <= uses <= MAX_USES or not 0 < lifetime_s <= _MAX_LIFE_S:
            raise CredentialsError(
                f"a join token is for 1 to {MAX_NAMESPACES} namespaces, has 1 to {MAX_USES} uses, and lasts a year at most"
            )
        token_id = unique_name("join")
        async with self._bus() as bus:
            made = self._authority.issue(Role.JOIN, token_id, lifetime_s=lifetime_s)
            try:
                record = JoinTokenRecord(
                    token_id=token_id, namespaces=names, uses=uses, expires_at=time.time() + lifetime_s
                )
                await self._tidy(bus)
                await join_tokens_table(bus).create(buckets.join_token_key(token_id), record)
            except Exception:
                self._authority.revoke(token_id)  # it was never handed out
                raise
        return JoinToken(self._address(made), names)

    async def _tidy(self, bus: Bus) -> None:
        """Tell whose ids are taken, and forget what is of no more use."""
        now, tokens, workers = time.time(), join_tokens_table(bus), joined_workers_table(bus)
        # Names of others than workers, too: who revokes by a name would revoke the other one.
        tenants = {str(role) for role in Role if role.is_tenant}
        issued = [each.name for each in self._authority.issued() if each.role not in tenants and each.is_good(now)]
        await issued_workers_table(bus).put(buckets.ISSUED_WORKERS_KEY, IssuedWorkers(names=tuple(issued)))
        kept = set()
        for token in await tokens.rows(buckets.join_token_key(subjects.ANY_TOKEN)):
            if token.value.expires_at + _KEPT_EXPIRED_S < now:
                await tokens.delete(token.key, revision=token.revision, reason="it has expired")
            else:
                kept.add(token.value.token_id)
        for worker in await workers.rows(buckets.joined_worker_key(subjects.ANY_TOKEN)):
            if worker.value.revoked_at is not None and worker.value.token_id not in kept:
                await workers.delete(worker.key, revision=worker.revision, reason="it was revoked")

    def _address(self, made: Credentials) -> BusAddress:
        """With the certificates by which its receiver knows the servers."""
        return self._authority.address(made, self._url)

    async def tokens(self) -> list[JoinTokenRecord]:
        """All that there are, the one that ends first as the first. Raises BusError."""
        async with self._bus() as bus:
            rows = await join_tokens_table(bus).rows(buckets.join_token_key(subjects.ANY_TOKEN))
        return sorted((row.value for row in rows), key=lambda each: (each.expires_at, each.token_id))

    async def revoke_token(self, token_id: str) -> tuple[str, ...]:
        """Take a token back: no machine joins by it from now on. Returns the workers that have joined. Raises CredentialsError, BusError."""
        check_name("join token", token_id)
        issued = [each for each in self._authority.issued() if (each.name, each.role) == (token_id, Role.JOIN)]
        if not issued:
            raise CredentialsError(f"unknown join token {token_id!r}: `fluster token ls` lists them")
        if any(each.is_good(time.time()) for each in issued):
            self._authority.revoke(token_id)
        await publish_accounts(self._authority, self._url)
        async with self._bus() as bus:
            key = buckets.join_token_key(token_id)
            row = await join_tokens_table(bus).get(key)
            if row is None:
                return ()
            await join_tokens_table(bus).delete(key, reason="it was revoked")
        return tuple(row.value.used_by.values())

    async def revoke_user(self, name: str) -> list[Issued]:
        """Revoke a user of the authority, or a worker that joined by a token, with its jobs' credentials; servers get the change.

        Raises CredentialsError when there is none of that name, and BusError where the servers cannot be reached: then
        `publish_accounts` does it later.
        """
        now = time.time()
        if any(each.is_good(now) and name in (each.name, each.public) for each in self._authority.issued()):
            revoked = self._authority.revoke(name)
            await publish_accounts(self._authority, self._url)
            return revoked
        try:
            joined = await self._joined(name)
        except BusError as error:
            joined, unknown = None, f"; workers that joined by a token cannot be looked up: {error}"
        else:
            unknown = ""
        if joined is None:
            try:
                revoked = self._authority.revoke(name)  # a public key
            except CredentialsError as error:
                raise CredentialsError(f"{error}{unknown}") from error
            await publish_accounts(self._authority, self._url)
            return revoked
        revoked = self._authority.revoke_joined(_users(joined))
        await publish_accounts(self._authority, self._url)
        async with self._bus() as bus:
            table, key = joined_workers_table(bus), buckets.joined_worker_key(name)
            row = await table.get(key)
            if row is not None and row.value.key == joined.key:
                await table.update(key, row.value.model_copy(update={"revoked_at": now}), row.revision)
        return revoked

    async def _joined(self, name: str) -> JoinedWorker | None:
        """The worker that joined under that name and was not revoked. Raises BusError."""
        try:
            key = buckets.joined_worker_key(check_name("worker", name))
            async with self._bus() as bus:
                row = await joined_workers_table(bus).get(key)
        except (InvalidNameError, StreamNotFoundError):
            return None
        return row.value if row is not None and row.value.revoked_at is None else None


def _users(joined: JoinedWorker) -> list[Issued]:
    since, namespaces = int(joined.joined_at), tuple(joined.job_keys)
    jobs = [
        Issued(f"job-{joined.worker_id}", str(Role.JOB), (each,), key, since) for each, key in joined.job_keys.items()
    ]
    return [Issued(joined.worker_id, str(Role.WORKER), namespaces, joined.key, since), *jobs]
