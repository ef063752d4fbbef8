"""Who stands behind a name, as the registry tells it."""

from __future__ import annotations

import json
import math
import os
import select
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self, TypeGuard, cast

from fluster.actors.protocol.frames import JSON, PICKLE, Moment
from fluster_bus.core import subjects
from fluster_bus.core.errors import InvalidMessageError
from fluster_bus.messages import Endpoint, EndpointId, JobId, WorkerId

# What an actor's server tells pools in its endpoint's metadata, beside what the user put there.
OWN_METADATA = "fluster:"
LEAVING = f"{OWN_METADATA}leaving"  # it finishes what it has and takes no more
# Of the last time that it lost its connection, told once it is back:
DISCONNECTED_AT = f"{OWN_METADATA}disconnected-at"  # what was on its way to it then is lost
RECONNECTED_AT = f"{OWN_METADATA}reconnected-at"  # what was sent to all until then it may have missed
CODEC = f"{OWN_METADATA}codec"  # "json": it takes and gives nothing else
TIMEOUTS = f"{OWN_METADATA}timeouts"  # JSON, {method: seconds}
RESTARTING = f"{OWN_METADATA}restarting"  # it has failed, and is being made anew; calls wait in its mailbox
RESTARTS = f"{OWN_METADATA}restarts"  # how often it was, in this process
LAST_ERROR = f"{OWN_METADATA}last-error"  # how it failed last
RETRIES = f"{OWN_METADATA}retries"  # JSON, {method: how often a call that was not delivered is sent again}
DURABLE = f"{OWN_METADATA}durable"  # calls to it are stored
PLACE = f"{OWN_METADATA}place"  # with whom it can share memory

LANES_VARIABLE = "FLUSTER_LANES"  # "off": all calls go over the process's one connection


class MemberState(StrEnum):
    """How a member is."""

    STARTING = "starting"
    """Its task has not registered it yet."""
    READY = "ready"
    """It takes calls."""
    RESTARTING = "restarting"
    """It has failed, and is made anew; calls wait."""
    STOPPING = "stopping"
    """It finishes what it has, and takes no more calls."""
    DEAD = "dead"
    """It has ended, and does not come back."""


@dataclass(frozen=True)
class Member:
    """One actor of a pool. One that is not registered has neither endpoint nor address."""

    endpoint_id: EndpointId
    """The id of its endpoint; empty while it is not registered."""
    name: str
    """The name that it serves."""
    address: str
    """The subject of its calls; empty while it is not registered."""
    job_id: JobId | None = None
    """None: it is served by a process outside of any job."""
    task: int = 0
    """The number of its task in the job, from 0."""
    attempt: int = 0
    """The number of the task's attempt."""
    worker_id: WorkerId | None = None
    """The worker that runs the task."""
    metadata: Mapping[str, str] | None = None
    """What was given to `ActorServer.register`."""
    state: MemberState = MemberState.READY
    """How it is."""
    restarts: int = 0
    """How often its process and the instance within were restarted."""
    last_error: str = ""
    """Why it died or failed last."""
    leaving: bool = False
    """Whether it takes no more calls."""
    disconnected_at: Moment | None = None
    """When it lost its connection last; calls that were on their way to it then are lost."""
    reconnected_at: Moment | None = None
    """When it was back; broadcasts until then it may have missed."""
    timeouts: Mapping[str, float] | None = None
    """{method: seconds}, as its class declares."""
    place: str | None = None
    """The machine and user with whose processes it can share memory."""
    retries: Mapping[str, int] | None = None
    """{method: how often a call that was not delivered is sent again}."""
    codec: str = PICKLE
    """The form of its calls: "pickle" or "json"."""
    is_durable: bool = False
    """Whether calls to it are stored."""

    @classmethod
    def of(cls, endpoint: Endpoint) -> Self:
        """The member that an endpoint of the registry describes.

        Any job in its namespace may have written it. Raises InvalidMessageError when it does not describe an actor of that namespace.
        """
        if not subjects.is_actor_address(endpoint.address, endpoint.namespace):
            raise InvalidMessageError(
                f"invalid address {endpoint.address!r}: expected one of an actor of its namespace"
            )
        try:
            return cls._of(endpoint)
        except (ValueError, TypeError, RecursionError, AttributeError) as error:
            raise InvalidMessageError(f"its metadata cannot be read: {error}") from error

    @classmethod
    def _of(cls, endpoint: Endpoint) -> Self:
        metadata = dict(endpoint.metadata)
        disconnected_at, reconnected_at = metadata.pop(DISCONNECTED_AT, None), metadata.pop(RECONNECTED_AT, None)
        timeouts = metadata.pop(TIMEOUTS, None)
        place = metadata.pop(PLACE, None)
        retries = metadata.pop(RETRIES, None)
        leaving = metadata.pop(LEAVING, None) is not None
        restarting = metadata.pop(RESTARTING, "")
        state = MemberState.RESTARTING if restarting else MemberState.READY
        return cls(
            endpoint_id=endpoint.endpoint_id,
            name=endpoint.name,
            address=endpoint.address,
            job_id=endpoint.job_id,
            task=endpoint.task,
            attempt=endpoint.attempt,
            worker_id=endpoint.worker_id,
            state=MemberState.STOPPING if leaving else state,
            restarts=int(metadata.pop(RESTARTS, "0")),
            last_error=metadata.pop(LAST_ERROR, ""),
            leaving=leaving,
            disconnected_at=None if disconnected_at is None else _moment(disconnected_at),
            reconnected_at=None if reconnected_at is None else _moment(reconnected_at),
            codec=metadata.pop(CODEC, PICKLE),
            is_durable=metadata.pop(DURABLE, None) is not None,
            timeouts=None if timeouts is None else _numbers(json.loads(timeouts)),
            place=place,
            retries=None if retries is None else _counts(json.loads(retries)),
            metadata=metadata,
        )

    @property
    def takes_json_only(self) -> bool:
        return self.codec == JSON

    @property
    def hears_lanes(self) -> bool:
        """True when a call that a thread carries itself is heard and answered there."""
        return not (self.takes_json_only or self.is_durable)

    @classmethod
    def at(cls, name: str, address: str) -> Self:
        """The member that listens at a fixed address."""
        return cls(endpoint_id=EndpointId(subjects.last_token(address)), name=name, address=address)


def _moment(text: str) -> Moment:
    moment = Moment(*json.loads(text))
    if not isinstance(moment[0], str) or not all(isinstance(each, int | float) for each in moment[1:]):
        raise ValueError(f"invalid time {text[:100]!r}")
    return moment


def _numbers(told: object) -> dict[str, float]:
    if not _are_numbers(told):
        raise ValueError(f"expected numbers by method, not {str(told)[:100]!r}")
    return told


def _are_numbers(told: object) -> TypeGuard[dict[str, float]]:
    return isinstance(told, dict) and all(
        type(each) in (int, float) and 0 <= each < math.inf for each in cast("dict[str, float]", told).values()
    )


def _counts(told: object) -> dict[str, int]:
    return {name: int(each) for name, each in _numbers(told).items()}


def lanes_are_on() -> bool:
    """Whether this process has lanes, as a caller and as an actor: $FLUSTER_LANES does not turn them off."""
    return hasattr(select, "poll") and os.environ.get(LANES_VARIABLE, "") != "off"


def share_memory(members: Iterable[Member]) -> bool:
    """Whether all of them can read what this process lends."""
    from fluster_bus.payloads import arenas

    here = arenas.place()
    return here is not None and all(member.place == here for member in members)
