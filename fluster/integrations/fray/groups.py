"""Groups of actors: the tasks of one job."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from fluster.actors import ActorPool, AsyncActorPool
from fluster.cluster import AsyncCluster
from fluster.cluster.ownership import release
from fluster.errors import JobFailedError, JobNotFoundError, JobTimeoutError
from fluster.integrations.fray.handles import FlusterActorHandle
from fluster.integrations.fray.jobs import client_here
from fluster_bus.messages import JobId, JobStatus

if TYPE_CHECKING:
    from fluster.integrations.fray.client import FlusterClient

log = logging.getLogger(__name__)

READY_TIMEOUT_S = 900.0
_LONG_S = 10.0  # after this it is said why it takes so long
_END_TIMEOUT_S = 30.0  # well over the grace in which tasks are to end


class FlusterActorGroup:
    """So many actors, which come as there is room for them. It can be pickled, and then knows of none yet."""

    def __init__(self, job_id: JobId, count: int, client: FlusterClient | None = None) -> None:
        self.job_id = job_id
        self._count = count
        self._client = client
        self._pool: ActorPool[Any] | None = None
        self._found: dict[int, FlusterActorHandle] = {}  # {rank: handle}, in the order in which they were handed out

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._count} {self.job_id}>"

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _group, (self.job_id, self._count)

    @property
    def ready_count(self) -> int:
        """How many of them take calls now."""
        return self._bound()[1].size

    def wait_ready(self, count: int | None = None, timeout: float = READY_TIMEOUT_S) -> list[FlusterActorHandle]:
        """The first `count` actors, all unless told otherwise, as soon as they take calls.

        Raises what a constructor raised, ValueError when there never will be room for them, RuntimeError when their job
        has ended otherwise, and TimeoutError after `timeout` seconds, which tells why they are not there.
        """
        wanted = self._count if count is None else count
        client, pool = self._bound()
        pool.portal.run(self._wait, client.cluster.asynchronous, pool.asynchronous, wanted, timeout)
        return list(self._found.values())[:wanted]

    def discover_new(self) -> list[FlusterActorHandle]:
        """Those that take calls by now and have not been handed out yet."""
        pool = self._bound()[1]
        return pool.portal.run(self._look, pool.asynchronous)

    def is_done(self) -> bool:
        """True when its job has ended: no more actors will come."""
        try:
            return self._bound()[0].cluster.poll(self.job_id).status.finished()
        except JobNotFoundError:
            return True

    def terminate(self) -> None:
        """Have the actors end."""
        cluster = self._bound()[0].cluster
        with contextlib.suppress(JobNotFoundError):
            cluster.terminate(self.job_id, reason="its fray client shut the group down")
        release(cluster.asynchronous, self.job_id)

    def shutdown(self) -> None:
        """End the actors, and wait until they have ended."""
        self.terminate()
        try:
            self._bound()[0].cluster.wait(self.job_id, timeout=_END_TIMEOUT_S)
        except JobNotFoundError:
            pass
        except JobTimeoutError as error:
            log.warning("%s is still ending: %s", self.job_id, error)

    def _bound(self) -> tuple[FlusterClient, ActorPool[object]]:
        if self._client is None:
            self._client = client_here()
        if self._pool is None:
            self._pool = ActorPool(self._client.cluster, self.job_id)
        return self._client, self._pool

    # ---- on the connection's loop -----------------------------------------------------------------------

    async def _look(self, pool: AsyncActorPool[object], most: int | None = None) -> list[FlusterActorHandle]:
        roster = await pool.roster()
        new = []
        for member in roster.present():
            if len(self._found) == most:
                break
            if member.task not in self._found:
                self._found[member.task] = FlusterActorHandle(self.job_id, member.task, self._client)
                new.append(self._found[member.task])
        return new

    async def _wait(self, cluster: AsyncCluster, pool: AsyncActorPool[object], wanted: int, timeout_s: float) -> None:
        arrived = asyncio.ensure_future(self._arrival(pool, wanted))
        ended = asyncio.ensure_future(cluster.wait(self.job_id))
        try:
            await asyncio.wait([arrived, ended], timeout=min(_LONG_S, timeout_s), return_when=asyncio.FIRST_COMPLETED)
            if not (arrived.done() or ended.done()) and timeout_s > _LONG_S:
                log.warning("%s", await self._why_not(cluster, wanted, _LONG_S))
                left_s = timeout_s - _LONG_S
                await asyncio.wait([arrived, ended], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if arrived.done():
                return arrived.result()
            if not ended.done():
                raise TimeoutError(await self._why_not(cluster, wanted, timeout_s))
            await self._raise_end(cluster, wanted)
        finally:
            arrived.cancel()
            ended.cancel()

    async def _arrival(self, pool: AsyncActorPool[object], wanted: int) -> None:
        roster = await pool.roster()
        while True:
            await self._look(pool, wanted)
            if len(self._found) >= wanted:
                return
            await roster.change()

    async def _why_not(self, cluster: AsyncCluster, wanted: int, waited_s: float) -> str:
        reason = await cluster.explain(self.job_id)
        return f"{len(self._found)} of {wanted} actors of {self.job_id} are there after {waited_s:g} s: {reason}"

    async def _raise_end(self, cluster: AsyncCluster, wanted: int) -> None:
        try:
            await cluster.result(self.job_id)
        except JobFailedError as error:
            if (
                error.info.status is JobStatus.UNSCHEDULABLE
            ):  # asking again would not help, and fray's users know it by this
                raise ValueError(str(error)) from error
            raise RuntimeError(f"{error}; {len(self._found)} of {wanted} actors were there") from error
        raise RuntimeError(f"job {self.job_id} has ended; {len(self._found)} of {wanted} actors were there")


def _group(job_id: JobId, count: int) -> FlusterActorGroup:
    return FlusterActorGroup(job_id, count, client_here(only_if_set=True))
