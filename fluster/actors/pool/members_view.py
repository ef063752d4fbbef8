"""What notebooks show of an actor pool."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fluster_bus.core.errors import FlusterError
from fluster_bus.messages.notebook import table, view

if TYPE_CHECKING:
    from fluster.actors.pool.pool import AsyncActorPool
    from fluster.actors.protocol.members import Member

_PATIENCE_S = 2.0  # to show a pool must not wait for a cluster that does not answer


def still_view(heading: str, state: object) -> str:
    """HTML of a pool of which no more is known."""
    return view(heading, {"state": state})


async def live_view(heading: str, pool: AsyncActorPool[object]) -> str:
    """HTML of a pool and its members, if the cluster answers soon."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            members = await pool.members()
    except (FlusterError, TimeoutError) as error:
        return still_view(heading, f"unknown: {str(error) or f'nothing came in {_PATIENCE_S:g} s'}")
    columns = ("member", "state", "worker", "job", "restarts", "last error")
    return view(heading, {"members": f"{len(members):,}"}, table(columns, [*map(_row, members)]))


def _row(member: Member) -> tuple[object, ...]:
    return member.endpoint_id, member.state, member.worker_id, member.job_id, member.restarts, member.last_error
