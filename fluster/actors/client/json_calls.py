"""Calls in JSON by those who unpickle nothing, such as the command line: told as soon as pools that the actor has died."""

from __future__ import annotations

import asyncio
import json
import logging

from fluster.actors.client.rosters import Change, Joined, Left, Rosters
from fluster.actors.protocol import frames
from fluster.actors.protocol.calls import died_while_out, lost_while_out
from fluster.actors.protocol.frames import Moment
from fluster.actors.protocol.members import Member
from fluster.actors.protocol.policies import Random
from fluster.cluster import AsyncCluster
from fluster_bus.core import subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import BusError, CredentialsError, NoRespondersError

log = logging.getLogger(__name__)

_READ_REGISTRY_S = 2.0  # and no more than half of what a call may take


async def call_in_json(cluster: AsyncCluster, name: str, method: str, arguments: bytes, *, timeout_s: float) -> object:
    """What a method of one of the actors of a name returns, read from JSON.

    The member is taken from the registry, which is watched until the answer comes. Where it cannot be read, the bus
    chooses a member, and the member's death is not noticed.

    Raises ActorDiedError and ConnectionLostError as calls of pools do, ServiceError when the actor answers an error,
    NoRespondersError when no actor serves the name, RequestTimeoutError after `timeout_s` seconds, and what else
    `Bus.request` raises.
    """
    call = _JsonCall(cluster, name, method, arguments, timeout_s)
    return json.loads((await call.answer()).data)["result"]


def end_of(change: Change, endpoint_id: str, sent_at: Moment, call: str) -> Exception | None:
    """Why a call that is out at this member will not be answered after such news; None when it may be."""
    match change:
        case Left(left, reason) if left == endpoint_id:
            return died_while_out(call, endpoint_id, reason)
        case Joined(member) if member.endpoint_id == endpoint_id and member.disconnected_at is not None:
            was_cut_off = frames.seconds_between(sent_at, member.disconnected_at) > 0
            return lost_while_out(call) if was_cut_off else None
        case _:
            return None


class _JsonCall:
    """One call: to which member it goes, and what comes of it."""

    def __init__(self, cluster: AsyncCluster, name: str, method: str, arguments: bytes, timeout_s: float) -> None:
        self._cluster = cluster
        self._name = name
        self._method = method
        self._arguments = arguments
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._ends_at = self._loop.time() + timeout_s
        self._out: tuple[str, Moment, asyncio.Future[Exception]] | None = None  # at whom, since when, how it ended

    async def answer(self) -> Delivery:
        rosters = Rosters(self._loop, self._cluster.registry, self._on_change)
        rosters.open(self._name)
        rosters.watch(self._name)
        try:
            untried = await self._members(rosters)
            policy = Random()
            while untried:
                member = policy.choose(untried, {})
                try:
                    return await self._ask(member.endpoint_id)
                except NoRespondersError:  # it was not delivered
                    untried.remove(member)
                except CredentialsError as error:  # nor was this
                    log.info("one actor of %s cannot be called by itself: %s", self._name, error)
                    break
        finally:
            rosters.close(self._name)
        return await self._request(subjects.actor_any(self._cluster.namespace, self._name, self._method))

    async def _members(self, rosters: Rosters) -> list[Member]:
        """Those to choose from; none when the registry has or tells none."""
        try:
            async with asyncio.timeout(min(_READ_REGISTRY_S, self._timeout_s / 2)):
                roster = await rosters.known(self._name)
        except (BusError, TimeoutError) as error:
            log.info(
                "the death of an actor of %s would not be noticed, as the registry cannot be read: %s",
                self._name,
                error,
            )
            return []
        # The word of a tenant: what stands there may be the address of something else.
        return [member for member in roster.present() if member.address == self._address(member)]

    def _address(self, member: Member) -> str:
        return subjects.actor_member(self._cluster.namespace, self._name, member.endpoint_id)

    async def _ask(self, endpoint_id: str) -> Delivery:
        ended = self._loop.create_future()
        self._out = endpoint_id, frames.now(), ended
        subject = subjects.actor_one(self._cluster.namespace, self._name, endpoint_id, self._method)
        request = asyncio.create_task(self._request(subject), name=f"call of {self._name}.{self._method}")
        try:
            await asyncio.wait((request, ended), return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                raise ended.result()
            return await request
        finally:
            self._out = None
            request.cancel()

    async def _request(self, subject: str) -> Delivery:
        left_s = max(self._ends_at - self._loop.time(), 0.0)
        return await self._cluster.bus.request(subject, self._arguments, timeout_s=left_s)

    def _on_change(self, _name: str, change: Change) -> None:
        if self._out is None:
            return
        endpoint_id, sent_at, ended = self._out
        error = end_of(change, endpoint_id, sent_at, f"{self._name}.{self._method}")
        if error is not None and not ended.done():
            ended.set_result(error)
